"""What TensorFlow's graph optimizer makes one operation of, or another sum.

A segment may not begin or end between two such operations, and nothing may
wait for the first of them: they would not be joined there, and rounding would
differ from plain training.
"""

from collections.abc import Container
from collections.abc import Iterator

import tensorflow as tf

from kmem.base import private_tf

# Their result is the memory of their first input.
ALIASES = frozenset(
    "EnsureShape ExpandDims Identity PreventGradient Reshape Squeeze "
    "StopGradient".split()
)
ADDITIONS = frozenset({"Add", "AddN", "AddV2"})
_ARITHMETIC = ADDITIONS | {"Mul", "RealDiv", "Sub"}
# Which argument is the gradient of what the convolution gives.
_OF_CONVOLUTION = {"BiasAddGrad": 0, "Conv2DBackpropFilter": 2}
# Of one argument, number by number.
_FUNCTIONS = frozenset(
    (
        "Abs Elu Erf Erfc Exp Expm1 Log Log1p Neg Reciprocal Relu Relu6 Rsqrt "
        "Selu Sigmoid Softplus Sqrt Square Tanh"
    ).split()
)


def lasting(result: tf.Tensor) -> tf.Tensor:
    """A result that the graph optimizer neither takes out nor joins then."""
    if not tf.executing_eagerly():
        private_tf.keep_apart(result.op)
    return result


def maker(gradient) -> tf.Operation:
    """The operation that makes a tensor, or the values of `IndexedSlices`."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return gradient.op


def is_joined_later(weight_gradient: tf.Operation) -> bool:
    """Whether nothing may wait for it: TensorFlow joins it with the product
    with the learning rate, or a bias's with that of the convolution."""
    return weight_gradient.type in _ARITHMETIC or is_of_bias(weight_gradient)


def is_of_bias(op: tf.Operation) -> bool:
    """Whether it is the gradient of a convolution's bias, or a reshape."""
    if op.type == "Reshape":
        return is_of_bias(op.inputs[0].op)
    return op.type == "BiasAddGrad" and is_of_convolution(op)


def is_of_convolution(weight_gradient: tf.Operation) -> bool:
    """Whether TensorFlow computes the gradients of a convolution's kernel and
    bias together, of which this is one. They may not wait then."""
    position = _OF_CONVOLUTION.get(weight_gradient.type)
    if position is None:
        return False
    readers = weight_gradient.inputs[position].consumers()
    return {op.type for op in readers}.issuperset(_OF_CONVOLUTION)


def known_before(weight_gradient: tf.Operation) -> list[tf.Operation]:
    """What to wait for, so that a weight gradient is there or can be; of a sum
    of sums that nothing else reads, each addend."""
    sources, kind = [weight_gradient], weight_gradient.type
    if kind in _ARITHMETIC:
        terms = _terms(weight_gradient, ADDITIONS if kind in ADDITIONS else ())
        sources = [tensor.op for tensor in terms]
    return [
        source(op.outputs[0], ["Reshape"]).op.inputs[0].op
        if is_of_bias(op)
        else op
        for op in sources
    ]


def addends(op: tf.Operation) -> list[tf.Operation]:
    """What to wait for instead of a sum, which may be a part of a longer one;
    of anything else, itself."""
    return known_before(op) if op.type in ADDITIONS else [op]


def sum_of_three(addition: tf.Operation) -> tf.Operation | None:
    """The last operation of a sum with more than two addends, which TensorFlow
    makes one `AddN` of.

    That adds into the memory of an addend that nothing else holds, and begins
    with that addend then.
    """
    if addition.type not in ADDITIONS:
        return None
    last = _last(addition, ADDITIONS)
    return last if len(list(_terms(last, ADDITIONS))) > 2 else None


def _last(op: tf.Operation, kinds: Container[str]) -> tf.Operation:
    """The end of a sum of sums, or of a product of products."""
    readers = op.outputs[0].consumers()
    while len(readers) == 1 and readers[0].type in kinds:
        (op,) = readers
        readers = op.outputs[0].consumers()
    return op


def _terms(op: tf.Operation, kinds: Container[str]) -> Iterator[tf.Tensor]:
    """What it is of, through those that nothing else reads."""
    waiting = list(op.inputs)
    for term in waiting:
        if term.op.type in kinds and len(term.consumers()) == 1:
            waiting += term.op.inputs
        else:
            yield term


def are_joined(maker: tf.Operation, reader: tf.Operation) -> bool:
    """Whether TensorFlow joins two operations, or their gradients, to others.

    Sums of sums, products with constants, functions of functions; and products
    of several shapes: it multiplies the small ones first.
    """
    if maker.type == reader.type == "Mul":
        factors = _terms(_last(reader, ["Mul"]), ["Mul"])
        if len({str(factor.shape) for factor in factors}) > 1:
            return True
    if maker.type == "BiasAdd":
        return reader.type in ("Elu", "Sigmoid", "Tanh")
    if maker.type in ADDITIONS and reader.type in ADDITIONS:
        return True
    if maker.type in _FUNCTIONS and reader.type in _FUNCTIONS:
        return True
    inputs = (*maker.inputs, *reader.inputs)
    arithmetic = {maker.type, reader.type} <= _ARITHMETIC
    return arithmetic and any(map(is_constant, inputs))


def is_constant(tensor: tf.Tensor) -> bool:
    """Whether TensorFlow computes it when it makes the graph."""
    return all(op.inputs or op.type == "Const" for op in makers(tensor))


def source(tensor: tf.Tensor, through: Container[str]) -> tf.Tensor:
    """What operations of some types have made a tensor of, one by one."""
    while tensor.op.type in through:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def makers(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The operations that a tensor is computed by, its own first."""
    waiting, seen = [tensor.op], set()
    for op in waiting:
        yield op
        inputs = {t.op for t in op.inputs} - seen
        seen |= inputs
        waiting += inputs
