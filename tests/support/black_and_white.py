"""Whether a picture says what it says without its colors."""

from matplotlib import collections
from matplotlib import container
from matplotlib import lines
from matplotlib import patches


def _look(artist) -> tuple:
    """All that can be seen of an artist in black and white."""
    if isinstance(artist, lines.Line2D):
        filled = artist.get_markerfacecolor() != "none"
        dots = artist.get_marker(), artist.get_markersize(), filled
        return (artist.get_linestyle(), *dots)
    if isinstance(artist, patches.Patch):
        line = "" if artist.get_fill() else artist.get_linestyle()
        return "patch", artist.get_fill(), artist.get_hatch() or "", line
    if isinstance(artist, collections.Collection):
        return "patch", True, artist.get_hatch() or "", ""
    if isinstance(artist, container.BarContainer):
        return _look(artist.patches[0])
    return (type(artist).__name__,)


def assert_readable_in_black_and_white(figure) -> None:
    """What a legend tells apart looks different on each of the axes."""
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        looks: dict[tuple, str] = {}
        for handle, label in zip(handles, labels, strict=True):
            look = _look(handle)
            assert look not in looks, f"{label} looks like {looks[look]}"
            looks[look] = label
