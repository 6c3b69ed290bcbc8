"""Replays a schedule on a graph, to the byte.

What an operation makes lives until its last use before it is made again, and
a result's last copy lives to the end; while an operation runs its inputs, all
that it makes and its workspace are in memory. One walk from the end of the
schedule to its start knows all of that: a tensor is alive where a later step
reads it. Not modelled: fragmentation, and rounding by an allocator.
"""

import collections
import dataclasses

from kmem.planning.graph import Graph


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        peak_bytes: The most that is in use in any step.
        seconds: The time of all steps.
        num_recomputed: How many steps run an operation again.
        step_bytes: What is in use during each step.
    """

    peak_bytes: int
    seconds: float
    num_recomputed: int
    step_bytes: tuple[int, ...]


def simulate(graph: Graph, schedule: tuple[int, ...]) -> Simulation:
    """Replays `schedule`.

    Args:
        graph: The operations and their tensors.
        schedule: Indexes of `graph.operations`, in the order in which they
            run, with repeats.

    Returns:
        A `Simulation`.

    Raises:
        ValueError: If the schedule leaves an operation out, repeats one that
            is not recomputable, or reads a tensor that was not made.
    """
    operations, sizes = graph.operations, graph.tensor_bytes
    _check_operations(graph, schedule)
    alive = bytearray(len(sizes))
    for tensor in graph.constants:
        alive[tensor] = 1
    in_use = graph.constant_bytes
    for tensor in graph.results:
        if not alive[tensor]:
            alive[tensor] = 1
            in_use += sizes[tensor]
    step_bytes = []
    seconds = 0.0
    for index in reversed(schedule):
        operation = operations[index]
        seconds += operation.seconds
        for tensor in operation.inputs:
            if not alive[tensor]:
                alive[tensor] = 1
                in_use += sizes[tensor]
        made_bytes = unused = 0
        for tensor in operation.outputs:
            if alive[tensor]:
                alive[tensor] = 0
                made_bytes += sizes[tensor]
            else:
                unused += sizes[tensor]
        step_bytes.append(in_use + unused + operation.workspace_bytes)
        in_use -= made_bytes
    if sum(alive) > len(graph.constants):
        _raise_not_made(graph, schedule)
    step_bytes.reverse()
    return Simulation(
        peak_bytes=max(step_bytes, default=in_use),
        seconds=seconds,
        num_recomputed=len(schedule) - len(operations),
        step_bytes=tuple(step_bytes),
    )


def _check_operations(graph: Graph, schedule: tuple[int, ...]) -> None:
    counts = collections.Counter(schedule)
    missing = [i for i in graph.program if i not in counts]
    if missing or len(counts) > len(graph.operations):
        raise ValueError(
            "A schedule must run every operation, and no other. Received one "
            f"without {missing[:10]}, with "
            f"{sorted(counts.keys() - set(graph.program))[:10]}"
        )
    for index, count in counts.items():
        if count > 1 and not graph.operations[index].recomputable:
            raise ValueError(
                "A schedule must run an operation that is not recomputable "
                f"once. Received: operations[{index}] "
                f"({graph.operations[index].name}) runs {count} times"
            )


def _raise_not_made(graph: Graph, schedule: tuple[int, ...]) -> None:
    existing = set(graph.constants)
    for step, index in enumerate(schedule):
        operation = graph.operations[index]
        missing = set(operation.inputs) - existing
        if missing:
            raise ValueError(
                "A step must read tensors that an earlier step made. "
                f"Received: step {step}, operations[{index}] "
                f"({operation.name}), reads {sorted(missing)}"
            )
        existing.update(operation.outputs)
