"""Draws a plan: memory over the step with and without it, and what runs again.

The curves are the simulator's, operation by operation; nothing is measured
here. What runs again is shown twice: when (under the curve), and which parts
of the model it is (the strip, in which a stage is as wide as what its
backward pass would keep).
"""

from typing import Any

import numpy as np

from kmem.base import drawing
from kmem.base.sizes import format_size
from kmem.planning import flat
from kmem.planning.graph import Simulation

_LIGHT_GREY = "#e3e5e8"
_LIGHT_BLUE = "#cfe1fb"
_LIGHT_AMBER = "#fdd663"
# Of a stage's forward pass; the last one stands for more as well.
_NUM_RUNS = (
    ("runs once", _LIGHT_BLUE, ""),
    ("runs twice", drawing.AMBER, "//"),
    ("runs more often", drawing.RED, "xx"),
)
_NUM_NAMES = 5


def figure(plan: Any) -> drawing.Figure:
    """Draws a plan as a figure, to be changed or shown in a notebook.

    Returns:
        A `matplotlib.figure.Figure` with two axes: the memory over the step,
        and the model's stages.

    Raises:
        ImportError: If matplotlib is missing.
    """
    result = drawing.new_figure("a plan")
    memory, stages = result.subplots(2, height_ratios=(13, 1))
    _draw_memory(memory, plan)
    _draw_stages(stages, plan)
    return result


def _title(plan: Any) -> str:
    saved = 1 - plan.predicted_peak_bytes / plan.unplanned_peak_bytes
    if not plan.segments:
        return "A training step that keeps everything"
    return (
        f"The same training step in {saved:.0%} less memory, "
        f"for {plan.slowdown:.2f}x the time"
    )


def _draw_memory(axes: drawing.Axes, plan: Any) -> None:
    graph = plan.drawn[0].graph
    # Less than none where operations need more one by one than together.
    base_bytes = max(0, plan.resident_bytes + graph.constant_bytes)
    highest = plan.unplanned_peak_bytes
    scale, unit = drawing.scale(highest)
    base = base_bytes / scale
    peaks = [highest, plan.predicted_peak_bytes, plan.budget_bytes or 0]

    def curve(graph, simulation: Simulation, schedule, label: str, **style):
        seconds = [graph.step(index).seconds for index in schedule]
        edges = np.cumsum([0.0, *seconds])
        in_use = np.array(simulation.step_bytes) + plan.resident_bytes
        style |= {"baseline": None, "linewidth": 1.5, "zorder": 3}
        label = f"{label}: {format_size(int(in_use.max()))} at the peak"
        axes.stairs(in_use / scale, edges, **style, label=label)
        return in_use / scale, edges

    style = {"color": drawing.GREY, "linestyle": ":"}
    plain = plan.network.graph
    curve(plain, plan.unplanned, plain.program, "everything kept", **style)
    drawn = graph, plan.simulation, plan.schedule
    heights, edges = curve(*drawn, "the plan", color=drawing.BLUE)
    steps = np.array(plan.schedule)
    _, first, which = np.unique(steps, return_index=True, return_inverse=True)
    # For each step, whether it runs what has run before.
    again = (first[which] < np.arange(len(which))) & (steps >= 0)
    under = {"baseline": base, "fill": True, "linewidth": 0}
    once = np.where(again, np.nan, heights)
    axes.stairs(once, edges, **under, color=_LIGHT_BLUE)
    if again.any():
        repeated = np.where(again, heights, np.nan)
        under |= {"hatch": "//", "label": "running again"}
        axes.stairs(repeated, edges, **under, fc=_LIGHT_AMBER, ec="black")
    axes.fill_between(
        edges[[0, -1]],
        base,
        **{"facecolor": _LIGHT_GREY, "hatch": "..", "linewidth": 0},
        label=f"always in memory: {format_size(base_bytes)}",
    )
    if plan.budget_bytes is not None:
        drawing.mark_budget(axes.axhline, plan.budget_bytes, scale)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 1.3 * max(peaks) / scale)
    axes.set_xlabel("seconds of the step, as predicted")
    axes.set_ylabel(f"memory in use, {unit}")
    drawing.finish(axes, _title(plan), loc="upper center", ncols=3)


def _draw_stages(axes: drawing.Axes, plan: Any) -> None:
    network, _ = plan.drawn
    stages = network.stages
    runs = [index for index in plan.schedule if index >= 0]
    counts = np.bincount(runs, minlength=len(stages))[: len(stages)]
    num_runs = np.minimum(counts, len(_NUM_RUNS))
    widths = flat.kept_bytes(network)
    widths = widths if any(widths) else np.ones(len(widths))
    edges = np.cumsum([0, *widths])
    for number, (label, color, hatch) in enumerate(_NUM_RUNS, start=1):
        chosen = np.flatnonzero(num_runs == number)
        if chosen.size:
            style: Any = {"color": color, "hatch": hatch, "label": label}
            widths = np.diff(edges)[chosen]
            axes.bar(edges[chosen], 1, widths, align="edge", **style)
    positions = np.linspace(0, edges[-1], _NUM_NAMES)
    numbers = np.searchsorted(edges[1:], positions)
    axes.set_xticks(positions, [stages[n].name for n in numbers], fontsize=8)
    labels = axes.get_xticklabels()
    labels[0].set_ha("left")
    labels[-1].set_ha("right")
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    title = "the model's stages, each as wide as what it would keep"
    axes.set_title(title, loc="left", fontsize=10)
    drawing.finish(axes, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
