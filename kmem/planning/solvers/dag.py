"""The least time in a budget, on any graph.

Greedy schedules to begin from; then, in turn until the time is over, local
search and exact answers for a part of the graph (large-neighbourhood search,
with `intervals`). Parts grow while CP-SAT is quick; when one is the whole
graph, the answer is proved best among staged schedules. It is proved best of
all where it meets the bound of a moment (`moment`). Without OR-tools (the
extra `plan`) local search is all there is: it still finds a plan, and CP-SAT
makes it better.

Not done here: chains, for which a dynamic program is exact and quicker; and
solving equal parts, such as the blocks of a transformer, once for all.
"""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable

from kmem.planning.bounds import peak_lower_bound
from kmem.planning.bounds import seconds_by_moment
from kmem.planning.bounds import seconds_lower_bound
from kmem.planning.errors import InfeasibleBudget
from kmem.planning.graph import Graph
from kmem.planning.simulate import simulate
from kmem.planning.solvers import cpsat
from kmem.planning.solvers.greedy import HEURISTICS
from kmem.planning.solvers.greedy import run_within
from kmem.planning.solvers.intervals import open_slots
from kmem.planning.solvers.intervals import resolve
from kmem.planning.solvers.local import LocalSearch
from kmem.planning.solvers.moment import seconds_after
from kmem.planning.solvers.neighbourhood import choose

_TURN_SECONDS = 4.0
# How many operations CP-SAT gets at first: more and more, while it is quick.
_FIRST_SIZE = 40
# How long to try to prove a small graph's best schedule first.
_PROOF_SECONDS = 2.0
# At how many moments, and for which share of the time, to look for a bound.
_MOMENTS = 3
# What bounds lose where times are rounded to integers.
_ROUNDING = 1e-5
_BOUND_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
class Solution:
    """A schedule within the budget.

    Attributes:
        schedule: Indexes of operations, in the order in which they run.
        seconds: The time of the schedule.
        peak_bytes: Its peak.
        lower_bound_seconds: No schedule in the budget takes less.
        is_optimal: Whether this is proved the best, of all schedules or of
            those that `intervals` calls staged, but for 1e-5 of the time.
    """

    schedule: tuple[int, ...]
    seconds: float
    peak_bytes: int
    lower_bound_seconds: float
    is_optimal: bool

    @property
    def gap(self) -> float:
        """How much of the time may be too much: 0.05 for 5%."""
        if self.is_optimal or not self.seconds:
            return 0.0
        return 1 - self.lower_bound_seconds / self.seconds


def solve(
    graph: Graph,
    budget_bytes: int,
    seconds_limit: float = 60.0,
    seed: int = 0,
    progress: Callable[[float, float], None] | None = None,
) -> Solution:
    """Looks for the schedule that takes the least time within a budget.

    Args:
        graph: The operations and their tensors.
        budget_bytes: The peak that the schedule may have.
        seconds_limit: How long to search.
        seed: For the search. Results still depend on the machine's speed.
        progress: Called with the seconds that have passed and the seconds of
            the best schedule, whenever there is a better one.

    Returns:
        A `Solution`.

    Raises:
        InfeasibleBudget: If no schedule was found within the budget.

    Example:

    ```python
    from kmem.planning.graph import Graph
    from kmem.planning.graph import Operation
    from kmem.planning.solvers.dag import solve

    graph = Graph(
        operations=(
            Operation("a", (), (0,), seconds=1.0),
            Operation("b", (0,), (1,), seconds=1.0),
            Operation("c", (1,), (2,), seconds=1.0),
            Operation("d", (0, 2), (3,), seconds=1.0),
        ),
        tensor_bytes=(10, 20, 30, 5),
    )
    solve(graph, budget_bytes=50).schedule  # (0, 1, 2, 0, 3)
    ```
    """
    search = _Search(graph, budget_bytes, seconds_limit, seed, progress)
    search.begin()
    if not search.is_optimal:
        search.improve()
    simulation = simulate(graph, tuple(search.best))
    return Solution(
        schedule=tuple(search.best),
        seconds=simulation.seconds,
        peak_bytes=simulation.peak_bytes,
        lower_bound_seconds=min(search.bound, simulation.seconds),
        is_optimal=search.is_optimal,
    )


class _Search:
    """The best schedule so far, and the ways to a better one."""

    def __init__(self, graph, budget_bytes, seconds_limit, seed, progress):
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.started = time.monotonic()
        self.seconds_limit = seconds_limit
        self.seed = seed
        self.random = random.Random(seed)
        self.progress = progress
        self.local = LocalSearch(
            graph, budget_bytes, seed, self.started + seconds_limit
        )
        self.bound = seconds_lower_bound(graph, budget_bytes)
        self.best: list[int] = []
        self.size = _FIRST_SIZE
        self.num_recomputable = sum(o.recomputable for o in graph.operations)
        self.best_seconds = float("inf")
        self.is_optimal = False

    @property
    def passed(self) -> float:
        return time.monotonic() - self.started

    def _accept(self, steps: list[int]) -> None:
        seconds = self.local.cost(steps)
        # Sums in another order differ in the last digits.
        if seconds >= self.best_seconds * (1 - 1e-12):
            return
        self.best, self.best_seconds = steps, seconds
        self._compare()
        if self.progress:
            self.progress(self.passed, seconds)

    def begin(self) -> None:
        """Finds a schedule within the budget by any means."""
        program = list(self.graph.program)
        if self.local.peak(program) <= self.local.budget_bytes:
            self._accept(program)
            self.is_optimal = True
            return
        if peak_lower_bound(self.graph) <= self.budget_bytes:
            self._construct(program)
        if not self.best:
            self._descend(program)

    def _construct(self, program: list[int]) -> None:
        """The best of what the heuristics find in a third of the time."""
        share, found = self.seconds_limit / 3, []
        for heuristic in HEURISTICS.values():
            if found and self.passed > share:
                break
            schedule = run_within(self.graph, self.budget_bytes, heuristic)
            if schedule is not None:
                found.append(list(schedule))
        for noise in (0.0, 0.3, 0.3):
            if found and self.passed > share:
                break
            repaired = self.local.repair(program, 4 * self.graph.seconds, noise)
            if repaired is not None:
                found.append(repaired)
        found.sort(key=self.local.cost)
        for steps in found:
            self._accept(steps)
            if self.passed < share:
                self._accept(self.local.tighten(steps))

    def _descend(self, program: list[int]) -> None:
        """Lowers the peak little by little, to the budget or as far as it
        goes."""
        steps, wanted = program, self.local.budget_bytes
        peak = self.local.peak(steps)
        step, give_up = 0.1, 5 * self.graph.seconds
        feasible = peak_lower_bound(self.graph) <= self.budget_bytes
        floor = max(wanted, peak_lower_bound(self.graph) - self._constant)
        share = self.seconds_limit / (2 if feasible else 10)
        while peak > wanted and step > 0.002 and self.passed < share:
            target = max(floor, int(peak * (1 - step)))
            if target >= peak:
                break
            self.local.budget_bytes = target
            for start, noise in itertools.product(
                (steps, program), (0.0, 0.3, 0.5)
            ):
                found = self.local.repair(start, give_up, noise)
                if found is not None:
                    steps = self.local.tighten(found)
                    peak = self.local.peak(steps)
                    break
            else:
                step /= 2
        self.local.budget_bytes = wanted
        if peak > wanted:
            raise InfeasibleBudget(
                self.budget_bytes,
                peak + self._constant,
                peak_lower_bound(self.graph),
            )
        self._accept(self.local.tighten(steps))

    @property
    def _constant(self) -> int:
        return self.graph.constant_bytes

    def improve(self) -> None:
        if not cpsat.is_available():
            self._anneal(self.seconds_limit)
            return
        anneal_seconds = _TURN_SECONDS
        with cpsat.CpSat(self.seed) as solver:
            if self.size >= len(self.graph.operations):
                self._prove(solver)
            if not self.is_optimal:
                self._raise_bound(solver)
            while not self.is_optimal and self.passed < self.seconds_limit:
                before = self.best_seconds
                self._anneal(self._turn(anneal_seconds))
                # Where local search is stuck, exact answers get the time.
                better = self.best_seconds < before
                anneal_seconds *= 2 if better else 0.5
                anneal_seconds = min(anneal_seconds, _TURN_SECONDS)
                until = self._turn(_TURN_SECONDS)
                while not self.is_optimal and self.passed < until:
                    self._resolve_part(solver)

    def _turn(self, seconds: float) -> float:
        return min(self.passed + seconds, self.seconds_limit)

    def _prove(self, solver: cpsat.CpSat) -> None:
        """Tries the whole of a small graph for a short time."""
        operations = set(self.graph.program)
        free = {i for i in operations if self.graph.operations[i].recomputable}
        seconds = min(_PROOF_SECONDS, self.seconds_limit / 2)
        answer = self._resolve(free, solver, seconds, cpsat.BY_CORES)
        self.is_optimal = self.is_optimal or answer.is_optimal

    def _raise_bound(self, solver: cpsat.CpSat) -> None:
        """Bounds the time by the moments that look worst."""
        graph, budget_bytes = self.graph, self.budget_bytes
        again = seconds_by_moment(graph, budget_bytes)
        worst = sorted(graph.program, key=lambda i: -again[i])[:_MOMENTS]
        seconds = _BOUND_SHARE * self.seconds_limit / _MOMENTS
        for moment in worst:
            found = seconds_after(graph, moment, budget_bytes, solver, seconds)
            self.bound = max(self.bound, graph.seconds + found)
        self._compare()

    def _compare(self) -> None:
        if self.best_seconds <= self.bound * (1 + _ROUNDING):
            self.is_optimal = True

    def _resolve(self, free, solver, seconds, parameters=cpsat.IN_PARTS):
        """Lets CP-SAT choose when some operations run again."""
        graph = self.graph
        stages = set(range(len(graph.operations) + 1))
        slots = open_slots(graph, tuple(self.best), free, stages)
        answer = resolve(
            graph, slots, self.budget_bytes, solver, seconds, parameters
        )
        if answer.schedule is not None:
            steps = self.local.tighten(list(answer.schedule))
            if self.local.peak(steps) <= self.local.budget_bytes:
                self._accept(steps)
        return answer

    def _resolve_part(self, solver: cpsat.CpSat) -> None:
        """Solves a part of the best schedule exactly; next time a larger one
        if that was quick, until the part is the whole."""
        graph = self.graph
        free = choose(self.local, self.best, self.size, self.random)
        left = max(0.1, self.seconds_limit - self.passed)
        whole = len(free) == self.num_recomputable
        forward = self.size == graph.num_forward
        if whole or forward:
            # Either proves much, and takes long.
            left /= 2
        else:
            left = min(left, _TURN_SECONDS)
        begin = self.passed
        answer = self._resolve(free, solver, left)
        if not answer.is_optimal:
            self.size = max(4, int(self.size * 0.8))
        elif whole:
            self.is_optimal = True
        elif forward or self.passed - begin < _TURN_SECONDS / 4:
            self._grow()

    def _grow(self) -> None:
        count = len(self.graph.operations)
        forward = self.graph.num_forward
        larger = min(count, int(self.size * 1.15) + 1)
        if self.size < forward < larger:
            larger = forward
        elif self.size >= forward:
            larger = count
        self.size = larger

    def _anneal(self, until: float) -> None:
        """Ruins and repairs; a little worse is good enough at first."""
        current, seconds = self.best, self.best_seconds
        begin = self.passed
        while not self.is_optimal and self.passed < until:
            left = (until - self.passed) / (until - begin)
            slack = 0.05 * left * (self.best_seconds - self.graph.seconds)
            found = self.local.repair(
                self.local.ruin(current), seconds + slack, noise=0.4
            )
            if found is None:
                continue
            current = self.local.tighten(found)
            seconds = self.local.cost(current)
            self._accept(current)
