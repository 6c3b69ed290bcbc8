"""Runs a program in a budget and drops a tensor whenever memory runs out.

What goes first is what costs least to make again for the bytes it frees and
the time they stay free, cost / (bytes x time). The heuristics of DTR (Kirisame
et al., ICLR 2021) and MSPS (Peng et al., Capuchin, ASPLOS 2020) look back, at
what has been evicted and when a tensor was last read. Here the program is
known, so one can also look ahead, to when it is read next (Belady, 1966).

This is not DTR at work on a model, but the same idea on a drawing of one. It
makes schedules to begin from: it never takes a decision back.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from kmem.planning.graph import Graph
from kmem.planning.solvers import evicted


@dataclasses.dataclass(frozen=True)
class Heuristic:
    """What to drop first.

    Attributes:
        cost: Makes what knows the cost of making a tensor again.
        stale: Counts the time since a tensor was touched.
        ahead: Counts the time until the program reads it next.
    """

    cost: Callable[[Graph], evicted.Costs]
    stale: bool = False
    ahead: bool = False


# Those that find the best more often come first, for who has little time.
HEURISTICS = {
    "MSPS": Heuristic(evicted.Ancestors),
    "h_DTR": Heuristic(evicted.Ancestors, stale=True),
    "next_read": Heuristic(evicted.Ancestors, ahead=True),
    "h_DTR_eq": Heuristic(evicted.Neighbourhood, stale=True),
    "next_read_eq": Heuristic(evicted.Neighbourhood, ahead=True),
    "h_DTR_local": Heuristic(evicted.Own, stale=True),
}


def run_within(
    graph: Graph,
    budget_bytes: int,
    heuristic: Heuristic,
    seconds_limit: float | None = None,
) -> tuple[int, ...] | None:
    """Returns a schedule within `budget_bytes`, or `None` if this fails.

    Args:
        graph: The operations and their tensors.
        budget_bytes: The peak that the schedule may have.
        heuristic: What to drop first, such as one of `HEURISTICS`.
        seconds_limit: When to give up; four times the program's time if left
            out.

    Example:

    ```python
    from kmem.planning.graph import Graph
    from kmem.planning.graph import Operation
    from kmem.planning.solvers.greedy import HEURISTICS
    from kmem.planning.solvers.greedy import run_within

    graph = Graph(
        operations=(
            Operation("a", (), (0,), seconds=1.0),
            Operation("b", (0,), (1,), seconds=1.0),
            Operation("c", (1,), (2,), seconds=1.0),
            Operation("d", (0, 2), (3,), seconds=1.0),
        ),
        tensor_bytes=(10, 20, 30, 5),
    )
    run_within(graph, 50, HEURISTICS["MSPS"])  # (0, 1, 2, 0, 3)
    ```
    """
    if seconds_limit is None:
        seconds_limit = 4 * graph.seconds
    return _Run(graph, budget_bytes, heuristic).schedule(seconds_limit)


class _Run:
    """Memory, as the program goes on."""

    def __init__(self, graph: Graph, budget_bytes: int, heuristic: Heuristic):
        count = len(graph.tensor_bytes)
        self.graph = graph
        self.free_bytes = budget_bytes - graph.constant_bytes
        self.heuristic = heuristic
        self.costs = heuristic.cost(graph)
        self.sizes = np.array(graph.tensor_bytes, float)
        self.resident = bytearray(count)
        for tensor in graph.constants:
            self.resident[tensor] = 1
        self.locks = [0] * count
        self.evictable = np.zeros(count, bool)
        self.touched = np.zeros(count)
        self.seconds = 0.0
        self.starts = np.cumsum([0.0] + [o.seconds for o in graph.operations])
        self.reads = [list(reversed(readers)) for readers in graph.readers]
        for tensor in graph.results:
            self.reads[tensor].insert(0, len(graph.operations))
        self.next_read = np.array(
            [self.starts[reads[-1]] if reads else 0 for reads in self.reads]
        )
        self.steps: list[int] = []
        # Dividing by a waiting time of zero would hide the cost.
        self.tick = max(graph.seconds, 1e-12) / (len(graph.operations) + 1)

    def schedule(self, seconds_limit: float) -> tuple[int, ...] | None:
        operations = self.graph.operations
        for index in self.graph.program:
            pending = [index]
            self._lock(operations[index].inputs)
            while pending:
                missing = self._missing(operations[pending[-1]].inputs)
                if missing is not None:
                    maker = self.graph.maker[missing]
                    if not operations[maker].recomputable:
                        return None
                    pending.append(maker)
                    self._lock(operations[maker].inputs)
                elif not self._make_room(pending[-1], index):
                    return None
                else:
                    self._run(pending.pop(), index)
                if self.seconds > seconds_limit:
                    return None
        return tuple(self.steps)

    def _missing(self, tensors) -> int | None:
        for tensor in tensors:
            if not self.resident[tensor]:
                return tensor
        return None

    def _lock(self, tensors) -> None:
        for tensor in tensors:
            self.locks[tensor] += 1
            self.evictable[tensor] = False

    def _make_room(self, index: int, program: int) -> bool:
        operation = self.graph.operations[index]
        need = operation.workspace_bytes
        for tensor in operation.outputs:
            # It is made anew: if it is here, it need not be, but it stays.
            self.evictable[tensor] = False
            if not self.resident[tensor]:
                need += self.graph.tensor_bytes[tensor]
        while need > self.free_bytes:
            victim = self._victim(program)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _victim(self, program: int) -> int | None:
        candidates = np.flatnonzero(self.evictable)
        if not len(candidates):
            return None
        frees = self.sizes[candidates]
        if self.heuristic.stale:
            frees = frees * (
                self.seconds - self.touched[candidates] + self.tick
            )
        if self.heuristic.ahead:
            frees = frees * (
                self.next_read[candidates] - self.starts[program] + self.tick
            )
        costs = self.costs.seconds(candidates)
        return int(candidates[np.argmin(costs / frees)])

    def _drop(self, tensor: int) -> None:
        self.resident[tensor] = 0
        self.evictable[tensor] = False
        self.free_bytes += self.graph.tensor_bytes[tensor]
        self.costs.drop(tensor)

    def _run(self, index: int, program: int) -> None:
        operation = self.graph.operations[index]
        self.steps.append(index)
        self.seconds += operation.seconds
        for tensor in operation.outputs:
            if not self.resident[tensor]:
                self.resident[tensor] = 1
                self.free_bytes -= self.graph.tensor_bytes[tensor]
                self.costs.restore(tensor)
            self._touch(tensor)
        for tensor in operation.inputs:
            self.locks[tensor] -= 1
            if index == program and tensor not in self.graph.constants:
                self.reads[tensor].pop()
                if self.reads[tensor]:
                    ahead = self.starts[self.reads[tensor][-1]]
                    self.next_read[tensor] = ahead
            self._touch(tensor)

    def _touch(self, tensor: int) -> None:
        """Lets go of a tensor that nothing waits for."""
        if tensor in self.graph.constants or self.locks[tensor]:
            return
        self.touched[tensor] = self.seconds
        if not self.reads[tensor]:
            self._drop(tensor)
            return
        operation = self.graph.operations[self.graph.maker[tensor]]
        self.evictable[tensor] = (
            operation.recomputable and self.sizes[tensor] > 0
        )
