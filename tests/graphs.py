"""What TensorFlow's graphs look like."""

import tensorflow as tf


def ancestors(*ops: tf.Operation) -> set[tf.Operation]:
    """All that operations wait for."""
    found: set[tf.Operation] = set()
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        new = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
        waiting += new - found
        found |= new
    return found
