"""Keeps a backward pass from running ahead of its weight gradients.

A graph's executor starts whatever is ready. If it follows the chain of input
gradients first, every layer's weight gradient stays pending, and with it the
layer's activations. Control dependencies let the chain go on from a layer
once that layer's weight gradients are done. XLA orders its operations itself.
"""

import tensorflow as tf


def hold_back(gradients: list) -> None:
    """Orders a backward pass that was just traced.

    The chain reaches a layer through the inputs of the layer's own gradients:
    these inputs are made to wait for the gradients that come before them. All
    new dependencies follow the order in which operations were created, so
    they cannot form a cycle.

    Args:
        gradients: Tensors, `IndexedSlices` or `None`, of one graph.
    """
    present = [g for g in gradients if g is not None]
    if not present:
        return
    graph = present[0].graph
    positions = {op: i for i, op in enumerate(graph.get_operations())}
    ops = {_operation(g) for g in present}
    ordered = sorted(ops & positions.keys(), key=lambda op: positions[op])
    for before, after in zip(ordered, ordered[1:], strict=False):
        for tensor in after.inputs:
            op = tensor.op
            if positions.get(op, -1) > positions[before]:
                # Private in TensorFlow: dependencies are public only for
                # operations to come, and a user's own tape makes these.
                # tests/test_ordering.py fails if it moves.
                op._add_control_input(before)


def _operation(gradient) -> tf.Operation:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return gradient.op
