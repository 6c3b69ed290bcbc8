"""Makes of an update of shards the update of the whole.

Keras's optimizers work number by number, so that they may be given shards.
Two things look at all numbers at once: a norm to clip by, and whether all are
finite. Here both look at all processes, in one small call each. And whether a
weight decays depends on its name, or its shape: those of the whole.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base.patching import Context
from kmem.base.patching import attribute
from kmem.base.patching import together
from kmem.base.private_keras import CLIP
from kmem.base.private_keras import USE_WEIGHT_DECAY
from kmem.base.private_keras import whole_of
from kmem.base.private_tf import identity_of
from kmem.sharding import variables
from kmem.sharding.engine import Engine
from kmem.sharding.variables import MirroredVariable
from kmem.sharding.variables import ShardedVariable
from kmem.step.accumulation import build_optimizer


@dataclasses.dataclass
class ShardedOptimizer:
    """An optimizer whose variables are shards, which the device `home` holds if
    there is one."""

    optimizer: Any
    model: keras.Model
    engine: Engine
    home: str | None = None

    def __post_init__(self):
        own = self.optimizer
        self._inner = getattr(own, "inner_optimizer", own)

    def cut(self, select: Callable[[list], list]) -> None:
        """Makes shards of its variables, which may be yet to be made: of those
        that `select` gives."""
        if not self.optimizer.built:
            self._build()
            return
        for number, variable in enumerate(select(self.optimizer.variables)):
            if not isinstance(variable, ShardedVariable):
                name = f"slot {number}"
                variables.shard(variable, self.engine, name, home=self.home)

    def _build(self) -> None:
        make = self._inner.add_variable_from_reference
        pairs = []

        def make_shard(reference_variable, *args, **kwargs):
            variable = make(reference_variable, *args, **kwargs)
            if isinstance(reference_variable, ShardedVariable):
                pairs.append((variable, reference_variable.shard))
            return variable

        with (
            variables.as_shards(),
            self._at_home(),
            attribute(self._inner, "add_variable_from_reference", make_shard),
        ):
            build_optimizer(self.optimizer, self.model.trainable_variables)
        for number, (variable, reference) in enumerate(pairs):
            variables.adopt(variable, reference, f"slot {number}", self.home)

    def updating(self) -> Context:
        """Within, the optimizer is given shards."""
        apply = self.optimizer.apply

        def apply_to_shards(grads, trainable_variables=None):
            grads = list(grads)
            weights = trainable_variables or self.model.trainable_variables
            pairs = zip(grads, weights, strict=True)
            pairs = [(g, v) for g, v in pairs if g is not None]
            with (
                self._looking_at_all([v for _, v in pairs]),
                self._updated([g for g, _ in pairs]),
            ):
                apply(grads, trainable_variables)

        changed = attribute(self.optimizer, "apply", apply_to_shards)
        return together((variables.as_shards(), changed, self._at_home()))

    def finalizing(self):
        """A context: Keras may put averages in the place of weights."""
        optimizer: Any = self.model.optimizer
        finalize = optimizer.finalize_variable_values

        def finalize_shards(weights):
            with self.updating(), self._updated():
                finalize(weights)

        return attribute(optimizer, "finalize_variable_values", finalize_shards)

    def _updated(self, after=()):
        """A context: weights that stay whole are made anew of shards."""
        mirrored = [
            variable
            for variable in self.model.trainable_variables
            if isinstance(variable, MirroredVariable)
        ]
        return variables.updated(mirrored, after)

    def _at_home(self):
        """A context: operations run where the shards are."""
        return tf.device(self.home) if self.home else contextlib.nullcontext()

    def _looking_at_all(self, weights: list) -> Context:
        """Lets it clip, and look for infinities, over all processes, with
        weights whose gradients are not `None`."""
        optimizer, inner, engine = self.optimizer, self._inner, self.engine
        plain_clip = getattr(inner, CLIP)
        plain_use = getattr(inner, USE_WEIGHT_DECAY)
        cut = [v for v in weights if isinstance(v, ShardedVariable)]
        wholes = {identity_of(v.shard.variable): whole_of(v) for v in cut}

        def clip(gradients):
            if not (inner.clipnorm or inner.global_clipnorm):
                return plain_clip(gradients)
            present = [g for g in gradients if g is not None]
            squares = [
                # What is whole is in every process.
                tf.reduce_sum(tf.square(g))
                / (1 if isinstance(v, ShardedVariable) else engine.size)
                for g, v in zip(present, weights, strict=True)
            ]
            squares = engine.all_reduce(tf.stack(squares), "norms")
            if not inner.clipnorm:
                squares = tf.fill(squares.shape, tf.reduce_sum(squares))
            limit = inner.clipnorm or inner.global_clipnorm
            clipped = iter(
                g * limit / tf.maximum(norm, limit)
                for g, norm in zip(
                    present, tf.unstack(tf.sqrt(squares)), strict=True
                )
            )
            return [None if g is None else next(clipped) for g in gradients]

        def use(variable):
            return plain_use(wholes.get(identity_of(variable), variable))

        def changes():
            yield attribute(inner, CLIP, clip)
            yield attribute(inner, USE_WEIGHT_DECAY, use)
            if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
                plain_check = optimizer.check_finite

                def check_finite(gradients):
                    finite: Any = plain_check(gradients)
                    own = tf.cast(finite, tf.int32)
                    return engine.all_reduce(own[None], "finite", "Min")[0] > 0

                yield attribute(optimizer, "check_finite", check_finite)

        return together(changes())
