"""A training step as a planner sees it: operations that make tensors.

A schedule is the order in which operations are run, with repeats. It says all
there is to say: a tensor is dropped after the last use of what an operation
made, and what is used again later has to be made again before.
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True)
class Operation:
    """One step of the program.

    Attributes:
        name: What to call it.
        inputs: The tensors it reads.
        outputs: The tensors it makes, all of them each time it runs.
        seconds: The time it takes.
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
    """

    operations: tuple[Operation, ...]
    tensor_bytes: tuple[int, ...]
    constants: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    num_forward: int = 0
    resident_bytes: int = 0

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
        if not self.results <= existing:
            raise ValueError(
                "`results` must be made by the operations. Received: "
                f"{sorted(self.results - existing)}"
            )

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

    @functools.cached_property
    def constant_bytes(self) -> int:
        """What no schedule can do without."""
        constants = sum(self.tensor_bytes[t] for t in self.constants)
        return constants + self.resident_bytes
