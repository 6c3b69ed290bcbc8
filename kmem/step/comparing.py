"""Which losses compare the examples of a batch.

A mean over examples can be put together of the means of parts; what a loss
such as `keras.losses.Dice()` or `Circle` makes of all examples cannot, nor a
sum made by hand. A loss does not say which it is, so it is tried: on a few
random examples, together and in two parts. What this module does not do: look
into losses that are no `keras.Loss`, of a `train_step` or of layers.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from kmem.base import patching
from kmem.step.metrics import reached_from

# Two halves: of one row an axis may be left out.
_ROWS, _HALF = 4, 2
# A size that is not known, and the largest that is tried where all are many.
_UNKNOWN, _SMALL = 2, 8
_MANY = 2**20
_OF_SHAPES = frozenset({"OnesLike", "ZerosLike", "Shape", "Size", "Rank"})
# By how much sums in another order may differ, of the largest number.
_ROUNDING = 1e-4


@contextlib.contextmanager
def looking() -> Iterator[dict[str, bool | None]]:
    """Tells, for the losses that this thread computes within, by name: whether
    it compares examples; `None` of one that takes no random numbers."""
    found: dict[str, bool | None] = {}

    def call(compute, loss, y_true, y_pred, *args, **kwargs):
        found[loss.name] = _compares(loss, y_true, y_pred)
        return compute(loss, y_true, y_pred, *args, **kwargs)

    with patching.method(keras.losses.Loss, "__call__", call):
        yield found


def warn(names: list[str]) -> None:
    """Says that losses see the examples of a part together."""
    warnings.warn(
        "Losses that compare the examples of a batch see one part of it at a "
        "time, so that their gradients are not those of the whole batch: see "
        '"What differs" in docs/accumulation.md. A sum over the examples has '
        f'to be told by `reduction="sum"`. Received: {", ".join(names)}',
        stacklevel=2,
    )


def check_masks(model, denominators: list, weights: list) -> None:
    """Refuses losses whose denominators depend on weights that are unknown."""
    reached = reached_from(weights, without=_OF_SHAPES)
    if reached.isdisjoint(map(id, denominators)):
        return
    raise ValueError(
        "`sharding` needs losses whose masks do not depend on predictions, as "
        "`keras.losses.Circle`'s does: what a loss is divided by is counted "
        "before weights are gathered. Take another loss, or "
        f'`sharding="optimizer"`. Received: model={model.name}'
    )


def _compares(loss, y_true, y_pred) -> bool | None:
    try:
        with tf.init_scope():
            arrays = _random([y_true, y_pred])
            together, *parts = (
                np.asarray(loss.call(*(array[rows] for array in arrays)))
                for rows in (slice(None), slice(_HALF), slice(_HALF, None))
            )
            apart = np.concatenate(parts) if together.ndim else np.mean(parts)
    except Exception:
        # A loss of one's own may need other numbers, and raise anything.
        return None
    if not np.all(np.isfinite(together)):
        return None
    tolerance = _ROUNDING * np.abs(together).max(initial=0)
    return together.shape != apart.shape or not np.allclose(
        together, apart, rtol=0, atol=tolerance
    )


def _random(tensors: list) -> list[tf.Tensor]:
    """Numbers between 0 and 1, or either of them, in the place of tensors."""
    sizes = [[size or _UNKNOWN for size in t.shape[1:]] for t in tensors]
    known = [[_ROWS, *size] for size in sizes]
    if max(map(math.prod, known)) > _MANY:
        known = [[min(size, _SMALL) for size in shape] for shape in known]
    rng = np.random.default_rng(0)
    arrays = []
    for tensor, shape in zip(tensors, known, strict=True):
        array = rng.uniform(0.1, 0.9, shape)
        if not tf.as_dtype(tensor.dtype).is_floating:
            array = np.round(array)
        arrays.append(tf.constant(array, "float32"))
    return arrays
