"""Tells which layers may run in tiles, and which rows they read for a row.

Such a layer computes each row of its result from a few rows of what it is
given, alike for all rows, pads as at the ends of an image wherever its argument
ends, and draws, assigns and adds to losses nothing. Only of Keras's own layers
is that known, and not of what is derived from them.
"""

from typing import Any

import keras
from keras import layers

from kmem.keras_graph.recording import Call
from kmem.planning.network import Window

_CONVOLUTIONS = (
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D),
    *(layers.DepthwiseConv1D, layers.DepthwiseConv2D),
    *(layers.SeparableConv1D, layers.SeparableConv2D),
)
_POOLING = (
    *(layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D),
    *(layers.AveragePooling1D, layers.AveragePooling2D),
    layers.AveragePooling3D,
)
_PADDING = layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D
_CROPPING = layers.Cropping1D, layers.Cropping2D, layers.Cropping3D
_BY_NUMBER = (
    *(layers.Activation, layers.ReLU, layers.LeakyReLU, layers.ELU),
    *(layers.Identity, layers.Rescaling, layers.Dense),
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average),
    *(layers.Maximum, layers.Minimum),
)
# They may work along the last axis.
_ALONG_AN_AXIS = (
    *(layers.BatchNormalization, layers.Concatenate),
    layers.LayerNormalization,
)
_FUNCTIONS = {f for f in vars(keras.activations).values() if callable(f)}


def window_of(call: Call) -> Window | None:
    """What a call computes a row from; `None` if it may not run in tiles."""
    layer: Any = call.operation
    read = [
        leaf
        for leaf in keras.tree.flatten(call.arguments)
        if keras.ops.is_tensor(leaf)
    ]
    shapes: list[Any] = [t.shape for t in (*read, *call.results)]
    if (
        not read
        or len(call.results) != 1
        or None in call.reads
        or any(s.rank is None or s.rank < 3 or not s[1] for s in shapes)
        or len({(s.rank, s[1]) for s in shapes[:-1]}) > 1
        or getattr(layer, "data_format", "channels_last") != "channels_last"
        or getattr(layer, "activity_regularizer", None) is not None
        or getattr(layer, "quantization_mode", None) is not None
        or getattr(layer, "activation", None) not in {None, *_FUNCTIONS}
    ):
        return None
    given, made = int(shapes[0][1]), int(shapes[-1][1])
    size, stride, before, after = _reach(layer, given, shapes[0].rank - 1)
    if not size or made != (given + before + after - size) // stride + 1:
        return None
    return Window(given, made, size, stride, before)


def _reach(layer: Any, rows: int, last_axis: int) -> tuple[int, int, int, int]:
    """How many rows it reads, in steps of how many, with how many of padding
    at both ends; of no rows, if that is not known."""
    kind = type(layer)
    if kind in _CONVOLUTIONS:
        size = (layer.kernel_size[0] - 1) * layer.dilation_rate[0] + 1
        return size, layer.strides[0], *_padded(layer, rows, size)
    if kind in _POOLING:
        size = layer.pool_size[0]
        return size, layer.strides[0], *_padded(layer, rows, size)
    if kind in _PADDING:
        return 1, 1, *_ends(layer.padding)
    if kind in _CROPPING:
        return 1 + sum(_ends(layer.cropping)), 1, 0, 0
    if kind in _BY_NUMBER:
        return 1, 1, 0, 0
    # In training, statistics are those of all rows.
    is_frozen = kind is not layers.BatchNormalization or not layer.trainable
    axis = getattr(layer, "axis", None)
    axes = list(axis) if isinstance(axis, list | tuple) else [axis]
    if kind in _ALONG_AN_AXIS and is_frozen and axes in ([-1], [last_axis]):
        return 1, 1, 0, 0
    return 0, 1, 0, 0


def _padded(layer: Any, rows: int, size: int) -> tuple[int, int]:
    if layer.padding == "valid":
        return 0, 0
    if layer.padding == "causal":
        return size - 1, 0
    stride = layer.strides[0]
    total = max((-(-rows // stride) - 1) * stride + size - rows, 0)
    return total // 2, total - total // 2


def _ends(amounts) -> tuple[int, int]:
    """Those along the first axis: of several axes there are several pairs."""
    first = amounts[0]
    return tuple(amounts) if isinstance(first, int) else tuple(first)
