"""What TensorFlow's graphs look like."""

import tensorflow as tf


def ancestors(*ops: tf.Operation, by_data: bool = False) -> set[tf.Operation]:
    """All that operations wait for, or all that they are computed from."""
    found: set[tf.Operation] = set()
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        new = {tensor.op for tensor in op.inputs}
        if not by_data:
            new |= set(op.control_inputs)
        waiting += new - found
        found |= new
    return found
