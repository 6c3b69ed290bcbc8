"""The pictures of a report: the step, its bytes, and the choices.

All of them show predictions, but for the point that is called measured. Colours
are those of Okabe and Ito, which colour-blind people can tell apart.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kmem.base import drawing
from kmem.base.sizes import format_size
from kmem.budget.report import Choice
from kmem.budget.report import MemoryReport
from kmem.budget.report import describe
from kmem.options import MemoryOptions
from kmem.planning.graph import Graph
from kmem.reporting import steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {
    "parameters": "#f0e442",
    "optimizer": "#009e73",
    "gradients": "#e69f00",
    "activations": "#56b4e9",
    "workspace": "#cc79a7",
    "batch and others": "#bdc1c6",
}
_MARKERS = {
    "neither": ("X", "black"),
    "micro-batches": ("s", "#d55e00"),
    "recomputation": ("^", "#009e73"),
    "both": ("o", "#cc79a7"),
}
Graphs = dict[MemoryOptions, Graph]

# A share of the picture's width in which a size can be read.
_READABLE = 0.07


def draw_step(report: MemoryReport, graphs: Graphs) -> "Figure":
    """Memory over the step, before and after."""
    figure = drawing.new_figure("a report")
    axes = figure.subplots()
    scale, unit = _scale(report)
    colors = drawing.GREY, drawing.BLUE
    for choice, color in zip(_before_and_after(report), colors, strict=False):
        peak = choice.predicted_peak_bytes
        label = f"{describe(choice.options)}: {format_size(peak)}"
        edges, in_use = steps.step_of(choice, graphs).curve()
        curve = in_use / scale, edges * 1e3
        axes.stairs(*curve, baseline=0, fill=True, color=color, alpha=0.2)
        axes.stairs(
            *curve, baseline=None, color=color, linewidth=1.5, label=label
        )
    _mark_budget(axes.axhline, report)
    # Room for the legend.
    axes.set_ylim(0, 1.35 * _highest(report) / scale)
    axes.set_xlim(left=0)
    axes.set_xlabel("time of the step, ms")
    axes.set_ylabel(f"memory in use, {unit}")
    _finish(axes, "Memory over the step")
    return figure


def draw_bytes(report: MemoryReport, graphs: Graphs) -> "Figure":
    """What the peak consists of, before and after."""
    figure = drawing.new_figure("a report")
    figure.set_figheight(3.6)
    axes = figure.subplots()
    scale, unit = _scale(report)
    choices = _before_and_after(report)
    labelled = set()
    for place, choice in enumerate(choices):
        left = 0
        kinds = steps.kinds_of_bytes(report, choice, graphs)
        for kind, num_bytes in kinds.items():
            bar = axes.barh(
                place,
                num_bytes / scale,
                left=left / scale,
                color=_KINDS[kind],
                edgecolor="white",
                label=None if kind in labelled else kind,
            )
            labelled.add(kind)
            left += num_bytes
            if num_bytes > _READABLE * _highest(report):
                label = f"{num_bytes / scale:.3g}"
                axes.bar_label(bar, [label], label_type="center")
    # Behind the numbers.
    _mark_budget(axes.axvline, report, zorder=0)
    names = [describe(c.options).replace(", ", ",\n") for c in choices]
    axes.set_yticks(range(len(choices)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"memory at the peak, {unit}")
    _finish(axes, "Where the bytes are", legend_below=True)
    return figure


def draw_choices(report: MemoryReport) -> "Figure":
    """The choices by peak and time, with those that are best for their peak."""
    figure = drawing.new_figure("a report")
    axes = figure.subplots()
    scale, _ = _scale(report)
    choices = report.choices

    def points(chosen: list[Choice], **style) -> None:
        axes.plot(
            [choice.predicted_peak_bytes / scale for choice in chosen],
            [report.slowdown(choice) for choice in chosen],
            **style,
        )

    points(
        steps.fastest_for_their_peak(choices),
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
    _mark_budget(axes.axvline, report)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"peak of a step, {_scale(report)[1]}")
    axes.set_ylabel("time of a step, relative to plain")
    _finish(axes, "What was tried")
    return figure


def _before_and_after(report: MemoryReport) -> list[Choice]:
    return [report.plain][report.is_plain :] + [report.chosen]


def _mechanism(choice: Choice) -> str:
    if choice.options.microbatches:
        return "both" if choice.options.remat else "micro-batches"
    return "recomputation" if choice.options.remat else "neither"


def _highest(report: MemoryReport) -> int:
    shown = report.plain, report.chosen
    peaks = [choice.predicted_peak_bytes for choice in shown]
    return max(*peaks, report.budget_bytes)


def _scale(report: MemoryReport) -> tuple[float, str]:
    return (1e9, "GB") if _highest(report) >= 1e10 else (1e6, "MB")


def _mark_budget(line: Callable, report: MemoryReport, **style) -> None:
    line(
        report.budget_bytes / _scale(report)[0],
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"budget: {format_size(report.budget_bytes)}",
        **style,
    )


def _finish(axes: "Axes", title: str, legend_below: bool = False) -> None:
    drawing.set_title(axes, title)
    axes.spines[["top", "right"]].set_visible(False)
    if legend_below:
        axes.figure.legend(loc="outside lower center", ncols=4, frameon=False)
    else:
        axes.legend(frameon=False)
