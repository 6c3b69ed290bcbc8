"""Lets the graph optimizer see that a result has more than one use.

TensorFlow joins an operation with the one that reads it, and rounds otherwise
then, where nothing else reads it. In plain training the backward pass does.
Of the two copies that recomputation makes of an operation, one has no reader
in the backward pass, and the other one may have none in the forward pass.
"""

import tensorflow as tf

from kmem.remat import names

# What reads a result and is not joined with what made it.
_APART = frozenset(
    {
        "AvgPool",
        "BatchMatMulV2",
        "ConcatV2",
        "Conv2D",
        "Conv2DBackpropInput",
        "DepthwiseConv2dNative",
        "MatMul",
        "MaxPool",
        "Max",
        "Mean",
        "Softmax",
        "Sum",
    }
)
# What only one of the two copies may have: how it reads what is outside of it.
_PASSED_ON = (
    "Identity",
    "IdentityN",
    "NoOp",
    "Placeholder",
    "ReadVariableOp",
    "StopGradient",
)


def shown(first: list, second: list, gradient: list) -> list[tf.Operation]:
    """Gives both copies of an operation as many readers as plain training.

    Args:
        first: The operations of a function's first run.
        second: Those of its second run.
        gradient: Those of the second run's gradient.

    Returns:
        Operations that read what is used more than once. Something has to
        wait for them, or they are left out. They keep no memory.
    """
    backward, needed = set(gradient), set(gradient)
    # What only the results of the second run are made of is not run.
    for op in reversed(second):
        if any(needed.intersection(t.consumers()) for t in op.outputs):
            needed.add(op)
    first = [op for op in first if op.type not in _PASSED_ON]
    second = [op for op in second if op.type not in _PASSED_ON]
    if [op.type for op in first] != [op.type for op in second]:
        return []
    readers = []
    for one, other in zip(first, second, strict=True):
        # A loop that is differentiated has more results than one that is not.
        for output, again in zip(one.outputs, other.outputs, strict=False):
            uses = output.consumers()
            uses_again = needed.intersection(again.consumers())
            if len(uses) + len(backward & uses_again) < 2:
                continue
            if _may_be_joined(uses):
                readers.append(_reader(output))
            if _may_be_joined(list(uses_again)):
                readers.append(_reader(again))
    return readers


def _may_be_joined(uses: list[tf.Operation]) -> bool:
    """Whether there is a single one, of a kind that takes its input in."""
    within = [op for op in uses if op.type not in _PASSED_ON]
    if len(within) < len(uses):
        # What leaves the segment does so through several operations.
        return not within
    return len(uses) == 1 and uses[0].type not in _APART


def _reader(tensor: tf.Tensor) -> tf.Operation:
    # One that is only waited for would become a control dependency.
    return names.lasting(names.copy(tensor)).op
