"""The training step behind a choice: what is in memory when, and what it is.

A choice with a plan is the plan's step, replayed. One without a plan keeps
everything: its step is told by a profile. With micro-batches the same step runs
once for each of them.

What it does not do: measure. The step is shifted so that its peak is the one
that was predicted for the choice; what a drawing does not know of, such as the
batch and the sums of gradients, is in memory all the time.
"""

import dataclasses

import numpy as np

from kmem.budget.report import Choice
from kmem.budget.report import MemoryReport
from kmem.options import MemoryOptions
from kmem.planning.graph import Graph
from kmem.planning.graph import simulate


def step_of(
    report: MemoryReport, choice: Choice, graphs: dict[MemoryOptions, Graph]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A choice's step, by its plan or the operations of its options.

    Returns:
        When operations begin, and when the last one ends; of each kind the
        bytes that are in use during each of them.
    """
    plan = choice.plan
    graph = graphs[choice.options] if plan is None else plan.network.graph
    schedule = graph.program if plan is None else plan.schedule
    operations = [graph.operations[index] for index in schedule]
    count = choice.options.num_parts
    seconds = np.cumsum([0.0, *[each.seconds for each in operations] * count])
    # The update, and what else is no operation of the model.
    seconds *= choice.predicted_seconds / (seconds[-1] or 1.0)
    in_use = np.array(simulate(graph, schedule).step_bytes)
    sizes = [
        0 if tensor in graph.results else num_bytes
        for tensor, num_bytes in enumerate(graph.tensor_bytes)
    ]
    without = dataclasses.replace(graph, tensor_bytes=tuple(sizes))
    gradients = in_use - np.array(simulate(without, schedule).step_bytes)
    workspace = np.array([each.workspace_bytes for each in operations])
    activations = in_use - graph.constant_bytes - gradients - workspace
    fixed = {
        "parameters": report.parameter_bytes,
        "optimizer": report.optimizer_bytes,
    }
    highest = int((in_use - graph.constant_bytes).max()) + sum(fixed.values())
    others = choice.predicted_peak_bytes - highest
    fixed["batch and others"] = max(others, 0)
    kinds = {kind: np.full(len(in_use), b) for kind, b in fixed.items()}
    kinds |= {"gradients": gradients, "activations": activations}
    kinds["workspace"] = workspace
    # Operations were measured one by one, the peak with all of them.
    for kind in ("workspace", "activations"):
        less = np.minimum(kinds[kind], max(-others, 0))
        kinds[kind] = kinds[kind] - less
        others += int(less.max())
    kinds = {kind: np.tile(each, count) for kind, each in kinds.items()}
    return seconds, {k: each for k, each in kinds.items() if each.any()}


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
