"""What a callback sets before the first step counts under every option."""

import gc

import keras
import numpy as np
import pytest
from keras import layers

import kmem

pytestmark = pytest.mark.usefixtures("native_library")

_ROWS = 512
X = np.random.default_rng(0).normal(size=(2 * _ROWS, 16)).astype("float32")
Y = X[:, :4]


class Scaled(layers.Layer):
    """Has a plain attribute, which a trace reads."""

    factor = 1.0

    def call(self, x):
        return x * self.factor


def sets(when):
    def set_factor(*args, **kwargs):
        callback.model.get_layer("scaled").factor = 3.0

    callback = keras.callbacks.Callback()
    setattr(callback, when, set_factor)
    return callback


def model():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((16,))
    for _ in range(4):
        x = layers.Dense(64, "tanh")(layers.Dense(64, "relu")(x))
    made = keras.Model(inputs, layers.Dense(4)(Scaled(name="scaled")(x)))
    made.compile("sgd", "mse")
    return kmem.wrap(made)


def tight(share):
    """A budget in which a plain step does not fit: what is in use, and a share
    of what a batch's activations take."""
    gc.collect()
    activations = _ROWS * 8 * 64 * 4
    return kmem.memory.current("CPU") + int(share * activations)


def fitted(when, **options):
    made = model()
    if options.get("memory_budget") == TIGHT:
        options["memory_budget"] = tight(1.1)
    data = {"batch_size": _ROWS, "shuffle": False, "validation_data": (X, Y)}
    history = made.fit(
        *(X, Y), **data, verbose=0, callbacks=[sets(when)], **options
    )
    return made, np.ravel([*history.history.values()])


TIGHT = "tight"
OPTIONS = [
    {"memory_budget": TIGHT},
    {"memory_budget": "1GB"},
    {"microbatches": 2},
    {"remat": "auto"},
    {"dtr": True},
]


@pytest.mark.parametrize("when", ["on_train_begin", "on_train_batch_begin"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_fit_trains_and_validates_with_what_a_callback_set(when, options):
    made, found = fitted(when, **options)
    np.testing.assert_allclose(found, fitted(when)[1], rtol=1e-5)
    if options == OPTIONS[0]:
        assert made.memory_report.chosen.options != kmem.MemoryOptions()


@pytest.mark.parametrize("share", [0.6, 1000])
def test_evaluate_and_predict_compute_with_it(share):
    def results(**options):
        made, arguments = model(), {"batch_size": _ROWS, "verbose": 0}
        if options:
            options["memory_budget"] = tight(share)
        callbacks = [sets("on_test_begin")]
        loss = made.evaluate(
            *(X, Y), **arguments, callbacks=callbacks, **options
        )
        made.get_layer("scaled").factor = 1.0
        made.predict_function = None
        callbacks = [sets("on_predict_begin")]
        outputs = made.predict(X, **arguments, callbacks=callbacks, **options)
        return loss, outputs

    loss, outputs = results(memory_budget=None)
    expected, expected_outputs = results()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-5, atol=1e-6)
