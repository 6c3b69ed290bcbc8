"""What TensorFlow's graph optimizer makes one operation of, or another sum.

A segment may not begin or end between two such operations, and nothing may
wait for the first of them: they would not be joined there, and rounding would
differ from plain training.
"""

import tensorflow as tf

_ADDITIONS = frozenset({"Add", "AddN", "AddV2"})
_ARITHMETIC = _ADDITIONS | {"Mul", "RealDiv", "Sub"}
# Of one argument, number by number.
_FUNCTIONS = frozenset(
    {
        "Abs",
        "Elu",
        "Erf",
        "Erfc",
        "Exp",
        "Expm1",
        "Log",
        "Log1p",
        "Neg",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Rsqrt",
        "Selu",
        "Sigmoid",
        "Softplus",
        "Sqrt",
        "Square",
        "Tanh",
    }
)


def joins_update(weight_gradient: tf.Operation) -> bool:
    """Whether TensorFlow may join it with the optimizer's product with the
    learning rate, which it does unless something waits for either."""
    return weight_gradient.type in _ARITHMETIC


def known_before(weight_gradient) -> list[tf.Operation]:
    """What to wait for, so that a weight gradient is there or can be.

    Args:
        weight_gradient: A tensor or `IndexedSlices`, of a graph.
    """
    if isinstance(weight_gradient, tf.IndexedSlices):
        weight_gradient = weight_gradient.values
    op = weight_gradient.op
    if joins_update(op):
        return [tensor.op for tensor in op.inputs]
    return [op]


def are_joined(maker: tf.Operation, reader: tf.Operation) -> bool:
    """Whether TensorFlow joins two operations, or their gradients, to others.

    Sums of sums, products with constants, functions of functions.
    """
    if maker.type == "BiasAdd":
        return reader.type in ("Elu", "Sigmoid", "Tanh")
    if maker.type in _ADDITIONS and reader.type in _ADDITIONS:
        return True
    if maker.type in _FUNCTIONS and reader.type in _FUNCTIONS:
        return True
    inputs = (*maker.inputs, *reader.inputs)
    constant = any(tensor.op.type == "Const" for tensor in inputs)
    pair = {maker.type, reader.type}
    return constant and pair <= _ARITHMETIC
