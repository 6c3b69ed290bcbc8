"""Lets the graph optimizer see that a result has more than one use.

TensorFlow joins an operation with the one that reads it, and rounds otherwise
then, where nothing else reads it. In plain training the backward pass does.
Of the two copies that recomputation makes of an operation, one has no reader
in the backward pass, and the other one may have none in the forward pass.
"""

import tensorflow as tf

from kmem.remat import names

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
    first = [op for op in first if op.type not in _PASSED_ON]
    second = [op for op in second if op.type not in _PASSED_ON]
    if [op.type for op in first] != [op.type for op in second]:
        return []
    backward = set(gradient)
    readers = []
    for one, other in zip(first, second, strict=True):
        # A loop that is differentiated has more results than one that is not.
        for output, again in zip(one.outputs, other.outputs, strict=False):
            kept = [op for op in again.consumers() if op in backward]
            if len(output.consumers()) + len(kept) > 1:
                readers += [_reader(output), _reader(again)]
    return readers


def _reader(tensor: tf.Tensor) -> tf.Operation:
    reader = names.copy(tensor).op
    # Private in TensorFlow: what is only waited for becomes a control
    # dependency otherwise, which is no use. tests/test_applying.py fails, by
    # the last bit, if the name of the attribute changes.
    kept = tf.compat.v1.AttrValue(b=True)
    reader._set_attr("_grappler_do_not_remove", kept)
    return reader
