"""How kmem shows things: what its pictures have in common, and notebooks.

No picture says anything by colour alone: fills differ by their hatches as
well, curves by their lines, points by their markers, and what can be is
labelled where it stands. Colours are those of Okabe and Ito, which
colour-blind people can tell apart.
"""

import html
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from kmem.base import checks
from kmem.base.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    # Matplotlib may be missing.
    Axes = Figure = Any

GREY = "#80868b"
BLUE = "#1a73e8"
AMBER = "#f9ab00"
RED = "#c5221f"

# What bytes are for, with colour and hatch.
KINDS = {
    "parameters": ("#f0e442", ""),
    "optimizer": ("#009e73", "\\"),
    "batch": ("#bdc1c6", "."),
    "gradients": ("#e69f00", "x"),
    "activations": ("#56b4e9", "/"),
    "workspace": ("#cc79a7", "-"),
    "batch and others": ("#bdc1c6", "."),
}

# A share of the picture in which words can be read.
_READABLE = 0.06


class Shown:
    """What a notebook shows by its `summary`."""

    def summary(self) -> str:
        """In words."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.summary())}</pre>"


def new_figure(subject: str) -> Figure:
    """An empty figure, or an ImportError that names the subject."""
    checks.require(f"Drawing {subject}", "plot", "matplotlib")
    # Not by way of pyplot, whose backend is the program's own choice.
    from matplotlib.figure import Figure

    return Figure(figsize=(10, 5.8), layout="constrained")


def scale(highest_bytes: float) -> tuple[float, str]:
    """The unit for sizes up to the highest, in bytes, and its name."""
    return (1e9, "GB") if highest_bytes >= 1e10 else (1e6, "MB")


def pattern(kind: str) -> dict[str, Any]:
    """How the bytes of a kind are filled."""
    color, hatch = KINDS[kind]
    return {"color": color, "hatch": 2 * hatch, "edgecolor": "black"}


def mark_budget(line: Callable, num_bytes: int, unit: float) -> None:
    """Draws a budget by `axhline` or `axvline`."""
    label = f"budget: {format_size(num_bytes)}"
    style = {"color": "black", "linestyle": "--", "linewidth": 1}
    line(num_bytes / unit, **style, label=label)


def bands(axes: Axes, edges: Any, kinds: dict[str, Any], unit: float) -> None:
    """Draws bytes over a step, of each kind upon those before, and says at
    the peak what they are."""
    total: Any = sum(kinds.values())
    at, base = int(total.argmax()), 0 * total
    beside: Any = {"ha": "right" if 2 * edges[at] > edges[-1] else "left"}
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for kind, num_bytes in kinds.items():
        top = base + num_bytes / unit
        fill = {"fill": True, "linewidth": 0.3, **pattern(kind)}
        axes.stairs(top, edges, baseline=base, **fill, label=kind)
        if num_bytes[at] > _READABLE * total[at]:
            place = edges[at], (base[at] + top[at]) / 2
            words = f"{kind}: {format_size(int(num_bytes[at]))}"
            axes.text(
                *place, words, **beside, va="center", fontsize=8, bbox=box
            )
        base = top
    axes.axvline(edges[at], color="black", linestyle=":", linewidth=1)
    axes.set(xlim=(0, edges[-1]), ylim=(0, 1.05 * base[at]))


def finish(
    axes: Axes, title: str = "", columns_below: int = 0, **legend: Any
) -> None:
    """Heads a picture, and tells in a legend what its artists are: within it,
    or below, in so many columns, those of all of the figure."""
    if title:
        axes.set_title(title, loc="left", fontweight="bold", fontsize=14)
    axes.spines[["top", "right"]].set_visible(False)
    if not columns_below:
        axes.legend(frameon=False, **legend)
        return
    artists = {}
    for each in axes.figure.axes:
        handles, labels = each.get_legend_handles_labels()
        artists |= dict(zip(labels, handles, strict=True))
    # Of several pictures the last one has it.
    axes.figure.legends.clear()
    place = {"loc": "outside lower center", "ncols": columns_below}
    axes.figure.legend(artists.values(), artists, frameon=False, **place)
