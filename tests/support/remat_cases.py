"""Blocks of layers on which running twice easily goes wrong."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def rows(*shape):
    return tf.constant(np.random.default_rng(3).normal(size=shape), "float32")


def tokens():
    return tf.constant(np.random.default_rng(3).integers(0, 4, (6, 5)))


class Attention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.3)
        self.norm = layers.LayerNormalization()

    def call(self, x):
        return self.norm(x + self.attention(x, x, use_causal_mask=True))


class Counting(layers.Layer):
    """Assigns, reads what it assigned, and updates a metric."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )
        self.metric = keras.metrics.Mean()

    def call(self, x):
        self.count.assign_add(1.0)
        self.scale.assign(self.scale * 0.5 + 1.0)
        self.metric.update_state(x)
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return tf.tanh(x * self.count) + self.scale


def dropout():
    return [layers.Dense(8, "relu"), layers.Dropout(0.5), layers.Dense(8)]


def noise():
    return [layers.GaussianNoise(0.5), layers.Dense(8, "tanh")]


def batch_normalization():
    block = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU()]
    return [*block, layers.Dropout(0.5, seed=1), layers.Dense(8)]


def activity_regularizer():
    return [
        layers.Dense(8, "tanh", activity_regularizer="l2"),
        layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1"),
    ]


def masked_rnn():
    return [
        layers.Embedding(10, 8, mask_zero=True),
        layers.LSTM(8, dropout=0.2, recurrent_dropout=0.2),
    ]


def embedding():
    return [layers.Embedding(10, 8), layers.Dense(8)]


def attention():
    return [Attention()]


def spectral_normalization():
    return [layers.SpectralNormalization(layers.Dense(8)), layers.Dense(8)]


def assigning():
    return [layers.Dense(8), Counting(), layers.Dense(8)]


def frozen():
    block = [layers.Dense(8), layers.Dense(8, "relu"), layers.Dense(8)]
    block[1].trainable = False
    return block


def mixed_bfloat16():
    policy = "mixed_bfloat16"
    return [
        layers.Dense(8, "relu", dtype=policy),
        layers.Dropout(0.5, dtype=policy),
        layers.Dense(8, dtype=policy),
    ]


def flipping():
    return [layers.RandomFlip(), layers.Conv2D(4, 3), layers.ReLU()]


def groups():
    """Keras computes convolutions in groups in a `tf.function`."""
    block = [layers.Conv2D(4, 3, groups=2, activation="relu")]
    return [*block, layers.Dropout(0.5), layers.Conv2D(4, 3, groups=4)]


CASES = {
    dropout: rows(6, 8),
    noise: rows(6, 8),
    batch_normalization: rows(6, 8),
    activity_regularizer: rows(6, 8),
    masked_rnn: tokens(),
    embedding: tokens(),
    attention: rows(6, 5, 8),
    spectral_normalization: rows(6, 8),
    assigning: rows(6, 8),
    frozen: rows(6, 8),
    mixed_bfloat16: rows(6, 8),
    flipping: rows(4, 6, 6, 2),
    groups: rows(4, 6, 6, 4),
}
