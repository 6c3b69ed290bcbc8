"""A batch in parts: those of several processes, and micro-batches.

A loop over micro-batches keeps one of them in memory. The first takes the
remainder, such that all others have one size: XLA needs fixed shapes, and the
loop is traced once whatever the number of parts. Here one process computes all
of a batch. Processes that train together (kmem/sharding) take part of the rows
each, and add up what came of them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base import private_tf
from kmem.graph import fusion
from kmem.graph import ordering
from kmem.graph import releasing
from kmem.step import batches

_OF_EQUAL_ROWS = (
    "A batch can be split only if all of its tensors have the same number of "
    "rows."
)


class Parts:
    """The parts of a batch.

    Args:
        data: What `train_step` takes: a structure of tensors whose first
            dimension is the batch. `None` and scalars go to every part.
        count: The number of parts, at least 1. Fewer rows make fewer parts.
        like_rows: Makes as many parts as for so many rows, of which `data` may
            have one more. `None` are its own.
        adds_up: Whether it, or a part of it, is added to others.

    Attributes:
        rows: The batch's rows, an int32 scalar.

    Raises:
        ValueError: If the tensors are known to differ in their rows.
    """

    def __init__(self, data: Any, count: int, like_rows=None, adds_up=True):
        self._data = data
        self._count = count
        self.rows = num_rows(data, adds_up)
        like_rows = self.rows if like_rows is None else like_rows
        # Rows of a part, rounded up.
        self._size = (like_rows + count - 1) // count
        self._num_parts = (like_rows + self._size - 1) // self._size
        self._first_size = self.rows - (self._num_parts - 1) * self._size

    @property
    def spec(self):
        """The type of a part: the batch's, for any number of rows."""
        return spec_of_parts(self._data)

    def sum(self, function) -> list[tf.Tensor]:
        """Adds up `function(part, rows)` over the parts, one after another.

        Args:
            function: Takes a part and its rows, gives a list of tensors whose
                shapes do not depend on the rows. The list is used up.
        """
        if self._count == 1:
            return function(self._data, self.rows)
        data, size = self._data, self._first_size
        total = function(slice_rows(data, 0, size), size)

        def add(index, total):
            part = slice_rows(data, self._start(index), self._size)
            return _added(total, function(part, self._size))

        if tf.executing_eagerly():
            for index in range(1, int(self._num_parts)):
                total = add(index, total)
            return total
        # The loop's body waits for its index, hence for a first part outside.
        with tf.control_dependencies(total):
            return self._loop(add, 1, total)

    def sum_traced(
        self,
        function,
        *arguments,
        order: Callable[[], ordering.AnyOrder | None] = lambda: None,
    ) -> list[tf.Tensor]:
        """`sum`, for which a graph traces the function once for all parts.

        Args:
            function: As in `sum`; takes `arguments` besides.
            *arguments: Tensors, which may be nested.
            order: Gives the order of the operations that `function` traced
                last: what comes later waits until a result is added.
        """
        # A loop over all parts: outside of one, threads run a part's gradients
        # in an order that keeps them all. XLA has an order of its own, and
        # needs the odd part outside for its fixed shapes.
        if self._count > 1 and not tf.executing_eagerly():
            # Before the loop, which needs its types.
            number = tf.TensorSpec([], tf.int32)
            specs = tf.nest.map_structure(tf.type_spec_from_value, arguments)
            totals: list[tf.Tensor] = []
            graph = tf.compat.v1.get_default_graph()

            def traced(*inputs):
                results = function(*inputs)
                with graph.as_default():
                    totals[:] = releasing.zeros_like(results)
                sums = _added_in_order(totals, results, order())
                ordering.keep_order()
                return sums

            concrete = releasing.function(traced).get_concrete_function(
                self.spec, number, *specs
            )
            return self._sum_in_loop(concrete, totals, arguments)
        return self.sum(lambda part, rows: function(part, rows, *arguments))

    def _sum_in_loop(self, function, totals: list, arguments) -> list:
        """Calls a function, which adds to what it was traced with as `totals`,
        for every part."""
        captured = list(function.captured_inputs)
        positions = {id(total): i for i, total in enumerate(totals)}

        def add(index, sums, is_first):
            start = tf.where(is_first, 0, self._start(index))
            size = tf.where(is_first, self._first_size, self._size)
            function.set_external_captures(
                [
                    sums[positions[id(t)]] if id(t) in positions else t
                    for t in captured
                ]
            )
            part = slice_rows(self._data, start, size)
            return function(part, size, *arguments)

        if private_tf.in_xla():
            sums = add(0, totals, True)
            return self._loop(functools.partial(add, is_first=False), 1, sums)
        with tf.control_dependencies(totals):
            return self._loop(lambda i, sums: add(i, sums, i == 0), 0, totals)

    def _start(self, index):
        """The first row of a part that is not the first."""
        return self._first_size + (index - 1) * self._size

    def _loop(self, add, first_index: int, total: list) -> list:
        _, total = tf.while_loop(
            lambda index, total: index < self._num_parts,
            lambda index, total: (index + 1, add(index, total)),
            (tf.constant(first_index), total),
            parallel_iterations=1,
        )
        return total


def _added(totals: list, addends: list) -> list:
    """Adds up two lists, and lets go of each addend when it is added."""
    if len(totals) != len(addends):
        raise ValueError(
            "Each part must give as many tensors. "
            f"Received: {len(totals)} and {len(addends)}"
        )
    for index in reversed(range(len(totals))):
        totals[index] = totals[index] + addends.pop()
    return totals


def _added_in_order(
    totals: list, addends: list, order: ordering.AnyOrder | None
) -> list[tf.Tensor]:
    """Adds up two lists in a graph that made one of them, each addend as soon
    as it is there, so that it is freed."""
    sums = []
    # The last layer's first, as a backward pass makes them.
    for total, addend in reversed([*zip(totals, addends, strict=True)]):
        addition = tf.raw_ops.AddV2(x=total, y=addend)
        # Not joined with a sum that the addend is: it would round otherwise.
        sums.append(fusion.lasting(addition))
        if order is not None:
            order.finish([addition.op], [addition.op])
    return sums[::-1]


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


def num_rows(data: Any, adds_up: bool = True) -> tf.Tensor:
    """The rows of a batch, or of its first tensor, an int32 scalar.

    Raises:
        ValueError: If its tensors are known to differ in them, and it adds up.
        tf.errors.InvalidArgumentError: If that is seen when the step runs.
    """
    leaves = [x for x in batches.leaves(data) if x.shape.rank != 0]
    sizes = {leaf.shape[0] for leaf in leaves}
    if adds_up and len(sizes - {None}) > 1:
        received = sorted(sizes - {None})
        raise ValueError(f"{_OF_EQUAL_ROWS} Received: rows={received}")
    counts = [tf.shape(leaf, out_type=tf.int32)[0] for leaf in leaves]
    rows = counts[0]
    if not adds_up or None not in sizes or len(counts) == 1:
        return rows
    more = tf.reduce_max(counts) - tf.reduce_min(counts)
    if private_tf.in_xla():
        # It leaves assertions out, and compiles for shapes that it knows.
        return tf.size(tf.reshape(tf.range(rows + more), [rows]))
    received = [_OF_EQUAL_ROWS, "Received: rows=", tf.stack(counts)]
    with tf.control_dependencies([tf.debugging.Assert(more == 0, received)]):
        return tf.identity(rows)


def spec_of_parts(data: Any) -> Any:
    """The type of a batch, for any number of rows."""
    return keras.tree.map_structure(_part_spec, data)


def _part_spec(leaf):
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    if leaf.shape.rank == 0:
        return spec
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
        return Slice(data, num_rows(data, False))

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
