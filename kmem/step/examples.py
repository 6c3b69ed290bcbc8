"""A few examples on which losses and steps are tried: random ones, and such
whose labels say that there is nothing to learn from them.

What this module does not do: try anything (comparing.py).
"""

import contextlib
import itertools
import math
import string
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from kmem.step import batches

# Two halves, in two ways, as one may be the same by chance; not of one row, of
# which an axis may be left out.
NUM_ROWS, ALL = 4, slice(None)
HALVES = ((slice(0, 2), slice(2, 4)), (slice(0, 4, 2), slice(1, 4, 2)))
# A size that is not known, and the largest that is tried where all are many.
_UNKNOWN, _SMALL = 2, 8
# Of rows of unequal length: a half may be shorter than the whole.
_LENGTHS = np.array([1, 1, 2, 2])
_MANY = 2**20
# What labels say by convention, such as that there is none: the examples of
# which a loss may count.
_MARKS = (-100, -1, 0, 1, 255, math.nan)
# The share of a row's labels that is one of these.
_MARKED = np.array([0, 0.3, 0.7, 1])
# How many random ones.
_NUM_DRAWS = 3


def vocabularies(layers: list, specs: list) -> Iterator[dict[str, list]]:
    """What random words, and integers, may be: those that layers look up, since
    to them all others are the same; then any integers."""
    known: list = []
    if not all(spec.dtype.is_floating for spec in specs):
        for layer in layers:
            # One of one's own may be anything of that name.
            with contextlib.suppress(Exception), tf.init_scope():
                known += layer.get_vocabulary()
    words = [term for term in known if isinstance(term, str)]
    integers = [term for term in known if not isinstance(term, str)]
    words = words or list(string.ascii_letters)
    # Zeros may be a mask, of which Keras refuses some on a GPU.
    for numbers in filter(None, (integers, [0, 1], [1, 2])):
        yield {"words": words, "integers": numbers}


def labels(specs) -> range:
    """Which of a batch's leaves are its labels, as Keras unpacks them."""
    if not isinstance(specs, tuple) or len(specs) not in (2, 3):
        return range(0)
    x, y, *_ = specs
    first = len(batches.leaves(x))
    return range(first, first + len(batches.leaves(y)))


def several(tensors: list) -> Iterator[list[tf.Tensor]]:
    """Labels and predictions: random ones, and such with marks."""
    draws = [random(tensors, seed, "float32") for seed in range(_NUM_DRAWS)]
    yield from draws
    yield from marked(draws[0], range(1))


def scaled(
    arrays: list, labels: range, layers: list
) -> Iterator[list[tf.Tensor]]:
    """Numbers of a batch, those of features as large as layers take them that
    scale: to these, smaller ones are all alike."""
    sizes = set()
    for layer in layers:
        if isinstance(layer, keras.layers.Rescaling):
            sizes.add(1 / np.max(np.abs(layer.scale)))
        elif isinstance(layer, keras.layers.Normalization):
            # One that is not adapted yet has no numbers.
            with contextlib.suppress(TypeError, ValueError):
                mean, variance = map(np.array, (layer.mean, layer.variance))
                sizes.add(float(np.max(np.abs(mean) + np.sqrt(variance))))
    for size in sorted(sizes):
        yield [
            array * tf.cast(size, array.dtype)
            if array.dtype.is_floating and place not in labels
            else array
            for place, array in enumerate(arrays)
        ]


def marked(arrays: list, labels: range) -> Iterator[list[tf.Tensor]]:
    """Numbers of a batch, of which some labels are a mark that they can be.

    Args:
        arrays: The numbers.
        labels: Which of them are labels.
    """
    for mark in _MARKS:
        places = [place for place in labels if _may_be(arrays[place], mark)]
        if places:
            yield [
                _marked(array, mark) if place in places else array
                for place, array in enumerate(arrays)
            ]


def taken(rows: slice, spec, array: tf.Tensor):
    """Some rows of numbers, in the form that a spec tells of."""
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.sparse.from_dense(array[rows])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(
            array[rows],
            lengths=_LENGTHS[rows] if spec.ragged_rank == 1 else None,
            ragged_rank=spec.ragged_rank,
            row_splits_dtype=spec.row_splits_dtype,
        )
    return array[rows] if array.shape.rank else array


def random(
    tensors: list,
    seed: int = 0,
    dtype: str | None = None,
    words: Sequence[str] = (),
    integers: Sequence[int] = (0, 1),
) -> list[tf.Tensor]:
    """Numbers between 0 and 1, or some of those given, in the place of tensors:
    in their dtypes, or in another one and of fewer if they are many."""
    # What one does not know of an axis, such as a length, another may.
    axes = itertools.zip_longest(*(tensor.shape[1:] for tensor in tensors))
    usual = [next(filter(None, sizes), _UNKNOWN) for sizes in axes]
    known = []
    for tensor in tensors:
        sizes = [size or usual[i] for i, size in enumerate(tensor.shape[1:])]
        known.append([NUM_ROWS, *sizes] if tensor.shape.rank != 0 else [])
    if dtype and max(map(math.prod, known)) > _MANY:
        known = [[min(size, _SMALL) for size in shape] for shape in known]
    rng = np.random.default_rng(seed)
    arrays = []
    for tensor, shape in zip(tensors, known, strict=True):
        own = tf.as_dtype(tensor.dtype)
        if own == tf.string:
            array = rng.choice(words, shape)
        elif own.is_floating:
            array = rng.uniform(0.1, 0.9, shape)
        else:
            array = rng.choice(integers, shape)
        arrays.append(tf.cast(array, dtype or own))
    return arrays


def _may_be(array: tf.Tensor, mark: float) -> bool:
    """Whether numbers of an array may be a mark."""
    is_whole = array.dtype.is_integer and not math.isnan(mark)
    return bool(array.shape.rank) and (array.dtype.is_floating or is_whole)


def _marked(array: tf.Tensor, mark: float) -> tf.Tensor:
    """Labels of which some are a mark."""
    share = _MARKED.reshape([-1] + [1] * (array.shape.rank - 1))
    is_marked = np.random.default_rng(1).uniform(size=np.shape(array)) < share
    return tf.where(is_marked, tf.cast(mark, array.dtype), array)
