"""A training step as a planner sees it: operations, and their replay.

A schedule is the order in which operations are run, with repeats. It says all
there is to say: a tensor is dropped after the last use of what an operation
made, and what is used again later has to be made again before. One walk from
the end of a schedule to its start tells what it takes, to the byte: a tensor
is alive where a later step reads it. While an operation runs its inputs, all
that it makes and its workspace are in memory. Not modelled: fragmentation, and
rounding by an allocator.
"""

import collections
import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Operation:
    """One step of the program.

    Attributes:
        inputs: The tensors it reads.
        outputs: The tensors it makes, all of them each time it runs.
        workspace_bytes: What it needs besides, while it runs.
        recomputable: Whether it may run twice.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    workspace_bytes: int = 0
    recomputable: bool = True


@dataclasses.dataclass(frozen=True)
class Graph:
    """Operations in the order of the program, which runs each of them once.

    A tensor is a number. It stands for a storage: names that share one (a
    reshaped tensor, an in-place update's result) are the same tensor.

    Attributes:
        operations: In program order: what one reads was made before.
        tensor_bytes: The size of each tensor.
        constants: Tensors that exist before the step and stay: parameters,
            the batch. No operation makes them.
        results: Tensors that must exist when the step ends: gradients, the
            loss.
        num_forward: How many of the operations, from the first on, are the
            forward pass.
        resident_bytes: What is in memory all the time besides.
        host_seconds: The time that a byte takes to host memory and back;
            `None` where nothing goes there.
    """

    operations: tuple[Operation, ...]
    tensor_bytes: tuple[int, ...]
    constants: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    num_forward: int = 0
    resident_bytes: int = 0
    host_seconds: float | None = None

    def __post_init__(self):
        existing = set(self.constants)
        for index, operation in enumerate(self.operations):
            missing = set(operation.inputs) - existing
            if missing:
                raise ValueError(
                    "An operation must read tensors that were made before "
                    f"it. Received: operations[{index}] ({operation.name}) "
                    f"reads {sorted(missing)}"
                )
            for tensor in operation.outputs:
                if tensor in existing:
                    raise ValueError(
                        "A tensor must be made by one operation. Received: "
                        f"operations[{index}] ({operation.name}) makes "
                        f"{tensor} again"
                    )
                existing.add(tensor)

    @functools.cached_property
    def maker(self) -> dict[int, int]:
        """Tensor -> the operation that makes it; constants have none."""
        return {
            tensor: index
            for index, operation in enumerate(self.operations)
            for tensor in operation.outputs
        }

    @functools.cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Tensor -> the operations that read it, in program order."""
        readers: list[list[int]] = [[] for _ in self.tensor_bytes]
        for index, operation in enumerate(self.operations):
            for tensor in set(operation.inputs):
                readers[tensor].append(index)
        return tuple(map(tuple, readers))

    @functools.cached_property
    def seconds(self) -> float:
        """The time of the program."""
        return sum(operation.seconds for operation in self.operations)

    @functools.cached_property
    def program(self) -> tuple[int, ...]:
        """The schedule that runs every operation once."""
        return tuple(range(len(self.operations)))

    def step(self, index: int) -> Operation:
        """What a schedule runs: an operation or, of `~tensor`, what brings
        that tensor back from host memory, with the time to send it there."""
        if index >= 0:
            return self.operations[index]
        seconds = (self.host_seconds or 0.0) * self.tensor_bytes[~index]
        return Operation(f"tensor {~index}, fetched", (), (~index,), seconds)

    @functools.cached_property
    def constant_bytes(self) -> int:
        """What no schedule can do without."""
        constants = sum(self.tensor_bytes[t] for t in self.constants)
        return constants + self.resident_bytes


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a schedule costs.

    Attributes:
        peak_bytes: The most that is in use in any step.
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
        schedule: Indexes of `graph.operations`, in the order in which they
            run, with repeats, and others as `Graph.step` has them.

    Raises:
        ValueError: If the schedule leaves an operation out, repeats one that
            is not recomputable, or reads a tensor that was not made.
    """
    sizes = graph.tensor_bytes
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
        operation = graph.step(index)
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
    num_runs = sum(index >= 0 for index in schedule)
    return Simulation(
        peak_bytes=max(step_bytes, default=in_use),
        seconds=seconds,
        num_recomputed=num_runs - len(graph.operations),
        step_bytes=tuple(step_bytes),
    )


def _check_operations(graph: Graph, schedule: tuple[int, ...]) -> None:
    counts = collections.Counter(i for i in schedule if i >= 0)
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
        operation = graph.step(index)
        missing = set(operation.inputs) - existing
        if missing:
            raise ValueError(
                "A step must read tensors that an earlier step made. "
                f"Received: step {step}, operations[{index}] "
                f"({operation.name}), reads {sorted(missing)}"
            )
        existing.update(operation.outputs)
