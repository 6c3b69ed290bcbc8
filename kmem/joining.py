"""What TensorFlow's graph optimizer makes one operation of, or another sum.

A segment may not begin or end between two such operations: they would not be
joined there, and rounding would differ from plain training.
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
