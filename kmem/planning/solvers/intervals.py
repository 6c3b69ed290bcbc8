"""Solves the recomputations of some operations exactly, the rest as it is.

For every operation that is free, and every stage (just before an operation
runs for the first time) that is open, a slot says whether it runs again
there; between two events of a tensor, an interval says whether it is kept.
These are the retention intervals of Moccasin (Bartan et al., ICML 2023) in the
stages of Checkmate (Jain et al., MLSys 2020), as Booleans for CP-SAT. With
all operations free and all stages open the answer is the best of all staged
schedules: those in which, between two first runs, operations run again in the
program's order, each at most once, and each for one that follows there. Other
schedules can be better, on graphs that are made for it.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping

from kmem.planning.graph import Graph
from kmem.planning.solvers.cpsat import IN_PARTS
from kmem.planning.solvers.cpsat import BooleanProgram
from kmem.planning.solvers.cpsat import CpSat

# CP-SAT wants integers, and not too large ones. Rounding bytes up keeps the
# budget; most sizes are multiples of a number, and nothing is rounded.
_BYTE_STEPS = 1 << 31
_SECOND_STEPS = 10**7


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in the schedule where an operation runs, or could run."""

    index: int
    free: bool
    runs: bool


@dataclasses.dataclass(frozen=True)
class Resolved:
    """An answer of CP-SAT.

    Attributes:
        schedule: The steps, or `None` if none were found.
        bound_seconds: No schedule with these slots takes less.
        is_optimal: Whether nothing better has these slots.
        is_infeasible: Whether no schedule has these slots.
    """

    schedule: tuple[int, ...] | None
    bound_seconds: float
    is_optimal: bool
    is_infeasible: bool


def open_slots(
    graph: Graph,
    steps: tuple[int, ...],
    operations: set[int],
    stages: set[int],
) -> list[Slot]:
    """The steps with slots for `operations` at `stages`.

    Stage `i` is before operation `i` runs first; stage `len(operations)` is
    the end. What nothing in a stage could read has no slot there.
    """
    slots: list[Slot] = []
    again: list[int] = []
    seen: set[int] = set()
    descending = sorted(operations, reverse=True)
    for index in (*steps, len(graph.operations)):
        if index in seen:
            again.append(index)
            continue
        group = [Slot(i, i in operations, True) for i in again]
        if index in stages:
            for free in _readable(graph, descending, index, again):
                at = bisect.bisect_left(group, free, key=_index)
                group.insert(at, Slot(free, True, False))
        slots += group
        if index < len(graph.operations):
            slots.append(Slot(index, False, True))
        seen.add(index)
        again = []
    return slots


def _index(slot: Slot) -> int:
    return slot.index


def _readable(graph: Graph, descending, stage: int, again) -> list[int]:
    """The operations that could run for a stage, with others of them."""
    operations = graph.operations
    if stage < len(operations):
        wanted = set(operations[stage].inputs)
    else:
        wanted = set(graph.results)
    for index in again:
        wanted.update(operations[index].inputs)
    found = []
    for index in descending:
        if index < stage and wanted.intersection(operations[index].outputs):
            wanted.update(operations[index].inputs)
            if index not in again:
                found.append(index)
    return found


def resolve(
    graph: Graph,
    slots: list[Slot],
    budget_bytes: int,
    solver: CpSat,
    seconds_limit: float,
    parameters: Mapping[str, int] = IN_PARTS,
) -> Resolved:
    """Chooses which free slots run, for the least time in the budget.

    Args:
        graph: The operations and their tensors.
        slots: From `open_slots`.
        budget_bytes: The peak that the schedule may have.
        solver: CP-SAT.
        seconds_limit: How long to search.
        parameters: How, see `cpsat`.
    """
    builder = _Builder(graph, slots, budget_bytes)
    answer = solver.solve(builder.build(), seconds_limit, parameters)
    schedule = None
    if answer.values is not None:
        values = answer.values
        schedule = tuple(
            slot.index
            for slot, runs in zip(slots, builder.runs, strict=True)
            if (runs if isinstance(runs, bool) else values[runs])
        )
    always = sum(graph.operations[s.index].seconds for s in slots if not s.free)
    bound_seconds = always + max(answer.bound, 0.0) * builder.second_unit
    return Resolved(
        schedule=schedule,
        bound_seconds=bound_seconds,
        is_optimal=answer.is_optimal,
        is_infeasible=answer.is_infeasible,
    )


def _byte_unit(graph: Graph, budget_bytes: int) -> int:
    workspaces = [o.workspace_bytes for o in graph.operations]
    divisor = max(1, math.gcd(*graph.tensor_bytes, *workspaces))
    return divisor * max(1, -(-budget_bytes // (divisor * _BYTE_STEPS)))


class _Builder:
    """The variables and constraints of `resolve`."""

    def __init__(self, graph: Graph, slots: list[Slot], budget_bytes: int):
        self.graph = graph
        self.slots = slots
        self.byte_unit = _byte_unit(graph, budget_bytes)
        self.budget = (budget_bytes - graph.constant_bytes) // self.byte_unit
        self.second_unit = max(graph.seconds, 1e-12) / _SECOND_STEPS
        self.program = BooleanProgram()
        self.runs: list = [True] * len(slots)
        # What is in memory in each slot: bytes, and a variable or `True`.
        self.terms: list[list[tuple]] = [[] for _ in slots]

    def build(self) -> BooleanProgram:
        for at, slot in enumerate(self.slots):
            operation = self.graph.operations[slot.index]
            if slot.free:
                # Rounded down, so that the bound stays one.
                cost = math.floor(operation.seconds / self.second_unit + 1e-6)
                self.runs[at] = self.program.add(cost, slot.runs)
            workspace = self._bytes(operation.workspace_bytes)
            self.terms[at].append((workspace, self.runs[at]))
        for tensor, events in self._events().items():
            self._keep(tensor, events)
        self._limit()
        self._read_in_stage()
        return self.program

    def _read_in_stage(self) -> None:
        """What runs again is read before its stage ends."""
        operations = self.graph.operations
        seen: set[int] = set()
        stage: list[int] = []
        for at, slot in enumerate(self.slots):
            stage.append(at)
            if slot.index in seen:
                continue
            seen.add(slot.index)
            readers: dict[int, list] = {}
            for place in reversed(stage):
                runs = self.runs[place]
                operation = operations[self.slots[place].index]
                if self.slots[place].free:
                    found = {
                        reader
                        for tensor in operation.outputs
                        for reader in readers.get(tensor, ())
                    }
                    self.program.at_most(
                        [(1, runs), *((-1, reader) for reader in found)], 0
                    )
                for tensor in operation.inputs:
                    readers.setdefault(tensor, []).append(runs)
            stage = []

    def _bytes(self, num_bytes: int) -> int:
        return -(-num_bytes // self.byte_unit)

    def _events(self) -> dict[int, list[tuple[int, bool]]]:
        """Tensor -> the slots that read or make it, and whether they make."""
        events: dict[int, list[tuple[int, bool]]] = {}
        for at, slot in enumerate(self.slots):
            operation = self.graph.operations[slot.index]
            for tensor in set(operation.inputs) - self.graph.constants:
                events.setdefault(tensor, []).append((at, False))
            for tensor in operation.outputs:
                events.setdefault(tensor, []).append((at, True))
        for tensor in sorted(self.graph.results - self.graph.constants):
            events[tensor].append((len(self.slots), False))
        return events

    def _keep(self, tensor: int, events: list[tuple[int, bool]]) -> None:
        """Whether the tensor is kept, from each of its events to the next."""
        program = self.program
        size = self._bytes(self.graph.tensor_bytes[tensor])
        before: int | bool = False
        for (at, makes), following in zip(
            events, [*events[1:], None], strict=True
        ):
            after = self._kept_until(following)
            if at < len(self.slots):
                runs = self.runs[at]
                self.terms[at].append((size, before))
                if makes:
                    # What is made anew was not kept until now.
                    self.terms[at].append((size, runs))
                    program.at_most([(1, runs), (1, before)], 1)
                    program.at_most([(1, after), (-1, runs), (-1, before)], 0)
                else:
                    program.at_most([(1, runs), (-1, before)], 0)
                    program.at_most([(1, after), (-1, before)], 0)
            if following and after is not False:
                for between in range(at + 1, following[0]):
                    self.terms[between].append((size, after))
            before = after

    def _kept_until(self, event: tuple[int, bool] | None) -> int | bool:
        if event is None:
            return False
        at, makes = event
        if at < len(self.slots) and self.slots[at].free:
            return self.program.add()
        # What a step reads was kept, what it makes anew was not.
        return not makes

    def _limit(self) -> None:
        """Keeps the budget: of slots with the same variables, the fullest is
        enough."""
        fullest: dict[tuple, int] = {}
        for terms in self.terms:
            known = sum(size for size, kept in terms if kept is True)
            variables = tuple(
                (size, kept)
                for size, kept in terms
                if size and not isinstance(kept, bool)
            )
            fullest[variables] = max(known, fullest.get(variables, 0))
        for variables, known in fullest.items():
            self.program.at_most(list(variables), self.budget - known)
