"""Runs a function of an image in tiles: some rows after others.

A function whose rows depend on few rows of its argument (convolutions, pooling,
what works number by number) may be run on the rows that a part of its result
needs, forward and, again, for its gradient. So only one tile's activations are
in memory. A tile is run by the very layers, on a few rows too many: their own
padding makes the outermost rows wrong, unless the image ends there, and these
are cut off. Which rows that takes, `kmem.planning.tiles` says. What it does not
do: what one function runs for all rows at once, such as batch statistics.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from kmem.base import private_keras
from kmem.base import private_tf
from kmem.graph import control
from kmem.planning.network import Tile
from kmem.remat import gradient
from kmem.remat.structure import Structure
from kmem.remat.structure import summed


def tiled(fn: Callable, tiles: Sequence[Tile]) -> Callable:
    """Runs a function in tiles, and each of them again for its gradient.

    Args:
        fn: A function of one tensor, that gives one. It must draw, assign and
            add to losses nothing.
        tiles: In the order of their rows, which are those of axis 1. What they
            read covers the argument, and what they make is the result.
    """

    def call(tensor):
        if private_keras.mask_of(tensor) is not None:
            return gradient.recompute(fn, check=False)(tensor)
        if gradient.is_running() and not gradient.is_repeating():
            return _forward(tensor, tiles, functools.partial(_run, fn))
        return _Tiled(fn, tensor, tiles)()

    return call


class _Part(gradient.Segment):
    """What runs in tiles, or one tile of it."""

    is_compared = False

    def take(self, run):
        # A variable of Keras's that is read in a `tf.function` of a layer's,
        # for a tile and for all of them, passes for one that is not Keras's.
        run.raw = []
        return super().take(run)


class _Tiled(_Part):
    """One call of a function in tiles."""

    def __init__(self, fn: Callable, tensor, tiles: Sequence[Tile]):
        super().__init__(self._run_first, Structure(((tensor,), {})))
        self._function = fn
        self._tiles = tiles
        self._parts: list[_Part] = []

    def _run_first(self, tensor):
        self._parts = []

        def run(tile, piece):
            spec = tf.TensorSpec(piece.shape, piece.dtype)
            cropped = functools.partial(_run, self._function, tile)
            part = _Part(cropped, Structure(((spec,), {})))
            made, result = part.first_run([piece])
            part.take(made)
            self._parts.append(part)
            return result

        return _forward(tensor, self._tiles, run)

    def found(self, wanted, upstream, tensors, values):
        """The gradients, computed tile by tile."""
        (tensor,), (of_result,) = tensors, upstream
        of_pieces: list = []
        sums: list = []
        before, row = upstream, 0
        for tile, part in zip(self._tiles, self._parts, strict=True):
            rows = slice(row, row := row + tile.last - tile.first)
            given = _after(
                before,
                lambda tile=tile, rows=rows: [
                    of_result[:, rows],
                    tensor[:, tile.start : tile.stop],
                ],
            )
            of_piece, *of_values = part.found(
                wanted, given[:1], given[1:], values
            )
            of_pieces.append(of_piece)
            both = zip(sums or [None] * len(of_values), of_values, strict=True)
            sums = [summed(list(pair)) for pair in both]
            before = [g for g in sums if g is not None] or [of_piece]
        if any(piece is None for piece in of_pieces):
            return [None, *sums]
        return [_joined(of_pieces, self._tiles), *sums]


def _run(fn: Callable, tile: Tile, piece):
    return fn(piece)[:, tile.first : tile.last]


def _forward(tensor, tiles: Sequence[Tile], run: Callable):
    """The result of all tiles, which are run one after another."""
    results: list = []
    for tile in tiles:
        (piece,) = _after(
            results[-1:],
            lambda tile=tile: [tensor[:, tile.start : tile.stop]],
        )
        results.append(run(tile, piece))
    return tf.concat(results, axis=1)


def _after(before: list, make: Callable[[], list[tf.Tensor]]) -> list:
    """What is made once other tensors are there."""
    if not before:
        return make()
    with control.behind(before):
        made = make()
    return control.delayed(before, made) if private_tf.in_xla() else made


def _joined(pieces: list, tiles: Sequence[Tile]):
    """The gradient of a tensor from those of pieces, which overlap."""
    ends = sorted({end for tile in tiles for end in (tile.start, tile.stop)})
    bands = []
    for start, stop in zip(ends, ends[1:], strict=False):
        shares = [
            piece[:, start - tile.start : stop - tile.start]
            for piece, tile in zip(pieces, tiles, strict=True)
            if tile.start <= start and stop <= tile.stop
        ]
        bands.append(summed(shares))
    return tf.concat(bands, axis=1)
