"""The shapes of batches, and random data of them."""

import json
import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base import private_keras
from kmem.base.checks import must_be
from kmem.graph import fusion

# What stands for `None`: of a generator's Keras makes an `Optional`.
_ABSENT = tf.experimental.Optional, type(tf.type_spec_from_value(None))


def num_rows(data) -> int | None:
    """The length of the first array, tensor or spec that has one."""
    for leaf in keras.tree.flatten(data):
        shape = getattr(leaf, "shape", None)
        if shape:
            return shape[0]
    return None


def can_be_split(batch) -> bool:
    """Whether all arrays, tensors or specs have as many rows."""
    return len({x.shape[0] for x in leaves(batch) if x.shape.rank != 0}) < 2


def num_bytes(data) -> int:
    """The size of arrays, tensors, variables or specs of a known shape."""
    return sum(
        (leaf.shape.num_elements() or 0) * leaf.dtype.size
        for leaf in leaves(specs_of(data))
    )


def without_absent(specs) -> Any:
    """A data set's specs, in which what it gives as `None` is `None`."""
    return keras.tree.map_structure(
        lambda spec: None if isinstance(spec, _ABSENT) else spec, specs
    )


def leaves(data) -> list:
    """What a batch, or its specs, is made of, without what is `None`."""
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None]


def of_leaves(take: Callable, like: Any) -> Callable:
    """A function of a batch as one of its `leaves`, which are called in a graph
    what they are where Keras's iterator gives them.

    Args:
        take: The function of a batch.
        like: A batch of that structure, or its specs.
    """

    def named(leaf):
        # TensorFlow's graph optimizer puts factors in the order of names.
        return fusion.lasting(tf.identity(leaf, name="IteratorGetNext"))

    def run(*tensors):
        given = tf.nest.map_structure(named, tensors, expand_composites=True)
        given = iter(given)
        return take(
            keras.tree.map_structure(
                lambda leaf: None if leaf is None else next(given), like
            )
        )

    return run


class Spec(tf.TensorSpec):
    """Of ids or words: a model may refuse what is not in its vocabulary.

    Attributes:
        example: An array of one row.
    """

    example: np.ndarray

    @classmethod
    def of(cls, shape, dtype, example: np.ndarray) -> "Spec":
        spec = cls(shape, dtype)
        spec.example = example
        return spec

    def __repr__(self) -> str:
        # What is traced is for all of this shape and dtype.
        return repr(tf.TensorSpec(self.shape, self.dtype))


def specs_of(data, examples: bool = False) -> Any:
    """Arrays and tensors as `tf.TensorSpec`s, as Keras hands them on: lists
    become tuples, since TensorFlow would make one tensor of a list.

    Args:
        examples: Whether random data of them are to be such as the data are.
    """
    specs = keras.tree.map_structure(_spec, data)
    if examples:
        specs = keras.tree.map_structure(_with_example, specs, data)
    return keras.tree.lists_to_tuples(specs)


def as_tensor(leaf, spec: tf.TensorSpec | None = None) -> tf.Tensor | None:
    """A tensor, or `None`, as it is; of an array, one of a spec's dtype."""
    if leaf is None or tf.is_tensor(leaf):
        return leaf
    return tf.convert_to_tensor(leaf, spec and spec.dtype)


def part_of(batch, count: int) -> Any:
    """The largest of `count` parts of a batch."""
    rows = num_rows(batch)
    if rows is None:
        return batch
    return with_rows(batch, -(-rows // count))


def of_one_replica(model, batch) -> Any:
    """What the first replica gets of a batch: no other one gets more."""
    results = model.distribute_strategy.experimental_local_results
    return keras.tree.map_structure(lambda leaf: results(leaf)[0], batch)


def covers(batch, other) -> bool:
    """Whether another batch has the same form and is nowhere larger."""
    try:
        keras.tree.assert_same_structure(batch, other)
    except ValueError:
        return False
    pairs = zip(
        keras.tree.flatten(batch), keras.tree.flatten(other), strict=True
    )
    return all(mine == its or _is_within(its, mine) for mine, its in pairs)


def tell_rows(results, rows: int | None) -> None:
    """Tells a graph how many rows a layer's results have, where it does not
    know: one that looks up words goes through a ragged tensor."""
    for tensor in leaves(results):
        if tf.is_symbolic_tensor(tensor):
            shape = tensor.shape
            if shape.rank and shape[0] is None:
                tensor.set_shape([rows, *shape[1:]])


def random_data(batch) -> Any:
    """Numbers in a batch's shapes: always the same; of integers zeros, or the
    example that is known again and again."""
    return keras.tree.map_structure(_numbers, batch)


def to_json(batch) -> str:
    """Writes specs down."""
    return json.dumps(_to_json(batch))


def from_json(text: str) -> Any:
    """Reads what `to_json` wrote."""
    try:
        return _from_json(json.loads(text))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            "A plan's `batch` must be what `kmem.plan` wrote: make the plan "
            f"again. Received: batch={text!r:.200}"
        ) from error


def describe(batch) -> str:
    """Shapes and dtypes, for people."""
    return ", ".join(
        f"{spec.dtype.name}{spec.shape.as_list()}"
        for spec in keras.tree.flatten(batch)
        if spec is not None
    )


def _spec(leaf: Any) -> tf.TensorSpec | None:
    if leaf is None or isinstance(leaf, _ABSENT):
        return None
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    is_data_set = isinstance(leaf, tf.data.Dataset)
    kind = "arrays or tensors: of a data set, `next(iter(data))`"
    must_be(not is_data_set, leaf, "a batch", kind)
    known: Any = np.ndarray, np.generic, keras.Variable, keras.KerasTensor
    if not hasattr(leaf, "shape"):
        leaf = np.asarray(leaf)
    shape = leaf.shape
    is_known = tf.is_tensor(leaf) or isinstance(leaf, known)
    if not is_known and hasattr(leaf, "__array__"):
        # Of one row: all of it would be copied.
        leaf = private_keras.as_array(leaf[:1])
        shape = [*shape[:1], *leaf.shape[1:]]
    dtype = tf.as_dtype(leaf.dtype)
    if isinstance(leaf, np.ndarray) and dtype.is_floating:
        dtype = tf.as_dtype(keras.config.floatx())
    return tf.TensorSpec(shape, dtype)


def _with_example(spec, leaf) -> tf.TensorSpec | None:
    is_known = isinstance(leaf, np.ndarray | tf.Tensor)
    if not is_known or spec.dtype.is_floating or not spec.shape.rank:
        return spec
    return Spec.of(spec.shape, spec.dtype, np.asarray(leaf[:1]))


def with_rows(specs, rows: int | None) -> Any:
    """The same specs, of a batch with so many rows, or of any batch. What is
    known not to be of its examples stays, such as the edges of graphs."""
    whole = rows and num_rows(specs)

    def resized(spec):
        if spec is None or not spec.shape.rank:
            return spec
        if whole and spec.shape[0] != whole:
            return spec
        shape = [rows, *spec.shape[1:]]
        if isinstance(spec, Spec):
            return Spec.of(shape, spec.dtype, spec.example)
        return tf.TensorSpec(shape, spec.dtype)

    return keras.tree.map_structure(resized, specs)


def _is_within(spec, other) -> bool:
    if spec is None or other is None or spec.dtype != other.dtype:
        return False
    if spec.shape.rank != other.shape.rank:
        return False
    return all(map(operator.le, spec.shape, other.shape))


def _numbers(spec) -> tf.Tensor | None:
    if spec is None:
        return None
    if spec.dtype.is_floating:
        # The same in all processes, and none that a user's seed would give.
        numbers = tf.random.stateless_uniform(spec.shape.as_list(), (0, 0))
        return tf.cast(numbers, spec.dtype)
    if isinstance(spec, Spec) and len(spec.example):
        row = tf.constant(spec.example, spec.dtype)
        return tf.gather(row, tf.zeros(spec.shape[:1], tf.int32))
    return tf.zeros(spec.shape, spec.dtype)


def _to_json(batch) -> Any:
    if batch is None:
        return None
    if isinstance(batch, tf.TensorSpec):
        return {"shape": batch.shape.as_list(), "dtype": batch.dtype.name}
    if isinstance(batch, dict):
        return {"dict": {key: _to_json(batch[key]) for key in batch}}
    kind = "tuple" if isinstance(batch, tuple) else "list"
    return {kind: [_to_json(part) for part in batch]}


def _from_json(saved) -> Any:
    if saved is None:
        return None
    if "shape" in saved:
        return tf.TensorSpec(saved["shape"], saved["dtype"])
    if "dict" in saved:
        return {key: _from_json(part) for key, part in saved["dict"].items()}
    if "tuple" in saved:
        return tuple(_from_json(part) for part in saved["tuple"])
    return [_from_json(part) for part in saved["list"]]
