"""Orders a backward pass that was just traced, for what will run it.

A graph's executor and XLA go by different things: see `ordering` and `xla`.
"""

import tensorflow as tf

from kmem.graph import control
from kmem.graph import ordering
from kmem.graph import xla


def hold_back(
    gradients: list,
    differentiated: bool = False,
    loss: tf.Tensor | None = None,
) -> ordering.Order | None:
    """Keeps a backward pass from running ahead; nothing in eager mode.

    Args:
        gradients: Tensors, `IndexedSlices` or `None`, of one graph.
        differentiated: Whether somebody is going to differentiate them.
        loss: What they are the gradients of, if that is known.

    Returns:
        The order in which a graph's executor runs it.
    """
    if tf.executing_eagerly():
        return None
    if control.in_xla():
        xla.hold_back(gradients)
        return None
    return ordering.hold_back(gradients, differentiated, loss)
