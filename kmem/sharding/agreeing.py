"""What each process finds out for itself, made one for all of them.

Processes that plan have to plan alike: a plan says which weights are gathered
again, and all must take part. They measure the same steps, and take the
numbers of one of them. What this module does not do: help a process that
fails to measure; the others wait for it.
"""

import hashlib

import numpy as np
import tensorflow as tf

from kmem.options import MemoryOptions
from kmem.sharding.engine import Engine
from kmem.sharding.engine import engine


def processes(options: MemoryOptions) -> Engine:
    """Those that train together under some options."""
    return Engine() if options.sharding is None else engine()


def highest(group: Engine, number: int) -> int:
    """The highest of the processes' numbers."""
    own = tf.constant([number], tf.int64)
    return int(group.all_reduce(own, "highest", "Max")[0])


def lowest(group: Engine, number: int) -> int:
    """The lowest of the processes' numbers."""
    return -highest(group, -number)


def slowest(group: Engine, seconds: float) -> float:
    """The longest of the processes' times, to the nanosecond."""
    return highest(group, int(1e9 * seconds)) / 1e9


def of_first(group: Engine, numbers: np.ndarray) -> np.ndarray:
    """The numbers of process 0; those of the others have their shape."""
    return group.broadcast(tf.constant(numbers), "numbers").numpy()


def is_same(group: Engine, value: object) -> bool:
    """Whether all processes have a value of the same `repr`."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    return highest(group, number) == lowest(group, number)
