"""Has Keras alone trace a training step once.

Keras makes the variables of an optimizer and of metrics in the first trace of
a step, and TensorFlow then traces the step again. Under a strategy Keras makes
them ahead, which gives the same numbers in half of the time. kmem makes its
own functions and variables before: for a model with its options nothing is
different here.
"""

import keras
import tensorflow as tf

from kmem.step.accumulation import build_optimizer

_build = keras.Model._maybe_symbolic_build


def _maybe_symbolic_build(model, iterator=None, data_batch=None):
    _build(model, iterator=iterator, data_batch=data_batch)
    if model.train_function is not None or model.run_eagerly:
        return
    if tf.distribute.has_strategy() or not model.trainable_variables:
        return
    if not all(layer.built for layer in model._flatten_layers()):
        return
    if model.optimizer is not None and not model.optimizer.built:
        build_optimizer(model.optimizer, model.trainable_variables)
    metrics = model._compile_metrics
    if iterator is not None and metrics is not None and not metrics.built:
        spec = iterator._distributed_dataset.element_spec
        model._symbolic_build(data_batch=spec)


def install() -> None:
    """Changes Keras, once."""
    keras.Model._maybe_symbolic_build = _maybe_symbolic_build
