"""The training step behind a choice: what is in memory when, and what it is.

A choice with a plan is the plan's step, replayed. One without a plan keeps
everything: its step is told by a profile. With micro-batches the same step runs
once for each of them.

What it does not do: measure. The step is shifted so that its peak is the one
that was predicted for the choice; what a drawing does not know of, such as the
batch and the sums of gradients, is in memory all the time.
"""

import dataclasses
import functools

import numpy as np

from kmem.budget.report import Choice
from kmem.budget.report import MemoryReport
from kmem.options import MemoryOptions
from kmem.planning.graph import Graph
from kmem.planning.graph import simulate


@dataclasses.dataclass(frozen=True)
class Step:
    """A choice's step, operation by operation.

    Attributes:
        choice: The choice.
        graph: The operations, of one micro-batch.
        schedule: The order in which they run.
    """

    choice: Choice
    graph: Graph
    schedule: tuple[int, ...]

    @functools.cached_property
    def _step_bytes(self) -> np.ndarray:
        return np.array(simulate(self.graph, self.schedule).step_bytes)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory over the step.

        Returns:
            The seconds at which operations begin and end, and the bytes that
            are in use during each of them.
        """
        operations = self.graph.operations
        count = self.choice.options.num_parts
        seconds = [operations[index].seconds for index in self.schedule]
        edges = np.cumsum([0.0, *seconds * count])
        # The update, and what else is no operation of the model.
        edges *= self.choice.predicted_seconds / (edges[-1] or 1.0)
        beyond = self.choice.predicted_peak_bytes - self._step_bytes.max()
        in_use = np.maximum(self._step_bytes + beyond, 0)
        return edges, np.tile(in_use, count)

    def at_peak(self) -> dict[str, int]:
        """What is in memory at the peak, besides what always is."""
        graph, peak = self.graph, int(np.argmax(self._step_bytes))
        total = int(self._step_bytes[peak])
        workspace = graph.operations[self.schedule[peak]].workspace_bytes
        sizes = [
            0 if tensor in graph.results else num_bytes
            for tensor, num_bytes in enumerate(graph.tensor_bytes)
        ]
        without = dataclasses.replace(graph, tensor_bytes=tuple(sizes))
        gradients = total - simulate(without, self.schedule).step_bytes[peak]
        return {
            "gradients": gradients,
            "activations": total
            - (graph.constant_bytes + gradients + workspace),
            "workspace": workspace,
        }


def step_of(choice: Choice, graphs: dict[MemoryOptions, Graph]) -> Step:
    """A choice's step, by its plan or the operations of its options."""
    plan = choice.plan
    if plan is not None:
        return Step(choice, plan.network.graph, plan.schedule)
    graph = graphs[choice.options]
    return Step(choice, graph, graph.program)


def kinds_of_bytes(
    report: MemoryReport, choice: Choice, graphs: dict[MemoryOptions, Graph]
) -> dict[str, int]:
    """What a choice's peak consists of; the sum is the predicted peak."""
    kinds = {
        "parameters": report.parameter_bytes,
        "optimizer": report.optimizer_bytes,
        **step_of(choice, graphs).at_peak(),
    }
    others = choice.predicted_peak_bytes - sum(kinds.values())
    if others < 0:
        # Operations were measured one by one, the peak with all of them.
        kinds["workspace"] += others
    kinds["batch and others"] = others
    return {name: size for name, size in kinds.items() if size > 0}


def fastest_for_their_peak(choices: list[Choice]) -> list[Choice]:
    """The Pareto front, from the smallest peak on: none of the others takes
    both less memory and less time."""
    front: list[Choice] = []
    by_peak = sorted(
        choices, key=lambda c: (c.predicted_peak_bytes, c.predicted_seconds)
    )
    for choice in by_peak:
        least = front[-1].predicted_seconds if front else np.inf
        if choice.predicted_seconds < least:
            front.append(choice)
    return front
