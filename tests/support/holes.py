"""A step after which what is free lies in pieces."""

import tensorflow as tf


def step() -> int:
    """Takes 8 MB at most, for which a pool must have 12."""
    value = tf.constant(1.0)
    blocks = [tf.fill([500_000], value) for _ in range(4)]
    del blocks[::2]
    return len([tf.fill([1_000_000], value), *blocks])
