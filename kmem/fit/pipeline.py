"""What an input pipeline holds on the device, besides the batch of a step.

That is nothing unless the device is the CPU. How many batches are ready
tf.data decides as it runs: with the arrays that Keras is given it was seen to
be three.
"""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from kmem.step import batches

BATCHES_READY = 3


def held_bytes(arguments: Mapping[str, Any], batch) -> int:
    """What Keras holds for the arguments of `fit`.

    It copies arrays whole, and has a few batches ready.

    Args:
        batch: One of its batches, as tensors or `tf.TensorSpec`s.
    """
    if tf.config.list_logical_devices("GPU"):
        return 0
    arrays = [arguments.get(name) for name in ("x", "y", "sample_weight")]
    copied = sum(
        getattr(leaf, "nbytes", 0) for leaf in keras.tree.flatten(arrays)
    )
    return copied + ready_bytes(batch)


def ready_bytes(batch, count: int = BATCHES_READY) -> int:
    """What so many batches take."""
    if tf.config.list_logical_devices("GPU"):
        return 0
    return count * batches.num_bytes(batch)


def in_hand_bytes(batch) -> int:
    """What of a batch is on the device by now.

    Args:
        batch: What a step is given: tensors, or arrays of the host.
    """
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return sum(
        batches.num_bytes(leaf)
        for leaf in keras.tree.flatten(batch)
        if isinstance(leaf, tf.Tensor) and f":{kind}:" in leaf.device
    )
