"""Graphs whose best schedules are known."""

import heapq
import itertools

import numpy as np

from kmem.planning.graph import Graph
from kmem.planning.graph import Operation


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


def vgg19():
    """The instance of Checkmate's artifact: a batch of one, 25 layers, a loss
    and 25 gradients. Times are multiply-adds in units of 1e9.

    A gradient reads the one before it, and what its layer read and made.
    """
    layers, side, channels = [], 224, 3
    for count, width in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(count):
            made = side * side * width
            layers.append((made, made * channels * 9))
            channels = width
        side //= 2
        layers.append((side * side * channels, 0))
    layers.append((side * side * channels, 0))
    for width in (4096, 4096, 1000):
        layers.append((width, layers[-1][0] * width))
    image = len(layers) * 2 + 1
    sizes, operations = [], []
    for index, (made, multiplied) in enumerate(layers):
        inputs = (index - 1 if index else image,)
        operations.append(
            Operation("forward", inputs, (index,), multiplied / 1e9)
        )
        sizes.append(4 * made)
    operations.append(
        Operation("loss", (len(layers) - 1,), (len(layers),), 0.0)
    )
    sizes.append(4)
    for index in range(len(layers) - 1, -1, -1):
        before = index - 1 if index else image
        outputs = (len(operations),)
        operations.append(
            Operation(
                "gradient",
                (len(operations) - 1, index, before),
                outputs,
                2 * layers[index][1] / 1e9,
                recomputable=False,
            )
        )
        sizes.append(4 * (layers[index - 1][0] if index else 0))
    return Graph(
        operations=tuple(operations),
        tensor_bytes=(*sizes, 0),
        constants=frozenset({image}),
        results=frozenset({len(operations) - 1}),
        num_forward=len(layers) + 1,
    )
