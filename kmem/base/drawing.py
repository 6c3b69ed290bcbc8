"""How kmem shows things: what its pictures have in common, and notebooks."""

import html
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#80868b"
BLUE = "#1a73e8"
AMBER = "#f9ab00"
RED = "#c5221f"


class Shown:
    """What a notebook shows by its `summary`."""

    def summary(self) -> str:
        """In words."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.summary())}</pre>"


def new_figure(subject: str) -> "Figure":
    """An empty figure.

    Args:
        subject: What is drawn, for the error.

    Raises:
        ImportError: If matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            f'Drawing {subject} needs matplotlib: pip install "kmem[plot]"'
        )
    # Not by way of pyplot, whose backend is the program's own choice.
    from matplotlib.figure import Figure

    return Figure(figsize=(10, 5.8), layout="constrained")


def set_title(axes: "Axes", title: str) -> None:
    """Heads a figure."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=14)
