"""Draws what memory is used for over a training step, as it was simulated.

Bytes lie upon each other by kind; beside them stand the largest tensors at the
peak, with their names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from kmem.base import drawing
from kmem.base.sizes import format_size

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


def figure(timeline: Timeline) -> drawing.Figure:
    """A figure with two axes: the bytes of a step, and the largest tensors."""
    drawn = drawing.new_figure("an estimate")
    memory, names = drawn.subplots(1, 2, width_ratios=(3, 2))
    # In percent of the step.
    edges = 100 * np.array(timeline.starts) / (timeline.starts[-1] or 1.0)
    kinds = {
        **{kind: 0 * edges[1:] + b for kind, b in timeline.fixed.items()},
        **timeline.in_use,
    }
    kinds = {kind: each for kind, each in kinds.items() if each.any()}
    total: Any = sum(kinds.values())
    peak = int(total.max())
    scale, unit = drawing.scale(peak)
    drawing.bands(memory, edges, kinds, scale)
    memory.set(xlabel="progress of the step, %", ylabel=f"in use, {unit}")
    size = format_size(peak)
    title = f"A step of {timeline.batch_size} examples: {size} at the peak"
    drawing.finish(memory, title, columns_below=6)
    for place, tensor in enumerate(timeline.tensors[:_NUM_NAMES]):
        words = (
            f" {place + 1}. {tensor.name}: {format_size(tensor.num_bytes)}, "
            f"{tensor.dtype}{list(tensor.shape)}"
        )
        length = tensor.num_bytes / scale
        names.barh(place, length, 0.45, **drawing.pattern(tensor.kind))
        names.text(0, place - 0.28, words, va="bottom", fontsize=8)
    names.set(ylim=(_NUM_NAMES - 0.5, -0.8), yticks=[])
    names.set_xlabel(f"the largest tensors at the peak, {unit}")
    names.spines[["top", "right"]].set_visible(False)
    return drawn
