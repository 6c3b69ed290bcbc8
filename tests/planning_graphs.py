"""Graphs whose best schedules are known."""

import heapq
import itertools

import numpy as np

from kmem.planning.graph import Graph
from kmem.planning.graph import Operation


def unit_chain(num_forward):
    """Checkmate's: a forward pass, a loss, and a backward pass that reads
    the gradient and what the forward pass made, all of size and time 1."""
    operations = []
    for index in range(num_forward + 1):
        inputs = (index - 1,) if index else ()
        operations.append(Operation("forward", inputs, (index,), 1.0))
    for index in range(num_forward - 1, -1, -1):
        made = len(operations)
        operations.append(
            Operation(
                "backward",
                (made - 1, index),
                (made,),
                1.0,
                recomputable=False,
            )
        )
    last = len(operations) - 1
    return Graph(
        operations=tuple(operations),
        tensor_bytes=(1,) * len(operations),
        results=frozenset({last}),
        num_forward=num_forward + 1,
    )


def random_graph(seed, num_operations=7):
    """Some operations make two tensors, some need workspace."""
    rng = np.random.default_rng(seed)
    operations, count = [], 1
    for index in range(num_operations):
        width = min(int(rng.integers(1, 3)), count)
        inputs = rng.choice(count, size=width, replace=False)
        num_outputs = 1 + int(rng.random() < 0.25)
        operations.append(
            Operation(
                name=f"op{index}",
                inputs=tuple(sorted(map(int, inputs))),
                outputs=tuple(range(count, count + num_outputs)),
                seconds=float(rng.integers(1, 6)),
                workspace_bytes=int(rng.integers(0, 3)),
                recomputable=bool(rng.random() < 0.9),
            )
        )
        count += num_outputs
    return Graph(
        operations=tuple(operations),
        tensor_bytes=tuple(map(int, rng.integers(1, 9, size=count))),
        constants=frozenset({0}),
        results=frozenset({count - 1}),
    )


def best_seconds(graph, budget_bytes):
    """The least time of all schedules whose first runs keep the program's
    order, by going through all states of memory; `None` if there is none."""
    free = budget_bytes - graph.constant_bytes
    sizes = graph.tensor_bytes

    def num_bytes(tensors):
        return sum(sizes[tensor] for tensor in tensors)

    start = (0, frozenset())
    queue, done, ticket = [(0.0, 0, *start)], set(), itertools.count(1)
    while queue:
        seconds, _, first, held = heapq.heappop(queue)
        if (first, held) in done:
            continue
        done.add((first, held))
        finished = first == len(graph.operations)
        if finished and graph.results <= held | graph.constants:
            return seconds
        for tensor in held:
            item = (seconds, next(ticket), first, held - {tensor})
            heapq.heappush(queue, item)
        for index in range(min(first + 1, len(graph.operations))):
            operation = graph.operations[index]
            if index < first and not operation.recomputable:
                continue
            if not set(operation.inputs) <= held | graph.constants:
                continue
            after = held | set(operation.outputs)
            if num_bytes(after) + operation.workspace_bytes <= free:
                item = (
                    seconds + operation.seconds,
                    next(ticket),
                    max(first, index + 1),
                    frozenset(after),
                )
                heapq.heappush(queue, item)
    return None
