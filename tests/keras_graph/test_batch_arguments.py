"""What tells of a model's step says what it must be given."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem

X = np.ones((8, 4), "float32")
CALLS = {
    "plan": kmem.plan,
    "profile": kmem.profile,
    "estimate": kmem.estimate,
}


def made():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("name", CALLS)
def test_a_data_set_is_no_batch(name):
    data = tf.data.Dataset.from_tensor_slices((X, X)).batch(4)
    with pytest.raises(ValueError, match=r"`next\(iter\(data\)\)`. Received"):
        CALLS[name](made(), data)


@pytest.mark.parametrize("name", CALLS)
def test_a_path_is_no_model(name):
    with pytest.raises(ValueError, match="`model` must be a `keras.Model`"):
        CALLS[name]("model.keras", (X, X))


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_costs_are_measured_or_computed(name):
    with pytest.raises(ValueError, match="`costs` must be one of 'measured'"):
        CALLS[name](made(), (X, X), costs="guessed")
