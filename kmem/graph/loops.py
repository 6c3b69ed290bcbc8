"""Has the loops of a step run one iteration after another.

Keras lets up to 32 iterations of a recurrent layer be under way at a time. In
the backward pass each of them makes gradients of all the layer's weights, which
stay until they are added up: how many do depends on threads, so that nobody
can tell a step's peak, or keep it. What this does not do: reach loops within
functions that are traced by themselves.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_LOOPS = frozenset({"While", "StatelessWhile"})


def one_by_one(function: Callable, *arguments) -> Any:
    """Calls a function; in a graph, loops that it traced run in that way."""
    result = function(*arguments)
    if tf.executing_eagerly():
        return result
    one = tf.compat.v1.AttrValue(i=1)
    for op in tf.compat.v1.get_default_graph().get_operations():
        if op.type in _LOOPS:
            # Private in TensorFlow, which sets gradients' attributes so.
            # test_loops.py fails if it moves.
            op._set_attr("parallel_iterations", one)
    return result
