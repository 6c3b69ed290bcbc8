"""What training costs at several thresholds of DTR: `kmem.Sweep`, as a table
and as the figure of MegEngine's guide, measured, with what was predicted
beside it.
"""

import dataclasses
import math
import os
from collections.abc import Collection
from typing import Any

from kmem.base import drawing
from kmem.base.sizes import format_size
from kmem.options import DTR

_MOST_SLOWDOWN = 1.3

_NAME = "{:<22} {:>5}"
_MEASURED = "{:>7} {:>5} {:>10} {:>9} {:>10}"
_PREDICTED = "{:>9} {:>10}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A threshold, and what a training step needed with it.

    Attributes:
        dtr: The settings; `None` for plain eager Keras.
        step_seconds: The time of a step: the fastest of several, and the
            mean over the batches. `None` if it could not run.
        peak_bytes: The most bytes that were in use in any step.
        num_evictions: How often a tensor was evicted in a step.
        num_recomputations: How many operators ran again in a step.
        predicted_seconds: `step_seconds` by the simulator, from the time
            without a threshold; infinite if it could not run there.
        predicted_peak_bytes: `peak_bytes` by the simulator.
        error: Why it could not run; empty if it could.
    """

    dtr: DTR | None
    step_seconds: float | None = None
    peak_bytes: int | None = None
    num_evictions: int = 0
    num_recomputations: int = 0
    predicted_seconds: float | None = None
    predicted_peak_bytes: float | None = None
    error: str = ""

    @property
    def threshold_bytes(self) -> int:
        """The threshold; 0 if there is none."""
        return int(self.dtr.eviction_threshold) if self.dtr else 0


@dataclasses.dataclass(frozen=True)
class Sweep(drawing.Shown):
    """What training costs at several thresholds of DTR, measured.

    Attributes:
        rows: Plain eager Keras, DTR without a threshold, and a row for each
            threshold.
        pool_bytes: The size of the device's pool, whose peaks the rows have
            then; `None` if its memory is not a pool.
    """

    rows: tuple[Row, ...]
    pool_bytes: int | None = None

    @property
    def plain(self) -> Row:
        """Eager Keras, without kmem."""
        return self.rows[0]

    @property
    def unlimited(self) -> Row:
        """DTR without a threshold, to which times are compared."""
        return self.rows[1]

    def slowdown(self, row: Row) -> float:
        """A row's step time relative to that without a threshold; infinite
        if it could not run."""
        return self._relative(row.step_seconds)

    def predicted_slowdown(self, row: Row) -> float:
        """`slowdown` by the simulator."""
        return self._relative(row.predicted_seconds)

    def _relative(self, seconds: float | None) -> float:
        whole = self.unlimited.step_seconds
        return seconds / whole if seconds and whole else math.inf

    @property
    def recommended(self) -> DTR:
        """The smallest threshold that the peak stays within and with
        which a step takes at most 1.3 times as long as without one, or as
        the fastest if that could not run."""
        kept: list[Any] = [
            row
            for row in self.rows[1:]
            if row.step_seconds
            and (row.peak_bytes or 0) <= (row.threshold_bytes or math.inf)
        ]
        times = [row.step_seconds for row in kept]
        most = self.unlimited.step_seconds or min(times, default=0.0)
        most *= _MOST_SLOWDOWN
        rows = [row for row in kept if row.step_seconds <= most]
        rows = rows or [self.unlimited]
        return min(rows, key=lambda row: row.threshold_bytes or math.inf).dtr

    def summary(self) -> str:
        """A table of what was measured, and predicted."""
        chosen = self.recommended
        head = (
            _NAME.format("threshold", "share"),
            _MEASURED.format(
                "seconds", "time", "peak", "evictions", "recomputed"
            ),
            _PREDICTED.format("predicted", "peak"),
        )
        lines = [" ".join(head), *map(self._line, self.rows)]
        lines += [
            'time: relative to "no threshold"; beside it, as the simulator '
            "predicts it.",
            f"recommended: {_name(chosen)}, heuristic "
            f'"{chosen.heuristic}": the smallest threshold with a time of at '
            f"most {_MOST_SLOWDOWN}.",
        ]
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike) -> None:
        """Draws step time and peak over the thresholds.

        Args:
            path: Where to save the picture; its ending says the format.

        Raises:
            ImportError: If matplotlib is missing.
            ValueError: If there are fewer than two thresholds.
        """
        _figure(self).savefig(path, dpi=150)

    def _line(self, row: Row) -> str:
        name, share = _name(row.dtr), ""
        if row.threshold_bytes and self.plain.peak_bytes:
            share = f"{row.threshold_bytes / self.plain.peak_bytes:.2f}"
        measured = row.error
        if row.step_seconds is not None:
            measured = _MEASURED.format(
                f"{row.step_seconds:.3f}",
                f"{self.slowdown(row):.2f}",
                format_size(row.peak_bytes or 0),
                row.num_evictions,
                row.num_recomputations,
            )
        predicted = ""
        if row.dtr is not None:
            slowdown = self.predicted_slowdown(row)
            can_run = math.isfinite(slowdown)
            predicted = _PREDICTED.format(
                f"{slowdown:.2f}" if can_run else "no",
                format_size(row.predicted_peak_bytes or 0) if can_run else "",
            )
        width = len(_MEASURED.format(*[""] * 5))
        head = _NAME.format(name, share)
        return f"{head} {measured:<{width}} {predicted}".rstrip()


def _name(options: DTR | None) -> str:
    if options is None:
        return "Keras, eager"
    threshold = int(options.eviction_threshold)
    return format_size(threshold) if threshold else "no threshold"


def check_points(thresholds: Collection) -> None:
    """Refuses to draw a curve through a single point."""
    if len(set(thresholds)) < 2:
        shown = ", ".join(map(str, thresholds)) or "none"
        raise ValueError(
            "The picture of a sweep needs at least two thresholds. "
            f"Received: {shown}"
        )


def _figure(sweep: Sweep) -> drawing.Figure:
    """A figure with two axes: the time of a step and its peak, both over the
    threshold."""
    check_points([format_size(row.threshold_bytes) for row in _curve(sweep)])
    result = drawing.new_figure("a sweep")
    time, peak = result.subplots(2, sharex=True, height_ratios=(3, 2))
    _draw_time(time, sweep)
    _draw_peak(peak, sweep)
    return result


def _draw_time(axes: drawing.Axes, sweep: Sweep) -> None:
    rows = _curve(sweep)
    recommended = sweep.recommended
    # What cannot run, and takes for ever, leaves a gap.
    predicted = [sweep.predicted_slowdown(row) for row in rows]
    style: Any = {"color": drawing.AMBER, "label": "predicted by the simulator"}
    axes.plot(_thresholds(rows), predicted, ".--", **style)
    measured = [sweep.slowdown(row) for row in rows]
    style: Any = {"color": drawing.BLUE, "label": "measured"}
    axes.plot(_thresholds(rows), measured, "o-", **style)
    for row in rows:
        if not row.error:
            place = row.threshold_bytes / 1e6, sweep.slowdown(row)
            words = f"{format_size(row.threshold_bytes)}: {place[1]:.2f}x"
            style: Any = {"textcoords": "offset points", "fontsize": 8}
            axes.annotate(words, place, (6, 5), **style)
    if sweep.plain.step_seconds:
        _mark(axes, sweep.slowdown(sweep.plain), "plain eager Keras", ":")
    failed = [row for row in rows if row.error]
    if failed:
        style: Any = {"color": drawing.RED, "label": "cannot run"}
        axes.plot(_thresholds(failed), [1.0] * len(failed), "x", **style)
    for row in sweep.rows:
        if row.dtr == recommended and row.threshold_bytes:
            style: Any = {"color": drawing.BLUE, "markersize": 16}
            axes.plot(
                *(row.threshold_bytes / 1e6, sweep.slowdown(row), "*"),
                label=f"recommended: {format_size(row.threshold_bytes)}, "
                f'"{recommended.heuristic}"',
                **style,
            )
    axes.set_ylabel("time of a step,\nrelative to no threshold")
    title = "A training step under DTR at several thresholds"
    drawing.finish(axes, title)


def _draw_peak(axes: drawing.Axes, sweep: Sweep) -> None:
    rows = [row for row in _curve(sweep) if not row.error]
    thresholds = _thresholds(rows)
    peaks = [(row.peak_bytes or 0) / 1e6 for row in rows]
    style: Any = {"color": drawing.BLUE, "label": "measured peak"}
    axes.plot(thresholds, peaks, "o-", **style)
    style: Any = {"color": "black", "label": "the threshold", "linewidth": 1}
    axes.plot(thresholds, thresholds, "--", **style)
    if sweep.plain.peak_bytes:
        _mark(axes, sweep.plain.peak_bytes / 1e6, "plain eager Keras", ":")
    if sweep.pool_bytes is not None:
        _mark(axes, sweep.pool_bytes / 1e6, "the pool", "-.")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("threshold, MB")
    axes.set_ylabel("peak, MB")
    drawing.finish(axes)


def _mark(axes: drawing.Axes, height: float, label: str, line: str) -> None:
    axes.axhline(height, color=drawing.GREY, linestyle=line, label=label)


def _curve(sweep: Sweep) -> list[Row]:
    """The rows that have a threshold, by it."""
    rows = [row for row in sweep.rows if row.threshold_bytes]
    return sorted(rows, key=lambda row: row.threshold_bytes)


def _thresholds(rows: list[Row]) -> list[float]:
    return [row.threshold_bytes / 1e6 for row in rows]
