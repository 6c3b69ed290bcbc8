"""Draws a plan: memory over the step with and without it, and what runs again.

The curves are the simulator's, operation by operation; nothing is measured
here. What runs again is shown twice: when (under the curve), and which parts
of the model it is (the strip, in which a stage is as wide as what its
backward pass would keep).
"""

from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from kmem.base import drawing
from kmem.base.sizes import format_size
from kmem.planning import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def figure(plan: Any) -> "Figure":
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


def _draw_memory(axes: "Axes", plan: Any) -> None:
    graph = plan.network.graph
    # Less than none where operations need more one by one than together.
    base_bytes = max(0, plan.resident_bytes + graph.constant_bytes)
    highest = plan.unplanned_peak_bytes
    scale, unit = drawing.scale(highest)
    base = base_bytes / scale
    top = 1.2 * highest / scale
    budget = (plan.budget_bytes or 0) / scale

    def curve(simulation: "Simulation", schedule, side: int, **style):
        """Draws a curve, with its peak above (1) or below (-1) it."""
        color = style["color"]
        seconds = [graph.operations[index].seconds for index in schedule]
        edges = np.cumsum([0.0, *seconds])
        in_use = np.array(simulation.step_bytes) + plan.resident_bytes
        heights = in_use / scale
        style = {"baseline": None, "linewidth": 1.5, "zorder": 3, **style}
        axes.stairs(heights, edges, **style)
        step = int(np.argmax(heights))
        x, y = float(edges[step : step + 2].mean()), heights[step]
        axes.plot(x, y, "o", color=color, zorder=4)
        # Above the budget's line, if that is in the way.
        in_the_way = side > 0 and y <= budget < y + 0.08 * top
        axes.annotate(
            format_size(in_use[step]),
            (x, budget if in_the_way else y),
            xytext=(0, 7 * side),
            textcoords="offset points",
            ha=_alignment(x / edges[-1]),
            va="bottom" if side > 0 else "top",
            color=color,
            fontweight="bold",
        )
        return heights, edges

    style = {"color": drawing.GREY, "label": "everything kept"}
    curve(plan.unplanned, graph.program, 1, **style, linestyle=":")
    # Below, as the two peaks may be close.
    style = {"color": drawing.BLUE, "label": "the plan"}
    heights, edges = curve(plan.simulation, plan.schedule, -1, **style)
    _, first, which = np.unique(
        plan.schedule, return_index=True, return_inverse=True
    )
    # For each step, whether it runs what has run before.
    again = first[which] < np.arange(len(which))
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
        axes.axhline(budget, color="black", linestyle="--", linewidth=1)
        axes.text(
            1.01,
            budget,
            f"budget:\n{format_size(plan.budget_bytes)}",
            va="center",
            transform=axes.get_yaxis_transform(),
        )
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, max(top, 1.1 * budget))
    axes.set_xlabel("seconds of the step, as predicted")
    axes.set_ylabel(f"memory in use, {unit}")
    drawing.finish(axes, _title(plan), loc="upper center", ncols=4)


def _alignment(position: float) -> str:
    """Keeps a label between left (0) and right (1)."""
    if position < 0.1:
        return "left"
    return "right" if position > 0.9 else "center"


def _draw_stages(axes: "Axes", plan: Any) -> None:
    stages = plan.network.stages
    counts = np.bincount(plan.schedule, minlength=len(stages))[: len(stages)]
    num_runs = np.minimum(counts, len(_NUM_RUNS))
    widths = flat.kept_bytes(plan.network)
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
    axes.set_title(
        "the model's stages, each as wide as what it would keep",
        loc="left",
        fontsize=10,
    )
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0,
        ncols=3,
        frameon=False,
    )
