"""Rows of an embedding's gradient: adaptive optimizers square each by itself,
and micro-batches, which add them up, train other numbers."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import optimizers

import kmem
from kmem.fit.session import Session
from kmem.step import updates

ROWS, LENGTH, WIDTH = 64, 16, 32


class Unknown(optimizers.SGD):
    """One that cannot be made of its configuration."""

    def __init__(self, needed, **arguments):
        super().__init__(**arguments)


@pytest.mark.parametrize(
    ("optimizer", "squares"),
    [
        (optimizers.SGD(0.1), False),
        (optimizers.SGD(0.1, momentum=0.9, nesterov=True), False),
        (optimizers.SGD(0.1, global_clipnorm=1.0), True),
        (optimizers.Adam(optimizers.schedules.CosineDecay(0.0, 9)), True),
        (optimizers.RMSprop(), True),
        (optimizers.LossScaleOptimizer(optimizers.AdamW()), True),
        (Unknown(1), True),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_an_optimizer_is_tried(optimizer, squares):
    assert updates.squares_rows(optimizer) is squares
    assert not optimizer.built


def language_model(optimizer, depth=1):
    keras.utils.set_random_seed(0)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(11, WIDTH, name="table")(ids)
    for _ in range(depth):
        x = layers.Dense(WIDTH, "tanh")(x)
    model = keras.Model(ids, layers.Dense(3)(x))
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(
    ("optimizer", "names"), [("sgd", []), ("adam", ["table"])]
)
def test_the_layers_are_named_whose_rows_are_squared(optimizer, names):
    model = language_model(optimizer)
    session = Session(model, kmem.MemoryOptions(microbatches=2))
    ids = tf.TensorSpec((None, LENGTH), "int32")

    found = session.layers_that_differ((ids, tf.TensorSpec((None, LENGTH, 3))))

    assert [layer.name for layer in found] == names


def test_a_budget_takes_recomputation_first(native_library):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 11, (ROWS, LENGTH))
    y = rng.normal(size=(ROWS, LENGTH, 3)).astype("float32")
    fit = {"batch_size": ROWS, "epochs": 2, "verbose": 0}
    plain, model = (kmem.wrap(language_model("adam", 12)) for _ in range(2))
    gc.collect()

    plain.fit(x, y, **fit, memory_budget="1GB")
    report = plain.memory_report
    needed = report.chosen.predicted_peak_bytes - report.in_use_bytes
    budget = kmem.memory.current("CPU") + int(0.75 * needed)
    model.fit(x, y, **fit, memory_budget=budget)

    assert report.chosen.options == kmem.MemoryOptions()
    assert model.memory_report.chosen.plan.segments
    assert model.memory_report.chosen.options.num_parts == 1
    pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
