"""Random data for the uses: 52 rows, the last batch of 20 is smaller."""

import keras
import numpy as np
from keras import layers

NUM_ROWS = 52


def normal(*shape, seed=7):
    values = np.random.default_rng(seed).normal(size=(NUM_ROWS, *shape))
    return values.astype(keras.config.floatx())


def integers(high, *shape, low=0, seed=8):
    rng = np.random.default_rng(seed)
    return rng.integers(low, high, (NUM_ROWS, *shape))


def regression():
    return normal(5), normal(3, seed=9)


def tokens():
    """Ids with 1 to 8 steps a row; 0 is padding."""
    ids = integers(11, 8, low=1)
    lengths = integers(9, low=1, seed=10)
    ids[np.arange(8)[None] >= lengths[:, None]] = 0
    return ids, normal(8, 2, seed=9)


def weights():
    values = np.abs(normal(seed=11)) + 0.1
    values[3:9] = 0
    return values


def dense(**arguments):
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(7, "tanh"),
            layers.Dense(3),
        ]
    )
    return compiled(model, **arguments)


def compiled(model, **arguments):
    arguments = {"optimizer": keras.optimizers.Adam(1e-2)} | arguments
    model.compile(**({"loss": "mse"} | arguments))
    return model


def trained(trainer, layers_, x, y, **arguments):
    """A `Sequential` of the layers, trained on x and y."""
    inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
    model = compiled(keras.Sequential([inputs, *layers_]), **arguments)
    trainer.fit(model, x, y)
    return model
