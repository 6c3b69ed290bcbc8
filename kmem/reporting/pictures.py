"""The pictures of a report: the step, and the choices.

All of them show predictions, but for what is called measured. A choice's number
is that of its row in the page's table.
"""

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
    from matplotlib.figure import Figure

_MARKERS = {
    "neither": ("X", "black"),
    "micro-batches": ("s", "#d55e00"),
    "recomputation": ("^", "#009e73"),
    "both": ("o", "#cc79a7"),
}
Graphs = dict[MemoryOptions, Graph]

# So many choices are named beside the picture; the page has a table.
_NUM_NAMED = 20


def draw_step(report: MemoryReport, graphs: Graphs) -> "Figure":
    """What memory is used for over the step, before and after."""
    choices = [report.plain][report.is_plain :] + [report.chosen]
    figure = drawing.new_figure("a report")
    pictures = figure.subplots(len(choices), sharex=True, squeeze=False)[:, 0]
    scale, unit = _scale(report)
    ends = []
    for axes, choice in zip(pictures, choices, strict=True):
        seconds, kinds = steps.step_of(report, choice, graphs)
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


def draw_choices(report: MemoryReport) -> "Figure":
    """The choices by peak and time, with those that are best for their peak."""
    figure = drawing.new_figure("a report")
    axes, names = figure.subplots(1, 2, width_ratios=(3, 1))
    scale, unit = _scale(report)
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
    lines = ["choices, the best first"]
    for number, choice in enumerate(choices, start=1):
        place = choice.predicted_peak_bytes / scale, report.slowdown(choice)
        above = 5 if number % 2 else -12
        axes.annotate(
            *(f"{number}", place, (7, above)),
            **{"textcoords": "offset points", "fontsize": 9},
        )
        lines.append(f"{number} {describe(choice.options)}")
    timed = [choice for choice in choices if choice.median_seconds is not None]
    if timed:
        drawing.bars(
            axes,
            [choice.predicted_peak_bytes / scale for choice in timed],
            [*map(report.slowdown, timed)],
            [report.median_slowdown(choice) for choice in timed],
        )
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


def _mechanism(choice: Choice) -> str:
    if choice.options.microbatches:
        return "both" if choice.options.remat else "micro-batches"
    return "recomputation" if choice.options.remat else "neither"


def _highest(report: MemoryReport) -> int:
    shown = report.plain, report.chosen
    peaks = [choice.predicted_peak_bytes for choice in shown]
    return max(*peaks, report.budget_bytes)


def _scale(report: MemoryReport) -> tuple[float, str]:
    return drawing.scale(_highest(report))
