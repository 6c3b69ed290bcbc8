"""A batch in parts: those of several processes, and micro-batches.

A loop over micro-batches keeps one of them in memory. The first takes the
remainder, such that all others have one size: XLA needs fixed shapes, and the
loop is traced once whatever the number of parts. Here one process computes all
of a batch. Processes that train together (kmem/sharding) take part of the rows
each, and add up what came of them.
"""

import contextlib
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from kmem.graph import control
from kmem.graph import releasing


class Parts:
    """The parts of a batch.

    Args:
        data: What `train_step` takes: a structure of tensors whose first
            dimension is the batch. `None` and scalars go to every part.
        count: The number of parts, at least 1. Fewer rows make fewer parts.
        like_rows: Makes as many parts as for so many rows, of which `data` may
            have one more. `None` are its own.

    Attributes:
        rows: The batch's rows, an int32 scalar.

    Raises:
        ValueError: If the tensors are known to differ in their rows.
    """

    def __init__(self, data: Any, count: int, like_rows=None):
        self._data = data
        self._count = count
        self.rows = num_rows(data)
        like_rows = self.rows if like_rows is None else like_rows
        # Rows of a part, rounded up.
        self._size = (like_rows + count - 1) // count
        self._num_parts = (like_rows + self._size - 1) // self._size
        self._first_size = self.rows - (self._num_parts - 1) * self._size

    @property
    def spec(self):
        """The type of a part: the batch's, for any number of rows."""
        return keras.tree.map_structure(_part_spec, self._data)

    def sum(self, function, outputs=None) -> list[tf.Tensor]:
        """Adds up `function(part, rows)` over the parts, one after another.

        Args:
            function: Takes a part and its rows, gives a list of tensors whose
                shapes do not depend on the rows.
            outputs: What `function` gives: tensors of its shapes and dtypes.
                `None` takes them from the first part, which then is outside
                of the loop.
        """
        if self._count == 1:
            return function(self._data, self.rows)

        def add(index, total):
            start = self._first_size + (index - 1) * self._size
            size = self._size
            if outputs is not None:
                is_first = index == 0
                start = tf.where(is_first, 0, start)
                size = tf.where(is_first, self._first_size, size)
            part = function(self._slice(start, size), size)
            return [a + b for a, b in zip(total, part, strict=True)]

        if outputs is None:
            part = self._slice(0, self._first_size)
            total, first_index = function(part, self._first_size), 1
        else:
            total = [zeros(t.shape, t.dtype) for t in outputs]
            first_index = 0
        if tf.executing_eagerly():
            for index in range(first_index, int(self._num_parts)):
                total = add(index, total)
            return total
        # The loop's body waits for its index, hence for a first part outside.
        with tf.control_dependencies(total):
            first_index = tf.constant(first_index)
        _, total = tf.while_loop(
            lambda index, total: index < self._num_parts,
            lambda index, total: (index + 1, add(index, total)),
            (first_index, total),
            parallel_iterations=1,
        )
        return total

    def sum_traced(self, function, *arguments) -> list[tf.Tensor]:
        """`sum`, for which a graph traces the function once for all parts.

        Args:
            function: As in `sum`; takes `arguments` besides.
            *arguments: Tensors, which may be nested.
        """
        outputs = None
        if self._count > 1 and not tf.executing_eagerly():
            # Before the loop, which needs its types.
            number = tf.TensorSpec([], tf.int32)
            specs = tf.nest.map_structure(tf.type_spec_from_value, arguments)
            function = releasing.function(function).get_concrete_function(
                self.spec, number, *specs
            )
            # A loop over all parts: outside of one, threads run a part's
            # gradients in an order that keeps them all. XLA has an order of
            # its own, and needs the odd part outside for its fixed shapes.
            if not control.in_xla():
                outputs = function.structured_outputs
        return self.sum(
            lambda part, rows: function(part, rows, *arguments), outputs
        )

    def _slice(self, start, size):
        return slice_rows(self._data, start, size)


def zeros(shape, dtype) -> tf.Tensor:
    """Zeros that a graph makes each time that it runs.

    TensorFlow computes those of `tf.zeros` when it makes the graph, and keeps
    them: where gradients are summed, as many bytes as the weights have.
    """
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def slice_rows(data: Any, start, size) -> Any:
    """Some rows of a batch."""

    def rows_of(leaf):
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        if isinstance(leaf, tf.RaggedTensor):
            return leaf[start : start + size]
        row_shape = tf.shape(leaf, out_type=tf.int32)[1:]
        begin = tf.concat([[start], tf.zeros_like(row_shape)], axis=0)
        extent = tf.concat([[size], row_shape], axis=0)
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.slice(
                leaf, tf.cast(begin, tf.int64), tf.cast(extent, tf.int64)
            )
        # Not `leaf[start:start + size]`: XLA must know the size.
        part = tf.slice(leaf, begin, extent)
        part.set_shape([None, *leaf.shape[1:]])
        return part

    return keras.tree.map_structure(rows_of, data)


def num_rows(data: Any) -> tf.Tensor:
    """The rows of a batch, an int32 scalar.

    Raises:
        ValueError: If its tensors are known to differ in them.
    """
    leaves = [
        leaf
        for leaf in keras.tree.flatten(data)
        if leaf is not None and leaf.shape.rank != 0
    ]
    sizes = {leaf.shape[0] for leaf in leaves} - {None}
    if len(sizes) > 1:
        raise ValueError(
            "A batch can be split only if all of its tensors have the same "
            f"number of rows. Received: rows={sorted(sizes)}"
        )
    leaf = leaves[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf, out_type=tf.int32)[0]


def _part_spec(leaf):
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    spec = tf.type_spec_from_value(leaf)
    shape = tf.TensorShape([None, *leaf.shape[1:]])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype
        )
    return type(spec)(shape, leaf.dtype)


@dataclasses.dataclass(frozen=True)
class Slice:
    """The rows of a batch that this process computes.

    Attributes:
        rows: The rows of the whole batch, an int32 scalar.
        fewest_rows: The fewest that a process computes, or `None`.
        copies: How many processes compute each row, a float64 scalar, or
            `None` for one.
    """

    data: Any
    rows: tf.Tensor
    fewest_rows: tf.Tensor | None = None
    copies: tf.Tensor | None = None


class Alone:
    """One process, which computes whole batches.

    Attributes:
        split_batches: Whether it computes part of a batch only.
        num_processes: How many compute a batch.
    """

    split_batches = False
    num_processes = 1

    def slice(self, data) -> Slice:
        """The part of a batch that is this process's."""
        return Slice(data, num_rows(data))

    def add_up(self, tensors: list, variables: list, batch: Slice) -> list:
        """Adds up tensors over the processes.

        Args:
            variables: For each the variable that it is a gradient of, or
                `None`.
        """
        return tensors

    def add_up_group(self, gradients: list, variables: list) -> list:
        """Adds up, before an update, what `add_up` left for later.

        Args:
            gradients: Sums over batches, or `None`.
        """
        return gradients

    def summed_shape(self, variable):
        """The shape of a variable's gradient after `add_up`."""
        return variable.shape

    def sharing_state(self, model, batch: Slice):
        """A context: what changes the model's state within is added up."""
        return contextlib.nullcontext()

    def weighing(self, share, update):
        """A context: gradients within count `share`, where processes add them
        up as they are made; unless `update.sums_rows`."""
        return contextlib.nullcontext()

    def counting(self):
        """A context in which nobody asks for a weight's value."""
        return contextlib.nullcontext()

    def weighs_gradient(self, variable) -> bool:
        """Whether a variable's gradient has its weight when it is made."""
        return False

    def gradient_shape(self, variable):
        """The shape of a variable's gradient when it is made."""
        return variable.shape
