"""Makes of an update of shards the update of the whole.

Keras's optimizers work number by number, so that they may be given shards.
Two things look at all numbers at once: a norm to clip by, and whether all are
finite. Here both look at all processes, in one small call each.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.patching import attribute
from kmem.sharding.engine import Engine


@contextlib.contextmanager
def of_all(optimizer, engine: Engine, are_cut: list[bool]) -> Iterator[None]:
    """Lets an optimizer clip, and look for infinities, over all processes.

    `_clip_gradients` is private in Keras; tests/test_sharding.py fails if it
    moves.

    Args:
        optimizer: The optimizer, which is given shards.
        engine: The processes.
        are_cut: Of the gradients that are not `None`, which are shards'.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    plain_clip = inner._clip_gradients

    def clip(gradients):
        if not (inner.clipnorm or inner.global_clipnorm):
            return plain_clip(gradients)
        known = [g for g in gradients if g is not None]
        squares = [
            # What is whole is in every process.
            tf.reduce_sum(tf.square(g)) / (1 if is_cut else engine.size)
            for g, is_cut in zip(known, are_cut, strict=True)
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

    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute(inner, "_clip_gradients", clip))
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
