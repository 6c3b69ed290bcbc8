"""The pictures of a report: the step, and the choices.

All of them show predictions, but for what is called measured. A choice's number
is that of its row in the page's table.
"""

import dataclasses

import numpy as np

from kmem.base import drawing
from kmem.base.sizes import format_size
from kmem.budget.report import Choice
from kmem.budget.report import MemoryReport
from kmem.budget.report import describe
from kmem.options import MemoryOptions
from kmem.planning.graph import Graph
from kmem.planning.graph import simulate

_MARKERS = {
    "neither": ("X", "black"),
    "micro-batches": ("s", "#d55e00"),
    "recomputation": ("^", "#009e73"),
    "both": ("o", "#cc79a7"),
}
Graphs = dict[MemoryOptions, Graph]

# So many choices are named beside the picture; the page has a table.
_NUM_NAMED = 20


def draw_step(report: MemoryReport, graphs: Graphs) -> drawing.Figure:
    """What memory is used for over the step, before and after."""
    choices = [report.plain][report.is_plain :] + [report.chosen]
    figure = drawing.new_figure("a report")
    pictures = figure.subplots(len(choices), sharex=True, squeeze=False)[:, 0]
    scale, unit = drawing.scale(_highest(report))
    ends = []
    for axes, choice in zip(pictures, choices, strict=True):
        seconds, kinds = step_of(report, choice, graphs)
        drawing.bands(axes, seconds * 1e3, kinds, scale)
        drawing.mark_budget(axes.axhline, report.budget_bytes, scale)
        axes.set_ylim(0, 1.1 * _highest(report) / scale)
        axes.set_ylabel(f"memory in use, {unit}")
        peak = format_size(choice.predicted_peak_bytes)
        title = f"{describe(choice.options)}: {peak} at the peak"
        drawing.finish(axes, title, columns_below=4)
        ends.append(seconds[-1] * 1e3)
    pictures[-1].set(xlim=(0, max(ends)), xlabel="time of the step, ms")
    return figure


def step_of(
    report: MemoryReport, choice: Choice, graphs: Graphs
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The training step behind a choice: what is in memory when, and what it
    is, by its plan or the operations of its options.

    A choice with a plan is the plan's step, replayed. One without a plan keeps
    everything: its step is told by a profile. With micro-batches the same step
    runs once for each of them.

    It is not measured. The step is shifted so that its peak is the one that
    was predicted for the choice; what a drawing does not know of, such as the
    batch and the sums of gradients, is in memory all the time.

    Returns:
        When operations begin, and when the last one ends; of each kind the
        bytes that are in use during each of them.
    """
    plan = choice.plan
    graph = graphs[choice.options] if plan is None else plan.drawn[0].graph
    schedule = graph.program if plan is None else plan.schedule
    operations = [graph.step(index) for index in schedule]
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


def draw_choices(report: MemoryReport) -> drawing.Figure:
    """The choices by peak and time, with those that are best for their peak."""
    figure = drawing.new_figure("a report")
    axes, names = figure.subplots(1, 2, width_ratios=(3, 1))
    scale, unit = drawing.scale(_highest(report))
    choices = report.choices

    def place(choice: Choice) -> tuple[float, float]:
        return choice.predicted_peak_bytes / scale, report.slowdown(choice)

    def points(chosen: list[Choice], **style) -> None:
        axes.plot(*zip(*map(place, chosen), strict=True), **style)

    points(
        fastest_for_their_peak(choices),
        drawstyle="steps-post",
        color=drawing.AMBER,
        linewidth=2,
        label="the fastest for its peak",
    )
    for mechanism, (marker, color) in _MARKERS.items():
        alike = [c for c in choices if _mechanism(c) == mechanism]
        if alike:
            style = {"marker": marker, "color": color, "linestyle": "none"}
            points(alike, **style, label=mechanism)
    star = {"marker": "*", "markersize": 18, "linestyle": "none"}
    points([report.chosen], **star, color=drawing.BLUE, label="chosen")
    measured = report.chosen.measured_peak_bytes
    if measured is not None:
        axes.plot(
            [measured / scale],
            [report.slowdown(report.chosen)],
            **star,
            color=drawing.BLUE,
            markerfacecolor="none",
            label="its measured peak",
        )
    lines = ["choices, the best first"]
    for number, choice in enumerate(choices, start=1):
        above = 5 if number % 2 else -12
        axes.annotate(
            *(f"{number}", place(choice), (7, above)),
            **{"textcoords": "offset points", "fontsize": 9},
        )
        lines.append(f"{number} {describe(choice.options)}")
    if len(choices) > _NUM_NAMED:
        lines[_NUM_NAMED + 1 :] = ["more: in the table"]
    names.set_axis_off()
    names.text(0, 1, "\n".join(lines), va="top", fontsize=8)
    drawing.mark_budget(axes.axvline, report.budget_bytes, scale)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"peak of a step, {unit}")
    axes.set_ylabel("time of a step, relative to plain")
    drawing.finish(axes, "What was tried")
    return figure


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


def _mechanism(choice: Choice) -> str:
    if choice.options.microbatches:
        return "both" if choice.options.remat else "micro-batches"
    return "recomputation" if choice.options.remat else "neither"


def _highest(report: MemoryReport) -> int:
    shown = report.plain, report.chosen
    peaks = [choice.predicted_peak_bytes for choice in shown]
    return max(*peaks, report.budget_bytes)
