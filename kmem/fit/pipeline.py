"""The batches that `fit` will train on, and what its input pipeline holds.

The pipeline holds nothing unless the device is the CPU. How many batches are
ready tf.data decides as it runs: with the arrays that Keras is given it was
seen to be three.
"""

import itertools
import math
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import MutableMapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base import private_tf
from kmem.step import batches

BATCHES_READY = 3
_KERAS_BATCH_SIZE = 32  # What `fit` takes if it is not told.
# Callbacks that call nobody's functions, and write no summaries.
_CHANGING_NO_STEP = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


def fit_batch(arguments: MutableMapping[str, Any]) -> Any:
    """What `train_step` will get first, as `tf.TensorSpec`s.

    Args:
        arguments: Those of `fit`. What gives its first batch away among them,
            to be looked at, gives it again when it is asked for it.

    Returns:
        `(x, y, sample_weight)` or less, or `None` if that is not known.
    """
    x = arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        return _dataset_batch(x)
    if isinstance(x, keras.utils.PyDataset):
        return batches.specs_of(_first_of(arguments), examples=True)
    if isinstance(x, Iterator):
        first = next(x)
        # A generator, since Keras takes no other iterator.
        arguments["x"] = (each for each in itertools.chain([first], x))
        return batches.specs_of(first, examples=True)
    rows = batch_rows(arguments)
    if rows is None:
        return None
    data = [x, arguments.get("y"), arguments.get("sample_weight")]
    parts: Any = keras.tree.map_structure(_in_floatx, data)
    specs = [
        batches.with_rows(batches.specs_of(part, examples=True), rows)
        for part in parts
    ]
    if arguments.get("class_weight") is not None:
        # Keras makes weights of rows of it.
        specs[2] = tf.TensorSpec([rows], keras.config.floatx())
    return keras.utils.pack_x_y_sample_weight(*specs)


def _is_taken(leaf: Any) -> bool:
    """Whether Keras takes it as it is: a tensor that it need not cast."""
    return isinstance(leaf, tf.Tensor) and (
        not leaf.dtype.is_floating or leaf.dtype == keras.config.floatx()
    )


def _in_floatx(leaf: Any) -> Any:
    """A tensor's spec once Keras has cast it, if it does."""
    if not isinstance(leaf, tf.Tensor) or _is_taken(leaf):
        return leaf
    return tf.TensorSpec(leaf.shape, keras.config.floatx())


def _dataset_batch(dataset: tf.data.Dataset) -> Any:
    """The first batch, as specs, if possible without making it: a shuffle has
    another order each time, and a map may draw random numbers.

    Words have to be known: a model may look them up in a vocabulary.
    """
    specs = batches.specs_of(dataset.element_spec)
    size = private_tf.batch_size_of(dataset)
    # The last one may be smaller.
    if size is not None and dataset.cardinality() != 1:
        specs = batches.with_rows(specs, size)
    leaves = batches.leaves(specs)
    if all(x.shape.is_fully_defined() and x.dtype != tf.string for x in leaves):
        return specs
    return batches.specs_of(next(iter(dataset.take(1))), examples=True)


class _LookedAt(keras.utils.PyDataset):
    """A data set whose first batch was asked for, and is given on.

    Attributes:
        first: That batch, until it is.
    """

    def __init__(self, inner: keras.utils.PyDataset):
        super().__init__(
            inner.workers, inner.use_multiprocessing, inner.max_queue_size
        )
        self._inner = inner
        self.first: Any = inner[0]

    @property
    def num_batches(self):
        return self._inner.num_batches

    def __getitem__(self, index):
        if index or self.first is None:
            return self._inner[index]
        first, self.first = self.first, None
        return first

    def on_epoch_begin(self):
        self._inner.on_epoch_begin()

    def on_epoch_end(self):
        self._inner.on_epoch_end()


def _first_of(arguments: MutableMapping[str, Any]) -> Any:
    """The first batch of a `PyDataset`."""
    x = arguments["x"]
    if not isinstance(x, _LookedAt):
        arguments["x"] = x = _LookedAt(x)
    return x.first


def batch_rows(arguments: MutableMapping[str, Any]) -> int | None:
    """The number of rows of `fit`'s batches, if that can be told at once."""
    x = arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        return batches.num_rows(x.element_spec)
    if isinstance(x, keras.utils.PyDataset):
        return batches.num_rows(_first_of(arguments))
    total = batches.num_rows(x)
    if total is None:
        return None
    share = 1 - (arguments.get("validation_split") or 0)
    batch_size = arguments.get("batch_size") or _KERAS_BATCH_SIZE
    return min(batch_size, int(total * share))


def keeps_traces(arguments: Mapping[str, Any]) -> bool:
    """Whether nothing that a trace reads may change before the first step: a
    layer's attributes in a callback, or whether summaries are written."""
    callbacks = keras.tree.flatten(arguments.get("callbacks") or [])
    return not tf.summary.should_record_summaries() and all(
        type(each) in _CHANGING_NO_STEP for each in callbacks
    )


def graph_spec(arguments: Mapping[str, Any], batch: Any) -> Any:
    """What Keras's graph will know of the batches, of which one is given: any
    number of examples where it is not sure."""
    x = arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        return x.element_spec
    rows, total = batches.num_rows(batch), batches.num_rows(x)
    share = 1 - (arguments.get("validation_split") or 0)
    is_even = rows and total and int(total * share) % rows == 0
    return batch if is_even else batches.with_rows(batch, None)


def validation_batch(arguments: MutableMapping[str, Any]) -> Any:
    """As `fit_batch`, of the batches that are validated on."""
    data = arguments.get("validation_data")
    size = arguments.get("validation_batch_size")
    size = size or arguments.get("batch_size")
    share = arguments.get("validation_split") or 0
    if data is None:
        batch = fit_batch(arguments) if share else None
        total = batches.num_rows(arguments.get("x"))
        if batch is None or total is None:
            return None
        most = size or _KERAS_BATCH_SIZE
        return batches.with_rows(batch, min(most, math.ceil(total * share)))
    given = {"x": data, "batch_size": size}
    if isinstance(data, tuple | list):
        given.update(zip(("x", "y", "sample_weight"), data, strict=False))
        return fit_batch(given)
    batch = fit_batch(given)
    arguments["validation_data"] = given["x"]
    return batch


def first_examples(arguments: Mapping[str, Any], count: int) -> Any:
    """Some of the examples that are validated on, in host memory; `None` if
    they are not in arrays."""
    data = arguments.get("validation_data")
    if data is None and arguments.get("validation_split"):
        names = ("x", "y", "sample_weight")
        data = tuple(arguments.get(name) for name in names)
        while data and data[-1] is None:
            data = data[:-1]
    leaves = keras.tree.flatten(data)
    arrays = (np.ndarray, tf.Tensor, type(None))
    if not isinstance(data, tuple) or not all(
        isinstance(leaf, arrays) for leaf in leaves
    ):
        return None
    specs = batches.specs_of(data)
    data = keras.tree.lists_to_tuples(data)

    def taken(leaf, spec):
        if leaf is None:
            return None
        return np.asarray(leaf[:count], spec.dtype.as_numpy_dtype)

    return keras.tree.map_structure(taken, data, specs)


def held_bytes(arguments: Mapping[str, Any], batch) -> int:
    """What Keras holds for the arguments of `fit`: it copies arrays whole, and
    has a few batches ready, of which one is given."""
    if tf.config.list_logical_devices("GPU"):
        return 0
    names = ("x", "y", "sample_weight", "validation_data")
    arrays = [arguments.get(name) for name in names]
    copied = sum(
        batches.num_bytes(_in_floatx(leaf))
        for leaf in keras.tree.flatten(arrays)
        if hasattr(leaf, "shape") and not _is_taken(leaf)
    )
    return copied + ready_bytes(batch)


def ready_bytes(batch, count: int = BATCHES_READY) -> int:
    """What so many batches take."""
    if tf.config.list_logical_devices("GPU"):
        return 0
    return count * batches.num_bytes(batch)


def in_hand_bytes(batch) -> int:
    """What of a batch, as tensors or arrays, is on the device by now."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return sum(
        batches.num_bytes(leaf)
        for leaf in keras.tree.flatten(batch)
        if isinstance(leaf, tf.Tensor) and f":{kind}:" in leaf.device
    )
