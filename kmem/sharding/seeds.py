"""Random numbers: alike where data is shuffled, different within layers.

Every process takes its rows of the same batches, so TensorFlow's own seed,
with which Keras shuffles, has to be one in all of them. A layer's dropout has
to differ between them, as it would between the rows of one batch.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

# Private in TensorFlow: whether a seed was set. test_sharding_engine.py
# fails if it moves.
from tensorflow.python.eager import context

from kmem.sharding.engine import Engine

# How far apart the seeds of two processes are.
_STEP = 0x9E3779B1


def agree(engine: Engine) -> None:
    """Sets TensorFlow's seed to that of process 0, unless all have it."""
    if engine.size == 1:
        return
    own = context.global_seed()
    seeds = engine.gather(tf.constant([-1 if own is None else own]), "seed")
    known = set(seeds.numpy().ravel())
    if len(known) > 1 or -1 in known:
        drawn = tf.constant([random.randrange(2**31)])
        tf.random.set_seed(int(engine.broadcast(drawn, "seed")[0]))


@contextlib.contextmanager
def turned(model, engine: Engine) -> Iterator[None]:
    """Within, layers draw other random numbers in each process."""
    _turn(model, engine.rank * _STEP)
    try:
        yield
    finally:
        _turn(model, -engine.rank * _STEP)


def _turn(model, step: int) -> None:
    for variable in model.variables if step else ():
        # Of a `keras.random.SeedGenerator`: a seed, and how often it was used.
        if variable.name == "seed_generator_state":
            value = variable.numpy().astype(np.int64)
            value[0] += step
            variable.assign(value.astype(variable.dtype))
