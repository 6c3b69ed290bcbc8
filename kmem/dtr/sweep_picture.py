"""Draws what training costs at several thresholds of DTR: the figure of
MegEngine's guide, measured, with what was predicted beside it.
"""

import math
from typing import TYPE_CHECKING
from typing import Any

from kmem.base import drawing
from kmem.base.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(sweep: Any) -> "Figure":
    """Draws a sweep as a figure, to be changed or shown in a notebook.

    Args:
        sweep: The sweep.

    Returns:
        A `matplotlib.figure.Figure` with two axes: the time of a step and its
        peak, both over the threshold.

    Raises:
        ImportError: If matplotlib is missing.
    """
    result = drawing.new_figure("a sweep")
    time, peak = result.subplots(2, sharex=True, height_ratios=(3, 2))
    _draw_time(time, sweep)
    _draw_peak(peak, sweep)
    return result


def _draw_time(axes: "Axes", sweep: Any) -> None:
    rows = _curve(sweep)
    recommended = sweep.recommended
    axes.plot(
        [_megabytes(row.threshold_bytes) for row in rows],
        [_finite(sweep.predicted_slowdown(row)) for row in rows],
        color=drawing.AMBER,
        linestyle="--",
        marker=".",
        label="predicted by the simulator",
    )
    axes.plot(
        [_megabytes(row.threshold_bytes) for row in rows],
        [_finite(sweep.slowdown(row)) for row in rows],
        color=drawing.BLUE,
        marker="o",
        label="measured",
    )
    if sweep.plain.step_seconds:
        axes.axhline(
            sweep.slowdown(sweep.plain),
            color=drawing.GREY,
            linestyle=":",
            label="plain eager Keras",
        )
    failed = [_megabytes(row.threshold_bytes) for row in rows if row.error]
    axes.plot(
        failed,
        [1.0] * len(failed),
        "x",
        color=drawing.RED,
        label="cannot run" if failed else None,
    )
    for row in sweep.rows:
        if row.dtr == recommended and row.threshold_bytes:
            axes.plot(
                _megabytes(row.threshold_bytes),
                sweep.slowdown(row),
                "*",
                color=drawing.BLUE,
                markersize=16,
                label=f"recommended: {format_size(row.threshold_bytes)}, "
                f'"{recommended.heuristic}"',
            )
    axes.set_ylabel("time of a step,\nrelative to no threshold")
    drawing.set_title(axes, "A training step under DTR at several thresholds")
    _finish(axes)


def _draw_peak(axes: "Axes", sweep: Any) -> None:
    rows = [row for row in _curve(sweep) if not row.error]
    thresholds = [_megabytes(row.threshold_bytes) for row in rows]
    axes.plot(
        thresholds,
        [_megabytes(row.peak_bytes) for row in rows],
        color=drawing.BLUE,
        marker="o",
        label="measured peak",
    )
    axes.plot(
        thresholds,
        thresholds,
        color="black",
        linestyle="--",
        linewidth=1,
        label="the threshold",
    )
    if sweep.plain.peak_bytes:
        axes.axhline(
            _megabytes(sweep.plain.peak_bytes),
            color=drawing.GREY,
            linestyle=":",
            label="plain eager Keras",
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("threshold, MB")
    axes.set_ylabel("peak, MB")
    _finish(axes)


def _curve(sweep: Any) -> list:
    """The rows of one heuristic, by threshold."""
    rows = [
        row
        for row in sweep.rows
        if row.threshold_bytes and row.heuristic == sweep.unlimited.heuristic
    ]
    return sorted(rows, key=lambda row: row.threshold_bytes)


def _megabytes(num_bytes: int) -> float:
    return num_bytes / 1e6


def _finite(value: float) -> float:
    """What cannot run leaves a gap."""
    return value if math.isfinite(value) else math.nan


def _finish(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
