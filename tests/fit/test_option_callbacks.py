"""Several callbacks of options in one `fit`, and `fit`s that did not end."""

import keras
import numpy as np
import pytest

import kmem
from kmem.callbacks import DTR
from kmem.callbacks import MemoryOptions
from kmem.callbacks import MicroBatches
from kmem.callbacks import MixedPrecision
from kmem.callbacks import Remat
from kmem.callbacks import Sharding

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


class Stop(keras.callbacks.Callback):
    """Ends a `fit` as Ctrl-C does while a callback runs."""

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


def interrupted(*callbacks):
    model = made()
    with pytest.raises(KeyboardInterrupt):
        fit(model, *callbacks, Stop())
    return model


TWO = [
    (lambda: MicroBatches(4), lambda: MixedPrecision("bfloat16")),
    (lambda: MixedPrecision("bfloat16"), lambda: MicroBatches(4)),
    (lambda: Remat(), lambda: MixedPrecision("bfloat16")),
    (lambda: MixedPrecision("bfloat16"), lambda: Remat()),
]


@pytest.mark.parametrize("two", TWO)
def test_callbacks_of_one_option_each_are_one_of_all_options(two):
    callbacks = [make() for make in two]
    given = {
        name: getattr(each.options, name)
        for each in callbacks
        for name in ("microbatches", "mixed_precision", "remat")
        if getattr(each.options, name)
    }
    want = fit(made(), MemoryOptions(**given))
    model = made()
    got = fit(model, *callbacks)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
    # Afterwards it is a plain model.
    plain = made()
    model.set_weights(plain.get_weights())
    for a, b in zip(fit(plain), fit(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        ([Remat, DTR], {}, "`remat` and `dtr` exclude each other"),
        ([DTR, Remat], {}, "`remat` and `dtr` exclude each other"),
        ([Remat, Remat], {}, "in one place, each once.*remat"),
        ([Remat], {"microbatches": 2}, "in one place, each once.*remat"),
        ([Remat], {"dtr": True}, "in one place, each once.*remat"),
        ([DTR], {"memory_budget": "1GB"}, "in one place, each once.*dtr"),
    ],
)
def test_options_that_cannot_be_had_together_are_refused(
    callbacks, options, message
):
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
    "sharding": lambda: Sharding("full"),
    "budget": lambda: MemoryOptions(memory_budget="1GB"),
}


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("then", ["same", "compiled", "wrapped"])
def test_a_model_is_plain_after_the_fit_that_follows_an_interrupted_one(
    name, then
):
    model = interrupted(AFTER[name]())
    if then == "same":
        fit(model, AFTER[name]())
    elif then == "compiled":
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    else:
        fit(kmem.wrap(model), microbatches=2)
    plain = made()
    plain.set_weights(model.get_weights())
    for a, b in zip(fit(plain), fit(model), strict=True):
        np.testing.assert_array_equal(a, b)
