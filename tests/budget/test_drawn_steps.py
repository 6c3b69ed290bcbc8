"""What layers need by themselves tells what a step needs, before one is run."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem

pytestmark = pytest.mark.usefixtures("native_library")


class _Block(layers.Layer):
    """Its attention needs most before its inner layers have made all that
    is kept."""

    def build(self, shape):
        self.attention = layers.MultiHeadAttention(4, 8)
        self.attention.build(shape, shape)
        self.inner = layers.Dense(4 * shape[-1], "gelu")
        self.inner.build(shape)
        self.outer = layers.Dense(shape[-1])
        self.outer.build((*shape[:-1], 4 * shape[-1]))

    def call(self, x):
        x += self.attention(x, x)
        return x + self.outer(self.inner(x))


def _blocks():
    x = inputs = keras.Input((96, 32))
    for _ in range(3):
        x = _Block()(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model, (np.zeros((16, 96, 32)), np.zeros((16, 96, 1)))


def _weights():
    """Most of what it needs is a gradient, and what its update computes."""
    x = inputs = keras.Input((384,))
    for _ in range(6):
        x = layers.Dense(384, "relu")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model, (np.zeros((64, 384)), np.zeros((64, 1)))


@pytest.mark.parametrize(
    "make, share, doubt",
    [(_blocks, 1.0, 0.05), (_blocks, 0.6, 0.1), (_weights, 1.0, 0.1)],
)
def test_a_step_needs_what_its_layers_tell(make, share, doubt):
    model, batch = make()

    # Its dry run tells what else is in memory, and what was not foreseen.
    plan = kmem.plan(model, batch, budget=1.0)
    if share < 1:
        room = int(share * plan.simulation.peak_bytes)
        plan = kmem.plan(model, batch, budget=plan.resident_bytes + room)

    gc.collect()
    unforeseen = plan.resident_bytes - kmem.memory.current("CPU")
    assert abs(unforeseen) < doubt * plan.simulation.peak_bytes
    assert bool(plan.segments) == (share < 1)


def test_a_step_that_cannot_fit_is_not_run(monkeypatch):
    monkeypatch.setenv("KMEM_CACHE", "0")
    # What else is in memory, much as it is, is known.
    others = tf.zeros([20_000_000])
    keras.utils.set_random_seed(0)
    blocks = [layers.Dense(64, "tanh") for _ in range(12)]
    normalized = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((4,)), *blocks, normalized])
    model.compile("adam", "mse")
    model = kmem.wrap(model)
    x = np.zeros((2048, 4), "float32"), np.zeros((2048, 64), "float32")
    options = {"batch_size": 2048, "verbose": 0}
    model.fit(*x, **options, memory_budget="1GB")
    plain = model.memory_report.chosen

    in_use = model.memory_report.in_use_bytes
    budget = in_use + int(0.7 * (plain.predicted_peak_bytes - in_use))
    model.fit(*x, **options, memory_budget=budget)

    report = model.memory_report
    assert report.chosen.plan
    assert report.chosen.measured_peak_bytes <= budget
    # Of a plain step it is computed alone.
    assert report.plain.measured_peak_bytes is None
    computed = report.plain.predicted_peak_bytes
    assert abs(computed - plain.predicted_peak_bytes) < 0.1 * computed
    del others
