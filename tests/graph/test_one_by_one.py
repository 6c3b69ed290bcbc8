"""Loops of a step run one iteration after another: the step's peak can be
told, and its numbers are the same."""

import keras
import numpy as np
import pytest
from keras import layers

import kmem

pytestmark = pytest.mark.usefixtures("native_library")

_ROWS, _STEPS, _UNITS = 4, 64, 128


def _model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((_STEPS, _UNITS))
    model = keras.Model(inputs, layers.LSTM(_UNITS)(inputs))
    model.compile("sgd", "mse")
    return kmem.wrap(model)


def _data():
    random = np.random.default_rng(0)
    x = random.normal(size=(_ROWS, _STEPS, _UNITS)).astype("float32")
    return x, random.normal(size=(_ROWS, _UNITS)).astype("float32")


def _peaks(model, options, count=12):
    model.memory_options = options
    x, y = _data()
    model.train_on_batch(x, y)
    found = []
    for _ in range(count):
        with kmem.memory.track() as usage:
            model.train_on_batch(x, y)
        found.append(usage.peak_bytes - usage.start_bytes)
    return found


@pytest.mark.parametrize(
    "options",
    [
        kmem.MemoryOptions(microbatches=_ROWS),
        kmem.MemoryOptions(memory_budget="1GB"),
    ],
)
def test_few_gradients_of_a_recurrent_layer_are_in_memory_at_a_time(options):
    model = _model()
    weight_bytes = sum(v.numpy().nbytes for v in model.trainable_variables)

    peaks = _peaks(model, options)

    # A sum, an addend, and the new sum; and what the rows keep.
    row_bytes = _STEPS * _UNITS * 4
    assert max(peaks) <= 4 * weight_bytes + 16 * _ROWS * row_bytes


def test_a_recurrent_layer_learns_the_same_as_in_plain_keras():
    weights = []
    for budget in (None, "1GB"):
        model = _model()
        model.memory_options = kmem.MemoryOptions(memory_budget=budget)
        for _ in range(3):
            model.train_on_batch(*_data())
        weights.append(model.get_weights())

    for got, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(got, expected)
