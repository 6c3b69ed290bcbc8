"""Makes of an update of shards the update of the whole.

Keras's optimizers work number by number, so that they may be given shards.
Two things look at all numbers at once: a norm to clip by, and whether all are
finite. Here both look at all processes, in one small call each. And whether a
weight decays depends on its name, or its shape: those of the whole.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.sharding.engine import Engine
from kmem.sharding.variables import ShardedVariable
from kmem.step.patching import attribute


@contextlib.contextmanager
def of_all(optimizer, engine: Engine, weights: list) -> Iterator[None]:
    """Lets an optimizer clip, and look for infinities, over all processes.

    `_clip_gradients` and `_use_weight_decay` are private in Keras;
    test_sharding.py and test_sharding_fit.py fail if they move.

    Args:
        optimizer: The optimizer, which is given shards.
        engine: The processes.
        weights: The weights whose gradients are not `None`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    plain_clip = inner._clip_gradients
    plain_use = inner._use_weight_decay
    cut = [v for v in weights if isinstance(v, ShardedVariable)]
    wholes = {v.shard.variable._unique_id: v.whole for v in cut}

    def clip(gradients):
        if not (inner.clipnorm or inner.global_clipnorm):
            return plain_clip(gradients)
        known = [g for g in gradients if g is not None]
        squares = [
            # What is whole is in every process.
            tf.reduce_sum(tf.square(g))
            / (1 if isinstance(v, ShardedVariable) else engine.size)
            for g, v in zip(known, weights, strict=True)
        ]
        squares = engine.all_reduce(tf.stack(squares), "norms")
        if inner.clipnorm:
            norms = tf.unstack(tf.sqrt(squares))
            limit = inner.clipnorm
        else:
            norms = [tf.sqrt(tf.reduce_sum(squares))] * len(known)
            limit = inner.global_clipnorm
        clipped = iter(
            g * limit / tf.maximum(norm, limit)
            for g, norm in zip(known, norms, strict=True)
        )
        return [None if g is None else next(clipped) for g in gradients]

    def use(variable):
        return plain_use(wholes.get(variable._unique_id, variable))

    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute(inner, "_clip_gradients", clip))
        stack.enter_context(attribute(inner, "_use_weight_decay", use))
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            plain_check = optimizer.check_finite

            def check_finite(gradients):
                finite: Any = plain_check(gradients)
                own = tf.cast(finite, tf.int32)
                return engine.all_reduce(own[None], "finite", "Min")[0] > 0

            stack.enter_context(
                attribute(optimizer, "check_finite", check_finite)
            )
        yield
