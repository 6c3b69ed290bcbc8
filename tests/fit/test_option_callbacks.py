"""Several callbacks of options in one `fit`, and `fit`s that did not end."""

import gc
import weakref

import keras
import numpy as np
import pytest

import kmem
from kmem.callbacks import DTR
from kmem.callbacks import MemoryOptions
from kmem.callbacks import MicroBatches
from kmem.callbacks import Remat
from kmem.callbacks import Sharding

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


class Stop(keras.callbacks.Callback):
    """Ends a `fit` as Ctrl-C does while a callback runs."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def on_train_begin(self, logs=None):
        if self.when == "before":
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def made():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def fit(model, *callbacks, **options):
    model.fit(
        *(X, X, 32),
        callbacks=list(callbacks),
        verbose=0,
        shuffle=False,
        **options,
    )
    return model.get_weights()


def interrupted(callback, when):
    model = made()
    with pytest.raises(KeyboardInterrupt):
        fit(model, callback, Stop(when))
    return model


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        ([Remat, DTR], {}, "callback with dtr beside a callback with remat"),
        ([DTR, Remat], {}, "callback with remat beside a callback with dtr"),
        ([Remat, Remat], {}, "with remat beside a callback with remat"),
        ([Remat], {"microbatches": 2}, "with remat beside options of `fit`"),
        ([Remat], {"dtr": True}, "with remat beside options of `fit`"),
        ([DTR], {"memory_budget": "1GB"}, "with dtr beside options of `fit`"),
    ],
)
def test_options_in_two_places_are_refused(callbacks, options, message):
    model = made()
    if options:
        kmem.wrap(model)
    before = model.get_weights()
    with pytest.raises(ValueError, match=message):
        fit(model, *[make() for make in callbacks], **options)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(fit(made()), fit(model), strict=True):
        np.testing.assert_array_equal(a, b)


AFTER = {
    "microbatches": lambda: MicroBatches(2),
    "remat": lambda: Remat(),
    "budget": lambda: MemoryOptions(memory_budget="1GB"),
    "sharding": lambda: Sharding("full"),
}
THEN = ["same", "compiled", "wrapped", "plain"]


@pytest.mark.parametrize(
    ("name", "then", "when"),
    [
        (name, then, when)
        for name in AFTER
        for then in THEN
        for when in ("before", "after")
        # Weights are in shards then, which no other trainer knows.
        if (name, then) != ("sharding", "compiled")
        # What plans with the first batch has another function until then.
        and (when == "after" or name == "remat")
    ],
)
def test_a_model_is_plain_after_the_fit_that_follows_an_interrupted_one(
    name, then, when
):
    model = interrupted(AFTER[name](), when)
    if then == "same":
        fit(model, AFTER[name]())
    elif then == "compiled":
        # Nothing that was traced with another optimizer trains.
        before = model.get_weights()
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        for a, b in zip(before, fit(model), strict=True):
            np.testing.assert_array_equal(a, b)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    elif then == "plain":
        fit(model)
    else:
        fit(kmem.wrap(model), microbatches=2)
    plain = made()
    plain.set_weights(model.get_weights())
    for a, b in zip(fit(plain), fit(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_list_of_callbacks_may_be_used_again():
    model = made()
    callbacks = keras.callbacks.CallbackList(
        [MicroBatches(2), stop := Stop("after")],
        add_history=True,
        model=model,
    )
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, X, callbacks=callbacks, verbose=0)
    callbacks.callbacks.remove(stop)
    model.fit(X, X, callbacks=callbacks, verbose=0)


def test_a_model_whose_step_failed_is_let_go_of():
    def fail():
        model = made()
        with pytest.raises(ValueError, match="Dimensions"):
            model.fit(
                *(X, X[:, :3]),
                callbacks=[MicroBatches(2)],
                verbose=0,
            )
        return weakref.ref(model)

    found = fail()
    gc.collect()
    assert found() is None
