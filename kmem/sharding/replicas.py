"""Lets layers add up over all processes, as over a strategy's replicas.

Keras's synchronized batch normalization, and layers of one's own, ask
`tf.distribute.get_replica_context()` for sums over the replicas. Here these
are sums over the processes. The gradient of a sum is the sum of the gradients
that the processes have for it, each with its share of the batch.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem.sharding import gathering
from kmem.sharding.engine import Engine
from kmem.step.patching import attribute


@contextlib.contextmanager
def synchronized(engine: Engine) -> Iterator[None]:
    """Within, the replica context's `all_reduce` is over the processes."""

    def all_reduce(reduce_op, value, options=None):
        def reduced(tensor):
            scale = 1
            if reduce_op in (tf.distribute.ReduceOp.MEAN, "MEAN"):
                scale = engine.size
            return _sum(engine, tf.convert_to_tensor(tensor)) / scale

        return tf.nest.map_structure(reduced, value)

    # The one that there is without a strategy.
    replica = tf.distribute.get_replica_context()
    with attribute(replica, "all_reduce", all_reduce):
        yield


def _sum(engine: Engine, tensor: tf.Tensor) -> Any:
    if engine.size == 1:
        return tensor

    def summed(tensor):
        def gradient(of_sum):
            weight = gathering.weight()
            if weight is None:
                return engine.all_reduce(of_sum, "replicas")
            weight = tf.cast(weight, of_sum.dtype)
            # The weights' gradients will count with this process's own.
            return engine.all_reduce(of_sum * weight, "replicas") / weight

        return engine.all_reduce(tensor, "replicas"), gradient

    link: Any = tf.custom_gradient(summed)
    return link(tensor)
