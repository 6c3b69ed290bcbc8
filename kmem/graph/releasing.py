"""Lets a graph go with the model that it trained, and keep no zeros.

TensorFlow keeps the function of every custom gradient, by a name, until the
process ends, and with it the graph and what the graph reads: a model's weights
and its optimizer's. Keras's optimizers put one into each training step, so a
model that was trained never gives its memory back by itself.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem.base import private_tf
from kmem.graph.names import current_graph

_CONTROL_FLOW = frozenset(
    "If StatelessIf Case StatelessCase While StatelessWhile".split()
)


def function(run: Callable, **arguments) -> Any:
    """A `tf.function` that nobody differentiates, without autograph.

    With an `input_signature` it is traced once. TensorFlow would warn of many
    traces all the same: to it all that is made here is one function.
    """

    @functools.wraps(run)
    def traced(*args, **kwargs):
        results = run(*args, **kwargs)
        forget_gradients()
        return results

    function = tf.function(traced, autograph=False, **arguments)
    if "input_signature" in arguments:
        private_tf.expect_traces(function)
    return function


def forget_gradients() -> None:
    """Takes custom gradients out of TensorFlow's registry: those of the graph
    that is being made, in which nothing may be differentiated after it.

    In eager mode there are none.
    """
    graph = current_graph()
    for name in _custom_gradients(graph) if graph else ():
        private_tf.forget_gradient(name)


def zeros(shape, dtype) -> tf.Tensor:
    """Zeros that a graph makes each time that it runs.

    TensorFlow computes those of `tf.zeros` when it makes the graph, and keeps
    them: where gradients are summed, as many bytes as the weights have.
    """
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def zeros_like(values: list) -> list[tf.Tensor]:
    """`zeros` of the shapes and dtypes of tensors or variables."""
    return [zeros(value.shape, value.dtype) for value in values]


def _custom_gradients(graph) -> Iterator[str]:
    """The names of a graph's own. A function that it calls keeps its: others
    may call it as well."""
    for op in graph.get_operations():
        if op.type == "IdentityN":
            name = private_tf.gradient_name(op)
            # Those that `tf.custom_gradient` makes.
            if name.startswith("CustomGradient-"):
                yield name
        elif op.type in _CONTROL_FLOW:
            for attribute in op.node_def.attr.values():
                for function in (attribute.func, *attribute.list.func):
                    if function.name:
                        inner = private_tf.function_in(graph, function.name)
                        if inner is not None:
                            yield from _custom_gradients(inner.graph)
