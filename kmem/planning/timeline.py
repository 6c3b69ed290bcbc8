"""Draws what memory is used for over a training step, as it was simulated.

Bytes lie upon each other by kind; beside them stand the largest tensors at the
peak, with their names. A picture is matplotlib's; a page, on which the pointer
tells the numbers and the mouse zooms in, is plotly's and needs no network.
"""

import dataclasses
import importlib.resources
import json
import os
import pathlib
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from kmem.base import checks
from kmem.base import drawing
from kmem.base.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_NAMES = 10


@dataclasses.dataclass(frozen=True)
class TensorAtPeak:
    """A tensor that is in memory at the peak.

    Attributes:
        layer: The layer whose operation made it, or "" if none is known.
        operation: The operation's name in the step's graph.
        shape: Its shape.
        dtype: Its dtype.
        num_bytes: Its size in bytes.
        kind: "activations", "gradients" or "workspace".
    """

    layer: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    kind: str = "workspace"

    @property
    def name(self) -> str:
        """Its layer or, if none is known, its operation."""
        return self.layer or self.operation[-32:]

    def __str__(self) -> str:
        size = format_size(self.num_bytes)
        return f"{self.name:<32} {size:>10} {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The bytes of a step.

    Attributes:
        batch_size: Of how many examples.
        starts: When operations begin, and when the last one ends.
        fixed: Of each kind the bytes that are there throughout.
        in_use: Of the other kinds the bytes from each start to the next.
        tensors: The largest at the peak.
    """

    batch_size: int = 0
    starts: tuple[float, ...] = (0.0, 0.0)
    fixed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    in_use: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    tensors: tuple[TensorAtPeak, ...] = ()

    def plot(self, path: str | os.PathLike) -> None:
        """Writes a picture, or a page if the path ends in ".html"."""
        if os.fspath(path).lower().endswith(".html"):
            pathlib.Path(path).write_text(_page(self), encoding="utf-8")
        else:
            figure(self).savefig(path, dpi=150)

    def _curves(self) -> tuple[np.ndarray, dict[str, np.ndarray], int, str]:
        """The starts and the end in percent of the step, the bytes of each
        kind from each start to the next, at which start the peak is, and a
        title."""
        edges = 100 * np.array(self.starts) / (self.starts[-1] or 1.0)
        kinds = {
            **{kind: 0 * edges[1:] + b for kind, b in self.fixed.items()},
            **self.in_use,
        }
        kinds = {kind: each for kind, each in kinds.items() if each.any()}
        total: Any = sum(kinds.values())
        at = int(np.argmax(total))
        size = format_size(int(total[at]))
        title = f"A step of {self.batch_size} examples: {size} at the peak"
        return edges, kinds, at, title

    def _named(self) -> dict[str, TensorAtPeak]:
        """The largest tensors, by what a picture says of them."""
        return {
            f"{place}. {t.name}: {format_size(t.num_bytes)}, "
            f"{t.dtype}{list(t.shape)}": t
            for place, t in enumerate(self.tensors[:_NUM_NAMES], start=1)
        }


def figure(timeline: Timeline) -> "Figure":
    """A figure with two axes: the bytes of a step, and the largest tensors."""
    drawn = drawing.new_figure("an estimate")
    memory, names = drawn.subplots(1, 2, width_ratios=(3, 2))
    edges, kinds, at, title = timeline._curves()
    scale, unit = drawing.scale(sum(each[at] for each in kinds.values()))
    drawing.bands(memory, edges, kinds, scale)
    memory.set(xlabel="progress of the step, %", ylabel=f"in use, {unit}")
    drawing.finish(memory, title, columns_below=6)
    for place, (words, tensor) in enumerate(timeline._named().items()):
        size = tensor.num_bytes / scale
        names.barh(place, size, 0.45, **drawing.pattern(tensor.kind))
        names.text(0, place - 0.28, f" {words}", va="bottom", fontsize=8)
    names.set(ylim=(_NUM_NAMES - 0.5, -0.8), yticks=[])
    names.set_xlabel(f"the largest tensors at the peak, {unit}")
    names.spines[["top", "right"]].set_visible(False)
    return drawn


def _page(timeline: Timeline) -> str:
    """What timeline.html says, with plotly and the numbers in it."""
    checks.require("A page", "html", "plotly")
    from plotly import offline

    edges, kinds, at, title = timeline._curves()
    step = {
        "title": title,
        "peak": edges[at],
        "progress": edges.tolist(),
        "kinds": {kind: [*each.tolist(), 0] for kind, each in kinds.items()},
        "colors": {kind: color for kind, (color, _) in drawing.KINDS.items()},
        "hatches": {kind: hatch for kind, (_, hatch) in drawing.KINDS.items()},
        "tensors": [
            {**vars(tensor), "words": words}
            for words, tensor in timeline._named().items()
        ],
    }
    template = importlib.resources.files("kmem.planning") / "timeline.html"
    return string.Template(template.read_text(encoding="utf-8")).substitute(
        title=title,
        step=json.dumps(step),
        plotly=offline.get_plotlyjs(),
    )
