"""What the replicas of a `tf.distribute` strategy do together."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from kmem.step import accumulation


def num_replicas() -> int:
    """Of the strategy that is in use here."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def mean(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """The mean over replicas, which have equally many rows."""
    if num_replicas() == 1:
        return tensors
    replica = tf.distribute.get_replica_context()
    found: dict[int, tf.Tensor] = {}
    # Those of one dtype are sent together.
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        sent = [tensors[i] for i in chosen]
        means = replica.all_reduce(tf.distribute.ReduceOp.MEAN, sent)
        found |= dict(zip(chosen, means, strict=True))
    return [found[i] for i in range(len(tensors))]


@contextlib.contextmanager
def reduced_already(optimizer) -> Iterator[None]:
    """Lets an optimizer take gradients that are the same on all replicas."""
    if num_replicas() == 1:
        yield
        return
    with accumulation.without_reduction(optimizer):
        yield
