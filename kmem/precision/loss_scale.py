"""Scales the loss while a model trains in float16.

Gradients below 6e-8 are zero in float16. So the loss is scaled before it is
differentiated (Micikevicius et al., ICLR 2018, arXiv:1710.03740):
g = grad(s * loss) / s, where s is halved and the update skipped when g is not
finite. Keras's `LossScaleOptimizer` does that; this module puts one around an
optimizer that is in use already. What it does not do: become a part of the
model, or add up replicas, which accumulation.py does before.
"""

import contextlib
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from kmem.base.patching import attribute
from kmem.options import MixedPrecision

# What a fit's scale began with, what it reached, and the steps since it grew.
_scales: "weakref.WeakKeyDictionary[keras.optimizers.Optimizer, tuple]" = (
    weakref.WeakKeyDictionary()
)
# The wrapper of each that was made, or used, last.
_latest: "weakref.WeakKeyDictionary[keras.Optimizer, weakref.ref]" = (
    weakref.WeakKeyDictionary()
)


def loss_scaled(model: keras.Model, option: MixedPrecision):
    """Returns the optimizer to train with: the model's, or one around it.

    Call it before the step is traced, outside of any `tf.function`, and keep
    the result as long as the traced step: a graph does not own its variables.
    The inner optimizer keeps its variables and their values.

    Args:
        model: A compiled model. If it is not built yet, its own optimizer
            is built at the first update, as in Keras.
        option: With `"float16"` the loss is scaled, unless the model's
            optimizer does so itself.
    """
    inner = model.optimizer
    if option.dtype != "float16" or inner is None or scales_loss(inner):
        return inner
    # Lifted out of a graph that may be in the making: the variables must
    # outlive it.
    with tf.init_scope(), model.distribute_strategy.scope():
        variables = model.trainable_variables if model.built else []
        wrapper = around(inner, variables, option)
    recall_scale(wrapper)
    return wrapper


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it does by itself; Keras's wrapper would erase a static scale."""
    is_wrapper = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return is_wrapper or optimizer.loss_scale_factor is not None


def around(
    inner: keras.optimizers.Optimizer, variables: list, option: MixedPrecision
) -> keras.optimizers.LossScaleOptimizer:
    """Puts a loss scale around an optimizer, which keeps its variables, and
    builds it if it is known which it updates."""
    if variables and not inner.built:
        inner.build(variables)
    wrapper = _LossScaleOptimizer(
        inner, option.initial_scale, option.dynamic_growth_steps
    )
    # Keras's optimizers ignore a second `build`; a user's own need not.
    with attribute(inner, "build", lambda variables: None):
        wrapper.build(variables)
    return wrapper


def recall_scale(optimizer) -> None:
    """Goes on with the scale that was remembered last, if any.

    Args:
        optimizer: What `loss_scaled` returned; another optimizer is ignored.
    """
    if not isinstance(optimizer, _LossScaleOptimizer):
        return
    _latest[optimizer.inner_optimizer] = weakref.ref(optimizer)
    known = _scales.get(optimizer.inner_optimizer, (None, 0.0, 0))
    initial_scale, scale, steps = known
    if initial_scale == optimizer.initial_scale:
        optimizer.dynamic_scale.assign(scale)
        # Keras compares for equality: a larger count would never grow.
        last = optimizer.dynamic_growth_steps - 1
        optimizer.step_counter.assign(min(steps, last))


def remember_scale(optimizer) -> None:
    """Lets the next session begin with the scale that this one reached.

    Args:
        optimizer: What `loss_scaled` returned; another optimizer is ignored.
    """
    if isinstance(optimizer, _LossScaleOptimizer):
        _scales[optimizer.inner_optimizer] = (
            optimizer.initial_scale,
            float(optimizer.dynamic_scale.numpy()),
            int(optimizer.step_counter.numpy()),
        )


@contextlib.contextmanager
def none_remembered(inner: keras.optimizers.Optimizer | None) -> Iterator[None]:
    """What an optimizer's scale reaches within is not remembered."""
    known = _scales.get(inner)
    try:
        yield
    finally:
        _scales.pop(inner, None)
        if known is not None:
            _scales[inner] = known


def scale_of(inner: keras.optimizers.Optimizer | None) -> list | None:
    """What to save of the scale of a model's optimizer, in the middle of a fit
    or after, for `set_scale`; `None` if it was never scaled."""
    if inner is None:
        return None
    remember_scale(_wrapper(inner))
    known = _scales.get(inner)
    return None if known is None else list(known)


def set_scale(inner: keras.optimizers.Optimizer, saved: list) -> None:
    """Goes on with a scale that `scale_of` gave of a model's optimizer."""
    _scales[inner] = tuple(saved)
    recall_scale(_wrapper(inner))


def _wrapper(inner) -> "_LossScaleOptimizer | None":
    known = _latest.get(inner)
    return None if known is None else known()


class _LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Builds the optimizer inside before Keras's own enters a `tf.cond`.

    It is given gradients that are summed over all replicas: the first
    replica's, which is where Keras looks for infinities, are those of all.
    """

    def apply(self, grads, trainable_variables=None):
        inner = self.inner_optimizer
        if trainable_variables is not None and not inner.built:
            trainable_variables = list(trainable_variables)
            inner.build(trainable_variables)
        super().apply(grads, trainable_variables)
