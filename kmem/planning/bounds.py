"""What no schedule can beat: bounds on the peak, and on the time in a budget.

They hold for every schedule whose first runs keep the program's order. When
an operation runs for the first time, what was made before and is read after
is either in memory then or made again later. The cheapest choice of what to
make again, by its time per byte, is a fractional knapsack; an operation that
made several such tensors is one item. Moments are looked at one by one: that
different moments make different operations run again is not added up, and
neither is the time to make their inputs again.
"""

import math
from collections.abc import Iterator

import numpy as np

from kmem.planning.graph import Graph


class InfeasibleBudget(ValueError):
    """No schedule is known that fits.

    Attributes:
        budget_bytes: The budget that was asked for.
        smallest_bytes: The smallest peak that is known to be possible.
        lower_bound_bytes: No schedule has a smaller peak; between the two,
            nobody knows.
    """

    def __init__(
        self,
        budget_bytes: int,
        smallest_bytes: int,
        lower_bound_bytes: int,
        name: str = "budget_bytes",
        written: str = "",
    ):
        received = f"{name}={written or budget_bytes}"
        if written not in ("", str(budget_bytes)):
            received += f" ({budget_bytes} bytes)"
        super().__init__(
            f"`{name}` must be at least {smallest_bytes} bytes, the smallest "
            "peak that is known to be possible; none is possible below "
            f"{lower_bound_bytes} bytes. Received: {received}"
        )
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.lower_bound_bytes = lower_bound_bytes


def peak_lower_bound(graph: Graph) -> int:
    """Returns bytes that every schedule needs at some moment: the most that an
    operation needs, with what cannot be made again; at least all results."""
    fixed = np.array([not op.recomputable for op in graph.operations], bool)
    # Of what waits in host memory nothing is known.
    fixed &= graph.host_seconds is None
    at_the_end = graph.results - graph.constants
    peak = graph.constant_bytes + sum(
        graph.tensor_bytes[tensor] for tensor in at_the_end
    )
    for required, waiting in _moments(graph):
        peak = max(peak, required + int(waiting[fixed].sum()))
    return peak


def check_budget(graph: Graph, budget_bytes: int, smallest_bytes: int) -> None:
    """Raises an `InfeasibleBudget` if the smallest peak that is known is
    larger."""
    if smallest_bytes > budget_bytes:
        raise InfeasibleBudget(
            budget_bytes, smallest_bytes, peak_lower_bound(graph)
        )


def seconds_lower_bound(graph: Graph, budget_bytes: int) -> float:
    """Returns seconds that every schedule within a budget takes, at least the
    program's; `math.inf` where the bound shows that no schedule fits."""
    if peak_lower_bound(graph) > budget_bytes:
        return math.inf
    if graph.host_seconds is not None:
        return graph.seconds
    seconds = np.array(
        [op.seconds if op.recomputable else np.inf for op in graph.operations]
    )
    again = 0.0
    for required, waiting in _moments(graph):
        items = np.flatnonzero(waiting)
        excess = required + int(waiting[items].sum()) - budget_bytes
        if excess > 0:
            least = _knapsack(seconds[items], waiting[items], excess)
            again = max(again, least)
    return graph.seconds + again


def _knapsack(seconds, num_bytes, excess: int) -> float:
    """The least time for `excess` bytes, if items could be cut."""
    order = np.argsort(seconds / num_bytes)
    seconds, num_bytes = seconds[order], num_bytes[order]
    total = np.cumsum(num_bytes)
    last = int(np.searchsorted(total, excess))
    part = 1 - (total[last] - excess) / num_bytes[last]
    return float(seconds[:last].sum() + part * seconds[last])


def _moments(graph: Graph) -> Iterator[tuple[int, np.ndarray]]:
    """For each operation's first run: the bytes that it needs, and for each
    operation the bytes that it made before and that are read only later."""
    sizes, constants = graph.tensor_bytes, graph.constants
    count = len(graph.operations)
    last_read = [readers[-1] if readers else -1 for readers in graph.readers]
    for tensor in graph.results:
        last_read[tensor] = count
    ends: list[list[int]] = [[] for _ in range(count + 1)]
    waiting = np.zeros(count, np.int64)
    for index, operation in enumerate(graph.operations):
        for tensor in ends[index]:
            waiting[graph.maker[tensor]] -= sizes[tensor]
        touched = set(operation.inputs).difference(constants)
        now = waiting.copy()
        for tensor in touched:
            # Read for the last time, it is not waiting any more.
            if last_read[tensor] > index:
                now[graph.maker[tensor]] -= sizes[tensor]
        required = sum(
            sizes[tensor] for tensor in touched.union(operation.outputs)
        )
        required += graph.constant_bytes + operation.workspace_bytes
        yield required, now
        for tensor in operation.outputs:
            if last_read[tensor] > index + 1:
                waiting[index] += sizes[tensor]
                ends[last_read[tensor]].append(tensor)
