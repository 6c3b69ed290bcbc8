"""Computes numbers that are the same for many elements once.

The gradient of a mean is one number for all that it is a mean of. TensorFlow
repeats it to the size of the argument, and goes on with arrays of that size:
in a layer that normalizes, two more of them than the gradient needs. An
operation on each element by itself gives the same number, to the bit, if it
repeats what it reads as it reads it, and takes less time. So such operations
are made anew. What this does not do: change a step in eager mode, or in XLA,
which does it by itself.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem import joining

_REPEATS = frozenset({"BroadcastTo", "Tile"})
_ADDITIONS = frozenset({"Add", "AddN", "AddV2"})
# Of two arguments, element by element.
_PAIRWISE = frozenset({"AddV2", "Mul", "RealDiv", "Sub"})
_OF_ONE_SHAPE = frozenset({"Identity", "Neg", "StopGradient"})
_ONCE = "/once"


def once(operations: Iterable[tf.Operation]) -> Callable[[Any], Any]:
    """Makes operations anew that read repeated numbers, without the repeats.

    What reads their results reads those of the new ones then.

    Args:
        operations: Of a graph's gradients, in an order in which they can run.

    Returns:
        A function that gives the tensor that took a tensor's place, and
        anything else as it is.
    """
    renewal = _Renewal()
    for op in operations:
        renewal.look_at(op)
    return renewal.latest


class _Renewal:
    """What was found among some operations."""

    def __init__(self):
        # By reference of an array, what it repeats; and what took its place.
        self._sources: dict[Any, tf.Tensor] = {}
        self._renewed: dict[Any, tf.Tensor] = {}

    def latest(self, tensor: Any) -> Any:
        if not isinstance(tensor, tf.Tensor):
            return tensor
        return self._renewed.get(tensor.ref(), tensor)

    def look_at(self, op: tf.Operation) -> None:
        if op.type in _REPEATS:
            source, result = op.inputs[0], op.outputs[0]
            if _is_repeated_in(source, result):
                with _beside(op):
                    copied = tf.identity(source, name=op.name + _ONCE)
                # Or constants would be multiplied before it, not behind it.
                self._sources[result.ref()] = joining.lasting(copied)
            return
        small = [
            tensor.ref() in self._sources or tensor.shape.rank == 0
            for tensor in op.inputs
        ]
        if all(tensor.ref() not in self._sources for tensor in op.inputs):
            return
        if op.type in _PAIRWISE and all(small):
            self._sources[op.outputs[0].ref()] = self._anew(op, op.inputs)
        elif op.type in _PAIRWISE and _have_one_shape(*op.inputs):
            self._replace(op, op.inputs)
        elif op.type == "AddN" and not all(small) and _is_by_itself(op):
            # TensorFlow's graph optimizer sorts them by name.
            addends = sorted(op.inputs, key=_name)
            self._replace(op, addends)

    def _replace(self, op: tf.Operation, arguments: Iterable) -> None:
        (old,) = op.outputs
        # Private in TensorFlow, as what changes an input is: a user's own tape
        # makes these. tests/test_broadcasts.py fails if they move.
        if op._control_outputs:
            return
        readers = old.consumers()
        new = self._renewed[old.ref()] = self._anew(op, arguments)
        for reader in readers:
            for index, read in enumerate(reader.inputs):
                if read is old:
                    reader._update_input(index, new)

    def _anew(self, op: tf.Operation, arguments: Iterable) -> tf.Tensor:
        """The operation, of what its arguments repeat; sums two by two."""
        make = getattr(tf.raw_ops, "AddV2" if op.type == "AddN" else op.type)
        total, *rest = [self._sources.get(t.ref(), t) for t in arguments]
        with _beside(op):
            for tensor in rest:
                # Or sums of sums would be put in another order.
                total = joining.lasting(
                    make(x=total, y=tensor, name=op.name + _ONCE)
                )
        return total


def _name(tensor: tf.Tensor) -> str:
    return tensor.op.name.removesuffix(_ONCE)


def _is_by_itself(addition: tf.Operation) -> bool:
    """Whether it adds up in the order of its arguments.

    TensorFlow begins with one whose memory nothing else holds, and makes one
    sum of a sum of sums.
    """
    readers = addition.outputs[0].consumers()
    if len(readers) == 1 and readers[0].type in _ADDITIONS:
        return False
    return all(
        tensor.op.type in _PAIRWISE and len(tensor.consumers()) == 1
        for tensor in addition.inputs
    )


def _is_repeated_in(source: tf.Tensor, result: tf.Tensor) -> bool:
    """Whether each axis is that of the result, or has one element."""
    if not source.shape.is_fully_defined():
        return False
    sizes = source.shape.as_list()
    return len(sizes) == result.shape.rank and all(
        size in (1, other)
        for size, other in zip(sizes, result.shape, strict=True)
    )


def _have_one_shape(a: tf.Tensor, b: tf.Tensor) -> bool:
    if a.shape.is_fully_defined() and b.shape.is_fully_defined():
        return a.shape == b.shape
    return _origin(a) is _origin(b)


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor has its shape from."""
    while True:
        op = tensor.op
        if op.type == "BroadcastTo" and op.inputs[1].op.type == "Shape":
            sources = op.inputs[1].op.inputs
        elif op.type in _OF_ONE_SHAPE:
            sources = op.inputs
        elif op.type in _PAIRWISE:
            sources = [
                argument
                for argument in op.inputs
                if argument.shape.rank != 0
                and not _is_repeated_in(argument, tensor)
            ]
        else:
            return tensor
        if len(sources) != 1:
            return tensor
        (tensor,) = sources


@contextlib.contextmanager
def _beside(op: tf.Operation) -> Iterator[None]:
    """Within, operations are made where another one was."""
    with (
        op.graph.as_default(),
        op.graph.name_scope(None),
        tf.device(op.device),
        tf.control_dependencies(op.control_inputs),
    ):
        yield
