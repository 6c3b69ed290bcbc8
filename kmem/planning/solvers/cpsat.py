"""Boolean programs, and OR-tools' CP-SAT to solve them if it is installed.

A Boolean program has variables of 0 or 1, inequalities, and a cost to make
small. The solver runs beside this process, and is started once for many
programs; see `cpsat_process.py` for why.
"""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping

# CP-SAT's own parameters, by what they are good for. Parts of a graph:
IN_PARTS = {"linearization_level": 2}
# Small programs, proved in a fraction of the time: the bound rises until a
# solution has it. In large ones nothing is found.
BY_CORES = {"linearization_level": 0, "optimize_with_core": 1}
# Programs that are almost linear: what would make them smaller takes longer.
AS_THEY_ARE = {"linearization_level": 2, "cp_model_presolve": 0}


@dataclasses.dataclass
class BooleanProgram:
    """Minimises a sum of `costs`, where sums of variables have bounds.

    A term is a pair of a factor and a variable: a number from `add`, or
    `True` or `False` where it is known.
    """

    costs: list[int] = dataclasses.field(default_factory=list)
    hints: list[int | None] = dataclasses.field(default_factory=list)
    constraints: list[tuple] = dataclasses.field(default_factory=list)

    def add(self, cost: int = 0, hint: bool | None = None) -> int:
        """A new variable."""
        self.costs.append(cost)
        self.hints.append(None if hint is None else int(hint))
        return len(self.costs) - 1

    def at_most(self, terms: list[tuple], bound: int) -> None:
        """The sum of the terms is `bound` or less."""
        variables, factors = [], []
        for factor, variable in terms:
            if isinstance(variable, bool):
                bound -= factor * variable
            elif factor:
                variables.append(variable)
                factors.append(factor)
        # What cannot be violated would only be read and thrown away.
        if sum(factor for factor in factors if factor > 0) > bound:
            self.constraints.append((variables, factors, bound))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What CP-SAT found out.

    Attributes:
        values: 0 or 1 for each variable, or `None` if nothing was found.
        bound: No solution costs less.
        is_optimal: Whether this was proved to be the best.
        is_infeasible: Whether it was proved that there is no solution.
    """

    values: list[int] | None
    bound: float
    is_optimal: bool
    is_infeasible: bool


def is_available() -> bool:
    return importlib.util.find_spec("ortools") is not None


class CpSat:
    """A running solver, to be used in a `with` statement."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def __enter__(self) -> "CpSat":
        script = pathlib.Path(__file__).with_name("cpsat_process.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def solve(
        self,
        program: BooleanProgram,
        seconds_limit: float,
        parameters: Mapping[str, int] = IN_PARTS,
    ) -> Answer:
        """Looks for the cheapest solution for at most `seconds_limit`."""
        question = {
            **dataclasses.asdict(program),
            "seconds_limit": seconds_limit,
            "seed": self.seed,
            "parameters": dict(parameters),
        }
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("CP-SAT's process has no pipes")
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(
                "CP-SAT's process must answer every question. It ended, with "
                f"exit status {self._process.wait()}"
            )
        return Answer(**json.loads(line))
