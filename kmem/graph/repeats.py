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
from collections.abc import Container
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem.base import private_tf
from kmem.graph import fusion

_REPEATS = frozenset({"BroadcastTo", "Tile"})
# Of two arguments, element by element.
_PAIRWISE = frozenset({"AddV2", "Mul", "RealDiv", "Sub"})
_PRODUCTS = frozenset({"Mul", "RealDiv"})
# What keeps the shape of its argument, or of the larger of two.
_OF_ONE = frozenset({"Cast", "Identity", "Neg", "Square", "StopGradient"})
_OF_TWO = _PAIRWISE | {"SquaredDifference"}
_ONCE = "/once"


def once(
    operations: list[tf.Operation], results: Container[tf.Operation] = ()
) -> Callable[[Any], Any]:
    """Makes operations anew that read repeated numbers, without the repeats.

    What reads their results reads those of the new ones then.

    Args:
        operations: All that run, in an order in which they can.
        results: Those of them that are not made anew.

    Returns:
        A function that gives the tensor that took a tensor's place, and
        anything else as it is.
    """
    renewal = _Renewal(_multiplied_in_another_order(operations))
    for op in operations:
        if op not in results:
            renewal.look_at(op)
    return renewal.latest


def _multiplied_in_another_order(operations: list) -> set[tf.Operation]:
    """Repeats of which TensorFlow makes longer products in an order of its
    own: they stay, with all that reads them."""
    running = set(operations)

    def readers(tensor: tf.Tensor) -> list[tf.Operation]:
        return [op for op in tensor.consumers() if op in running]

    repeats: dict[Any, set[tf.Operation]] = {}
    reordered: set[tf.Operation] = set()
    for op in operations:
        read = [repeats.get(tensor.ref(), set()) for tensor in op.inputs]
        if op.type in _REPEATS:
            repeats[op.outputs[0].ref()] = {op}
        elif op.type in _PAIRWISE and any(read):
            if _are_small(op, [bool(each) for each in read]):
                repeats[op.outputs[0].ref()] = set().union(*read)
            elif _is_in_long_product(op, bool(read[0]), readers):
                reordered.update(*read)
    return reordered


def _are_small(op: tf.Operation, repeated: list[bool]) -> bool:
    """Whether all arguments are repeated numbers, or single ones."""
    return all(
        is_repeated or tensor.shape.rank == 0
        for is_repeated, tensor in zip(repeated, op.inputs, strict=True)
    )


def _is_in_long_product(
    op: tf.Operation,
    first_repeats: bool,
    readers: Callable[[tf.Tensor], list[tf.Operation]],
) -> bool:
    """Whether a product has more than two factors for TensorFlow.

    It has if nothing else reads a product of two of them. Single numbers are
    multiplied with the first array then, in the order of names.
    """
    if op.type not in _PRODUCTS:
        return False
    small, other = list(op.inputs)[:: 1 if first_repeats else -1]
    is_first = small.op.name < other.op.name
    around = [t.op for t in (other, small)[: 1 if is_first else 2]]
    makers = [maker for maker in around if len(readers(maker.outputs[0])) == 1]
    after = readers(op.outputs[0])
    return any(
        each.type in _PRODUCTS
        for each in (*makers, *(after if len(after) == 1 else ()))
    )


class _Renewal:
    """What was found among some operations.

    Args:
        left: Repeats that stay.
    """

    def __init__(self, left: set[tf.Operation]):
        self._left = left
        # By reference of an array, what it repeats; and what took its place.
        self._sources: dict[Any, tf.Tensor] = {}
        self._renewed: dict[Any, tf.Tensor] = {}
        # What was made anew, by what it is made of.
        self._made: dict[tuple, tf.Tensor] = {}

    def latest(self, tensor: Any) -> Any:
        if not isinstance(tensor, tf.Tensor):
            return tensor
        return self._renewed.get(tensor.ref(), tensor)

    def look_at(self, op: tf.Operation) -> None:
        if op.type in _REPEATS:
            source, result = op.inputs[0], op.outputs[0]
            # A tile repeats whole rows of numbers, too.
            if op in self._left:
                return
            if source.shape.rank == result.shape.rank and (
                op.type == "BroadcastTo" or _is_repeated_in(source, result)
            ):
                with _beside(op):
                    copied = tf.identity(source, name=op.name + _ONCE)
                # Or constants would be multiplied before it, not behind it.
                self._sources[result.ref()] = fusion.lasting(copied)
            return
        repeated = [tensor.ref() in self._sources for tensor in op.inputs]
        if not any(repeated):
            return
        are_small = _are_small(op, repeated)
        if op.type in _PAIRWISE and are_small:
            (result,) = op.outputs
            self._sources[result.ref()] = self._anew(op, list(op.inputs))
            if len(result.consumers()) > 1:
                # One that stays may be the last then, which would join it.
                fusion.lasting(result)
        elif op.type in _PAIRWISE and _have_one_shape(*op.inputs):
            self._replace(op, list(op.inputs))
        elif op.type == "AddN" and not are_small and _is_by_itself(op):
            # TensorFlow's graph optimizer sorts them by name.
            addends = sorted(
                op.inputs, key=lambda t: t.op.name.removesuffix(_ONCE)
            )
            self._replace(op, addends)

    def _replace(self, op: tf.Operation, arguments: list[tf.Tensor]) -> None:
        """Lets what reads an operation's result read that of a new one."""
        (old,) = op.outputs
        readers = old.consumers()
        new = self._renewed[old.ref()] = self._anew(op, arguments)
        private_tf.read_instead(readers, old, new)

    def _argument(self, tensor: tf.Tensor, kind: str) -> tf.Tensor:
        """What an operation of a kind reads in the place of a tensor."""
        repeated = self._sources.get(tensor.ref())
        if repeated is not None:
            return repeated
        if tensor.op.type != kind:
            return tensor
        # Of two products TensorFlow would make one, from the smallest on.
        copied = tf.identity(tensor, name=tensor.op.name + _ONCE)
        return fusion.lasting(copied)

    def _anew(self, op: tf.Operation, arguments: list[tf.Tensor]) -> tf.Tensor:
        """The operation, of what its arguments repeat; one for all that are
        equal. TensorFlow does that, too, but not with those that last."""
        read = [tensor.ref() for tensor in op.inputs]
        commutes = op.type in ("AddV2", "Mul")
        origin = (op.type, frozenset(read) if commutes else tuple(read))
        if origin not in self._made:
            self._made[origin] = self._make(op, arguments)
        private_tf.wait_instead(op, self._made[origin].op)
        return self._made[origin]

    def _make(self, op: tf.Operation, arguments: list[tf.Tensor]) -> tf.Tensor:
        """Makes an operation; sums two by two."""
        kind = "AddV2" if op.type == "AddN" else op.type
        make = getattr(tf.raw_ops, kind)
        total: tf.Tensor
        with _beside(op):
            total, *rest = [self._argument(t, kind) for t in arguments]
            for tensor in rest:
                # Or sums of sums would be put in another order.
                total = fusion.lasting(
                    make(x=total, y=tensor, name=op.name + _ONCE)
                )
        return total


def _is_by_itself(addition: tf.Operation) -> bool:
    """Whether it adds up in the order of its arguments.

    TensorFlow begins with one whose memory nothing else holds, and makes one
    sum of a sum of sums.
    """
    readers = addition.outputs[0].consumers()
    if len(readers) == 1 and readers[0].type in fusion.ADDITIONS:
        return False
    return all(map(_is_held_once, addition.inputs))


def _is_held_once(tensor: tf.Tensor) -> bool:
    while len(tensor.consumers()) == 1:
        if tensor.op.type in _PAIRWISE:
            return True
        # Where sizes are not known, what may be one of a sum.
        if tensor.op.type not in ("Reshape", "Sum"):
            return False
        tensor = tensor.op.inputs[0]
    return False


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
    if a.shape.rank is None or a.shape.as_list() != b.shape.as_list():
        return False
    return a.shape.is_fully_defined() or _origin(a) is _origin(b)


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor has the sizes from that are not known."""
    while True:
        op = tensor.op
        if op.type == "BroadcastTo" and op.inputs[1].op.type == "Shape":
            sources = op.inputs[1].op.inputs
        elif op.type in _OF_ONE:
            sources = op.inputs
        elif op.type in _OF_TWO:
            sources = [
                argument
                for argument in op.inputs
                if argument.shape.rank != 0
                and not _is_repeated_in(argument, tensor)
            ]
            if len({id(_argument_of_mean(t)) for t in sources}) == 1:
                sources = [_argument_of_mean(sources[0])]
        else:
            return tensor
        if len(sources) != 1:
            return tensor
        (tensor,) = sources


def _argument_of_mean(tensor: tf.Tensor) -> tf.Tensor:
    """The argument whose axes a mean's are, but for those of one element."""
    op = fusion.source(tensor, _OF_ONE).op
    if (
        op.type != "Mean"
        or not op.get_attr("keep_dims")
        or tf.get_static_value(op.inputs[1]) is None
    ):
        return tensor
    return op.inputs[0]


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
