"""Whether a process that trains by itself has another memory for its state.

`kmem.Sharding(cpu_offload=True)` in a single process keeps weights and the
optimizer's variables on the host, and updates them there; a layer's weights
are on the device while it runs.
"""

import os

import keras
import tensorflow as tf

from kmem.launching.cluster import Cluster
from kmem.options import MemoryOptions
from kmem.sharding import refusals
from kmem.sharding.engine import Engine


def is_possible(model: keras.Model, options: MemoryOptions) -> bool:
    """Whether a model's state can be kept outside of its device.

    Args:
        model: A compiled model that has its variables.
        options: The options under which it trains besides.
    """
    # Several processes would have to do it together.
    config = os.environ.get("TF_CONFIG")
    if options.sharding is not None or (config and Cluster(config).size > 1):
        return False
    if not any(_is_elsewhere(v) for v in model.trainable_variables):
        return False
    try:
        refusals.check(model, options)
    except ValueError:
        return False
    return True


def _is_elsewhere(variable: keras.Variable) -> bool:
    host = tf.DeviceSpec.from_string(Engine().host)
    device = tf.DeviceSpec.from_string(variable.value.device)
    return (device.device_type, device.device_index) != (
        host.device_type,
        host.device_index,
    )
