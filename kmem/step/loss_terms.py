"""What each loss of a training step is divided by.

Keras reduces a loss over the batch that it is given. When a batch comes in
parts, the mean over the parts is the mean over the batch only if each part
counts with its own denominator: rows for a plain mean, unmasked entries for a
masked one, the weights' sum for "mean_with_sample_weight", one for "sum".
This module records those denominators while a step runs, and scales the
losses by them. It hooks the one function through which every `keras.Loss`
reduces its values; a loss made by hand of other operations is not seen, and
counts as a mean over rows.
"""

import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base.private_keras import loss as keras_loss
from kmem.step.capture import has_default_step

ROWS = "rows"
SUM = "sum"

_reduce = keras_loss.reduce_weighted_values


class LossTerms:
    """The loss terms of one part of a batch.

    Args:
        share: The part's rows over the batch's rows, a scalar. Terms are
            scaled such that their mean over the parts, weighted by share, is
            the batch's. `None` leaves them as they are.
        totals: The denominators of the whole batch, `{group: scalar}`, of
            every counted group.
        dropped: A group whose terms count as zero.

    Attributes:
        denominators: `{group: scalar or None}`. Terms that are divided by the
            same number form a group: `"rows"`, `"sum"`, or `"counted_0"` and
            so on for a number that is counted in the forward pass.
    """

    def __init__(self, share=None, totals=None, dropped=None):
        self.denominators: dict[str, Any] = {}
        self._share = share
        self._totals = totals or {}
        self._dropped = dropped
        # Terms with the same mask and weights share a group. The tensors are
        # held so that an `id` stays one tensor's.
        self._counted: dict[tuple[int, int], tuple[str, tuple]] = {}

    def reduced(self, values, sample_weight, mask, reduction, dtype):
        """Reduces one term as Keras does, then scales it."""
        # A loss function may give a Python number.
        values = tf.convert_to_tensor(values)
        loss: Any = _reduce(values, sample_weight, mask, reduction, dtype)
        weighs = reduction == "mean_with_sample_weight"
        if reduction == "sum":
            group = SUM
            self.denominators[SUM] = None
        elif (
            reduction in (None, "none")
            or len(values.shape) == 0
            or (mask is None and not (weighs and sample_weight is not None))
        ):
            group = ROWS
            self.denominators[ROWS] = None
        else:
            weight = sample_weight if weighs else None
            group, _ = self._counted.setdefault(
                (id(mask), id(weight)),
                (f"counted_{len(self._counted)}", (mask, weight)),
            )
            if group not in self.denominators:
                ones = keras.ops.ones_like(values)
                self.denominators[group] = _reduce(
                    ones, weight, mask, "sum", dtype
                )
        return self._scaled(loss, group)

    def summed(self, loss):
        """Scales a term that adds up over the rows."""
        self.denominators[SUM] = None
        return self._scaled(loss, SUM)

    def _scaled(self, loss, group):
        if group == self._dropped:
            return keras.ops.zeros_like(loss)
        if self._share is None or group == ROWS:
            return loss
        scale = 1 / self._share
        if group != SUM:
            part = keras.ops.cast(self.denominators[group], scale.dtype)
            scale *= keras.ops.divide_no_nan(part, self._totals[group])
        return loss * keras.ops.cast(scale, loss.dtype)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a model's loss is made of.

    Attributes:
        groups: The groups of its terms.
        counted: Those whose denominators the forward pass counts.
        only_terms: Whether it has nothing but these and regularizers.
        has_regularizers: Whether any weight has a regularizer.
        comparing: The names of its terms that compare the rows of a batch.
        may_compare: Whether any may; so may a loss that is made by hand.
    """

    groups: list[str]
    counted: list[str]
    only_terms: bool
    has_regularizers: bool
    comparing: list[str]
    may_compare: bool

    @classmethod
    def of(
        cls,
        model,
        terms: LossTerms,
        compares: dict[str, bool | None],
    ) -> "Loss":
        """What a step showed; `compares` is what `comparing.looking` found."""
        # A step that recomputes is Keras's own, too.
        is_default = has_default_step(model, "compute_loss")
        num_regularizers = sum(
            getattr(variable, "regularizer", None) is not None
            for variable in model.trainable_variables
        )
        denominators = terms.denominators
        only_terms = is_default and len(model.losses) == num_regularizers
        return cls(
            groups=list(denominators),
            counted=[g for g, d in denominators.items() if d is not None],
            only_terms=only_terms,
            has_regularizers=num_regularizers > 0,
            comparing=[name for name, is_so in compares.items() if is_so],
            may_compare=not compares
            or any(is_so is not False for is_so in compares.values()),
        )

    def split(self) -> tuple[str, list[str]]:
        """Which groups to tell apart, to add up batches.

        Returns:
            The group as which all the rest counts, and the groups apart.
        """
        special = [group for group in self.groups if group != ROWS]
        # A regularizer may ride on any mean, but a sum would add it up.
        rides = special != [SUM] or not self.has_regularizers
        if self.only_terms and len(self.groups) == 1 and special and rides:
            return special[0], []
        return ROWS, special


def recording(terms: LossTerms, layers=()) -> patching.Context:
    """Lets `terms` see, and scale, every Keras loss of this thread.

    Args:
        terms: Where the losses are recorded.
        layers: Layers whose activity regularizers are recorded too, where
            Keras adds them up.
    """

    def reduced(
        _,
        values,
        sample_weight=None,
        mask=None,
        reduction="sum_over_batch_size",
        dtype=None,
    ):
        return terms.reduced(values, sample_weight, mask, reduction, dtype)

    def summed(penalty, output):
        return terms.summed(penalty(output))

    def changes():
        yield patching.method(keras_loss, "reduce_weighted_values", reduced)
        for layer in layers:
            if layer.activity_regularizer is not None and _activities_add_up():
                yield patching.method(layer, "activity_regularizer", summed)

    return patching.together(changes())


@functools.cache
def _activities_add_up() -> bool:
    """Whether Keras adds up activity penalties over a batch.

    It did before it took to dividing them by the rows, in a 3.x release.
    """
    with tf.init_scope():
        layer = keras.layers.ActivityRegularization(l2=1.0, dtype="float32")
        layer(tf.ones((2, 1)))
        return float(layer.losses[0]) > 1.5
