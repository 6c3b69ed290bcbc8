"""A model whose steps run out of memory when they are told to."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import kmem


class Fails(layers.Layer):
    """Runs out of memory once when it is told to."""

    def __init__(self):
        super().__init__()
        self.fails = False

    def _check(self):
        if self.fails:
            self.fails = False
            raise MemoryError("for a moment")

    def call(self, x):
        with tf.control_dependencies([tf.py_function(self._check, [], [])]):
            return tf.identity(x)


class _Tells(keras.callbacks.Callback):
    def __init__(self, layer, steps):
        super().__init__()
        self._layer = layer
        self._steps = steps

    def on_train_batch_begin(self, batch, logs=None):
        self._layer.fails = batch in self._steps


def trained(steps, model=None, callbacks=(), **options):
    """Trains a model, or one of its own, in four batches twice.

    Args:
        steps: The batches that fail once.
        model: One that was trained here before.
        callbacks: Others of `fit`.
        **options: kmem's.

    Returns:
        The model, and its history.
    """
    if model is None:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8),
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                Fails(),
                layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    fails = next(each for each in model.layers if isinstance(each, Fails))
    x = np.random.default_rng(0).normal(size=(32, 4))
    history = kmem.wrap(model).fit(
        x,
        x[:, :1],
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[_Tells(fails, steps), *callbacks],
        **options,
    )
    return model, history.history
