"""`memory_budget` of programs that have no graph."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from peaks import Peaks

import kmem

pytestmark = pytest.mark.usefixtures("native_library")


class Looking(keras.Model):
    """Looks at its loss in Python, which no graph lets it do."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        if not np.isfinite(float(loss)):
            raise FloatingPointError
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def _trained(**options):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((64,))
    for _ in range(5):
        x = layers.BatchNormalization()(layers.Dense(128, "tanh")(x))
    model = Looking(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse", run_eagerly=True)
    x = np.random.default_rng(0).normal(size=(4096, 64)).astype("float32")
    gc.collect()
    before, peaks = kmem.memory.current(), Peaks()
    if share := options.pop("share", None):
        options["memory_budget"] = before + int(share)
    kmem.wrap(model).fit(
        *(x, x[:, :1]),
        batch_size=2048,
        shuffle=False,
        verbose=0,
        callbacks=[peaks],
        **options,
    )
    return model, max(peaks.found) - before


def test_what_no_graph_can_do_evicts_before_its_numbers_change():
    plain, needed = _trained()

    model, peak = _trained(share=0.5 * needed)

    report = model.memory_report
    assert report.chosen.options.dtr is not None
    assert "dtr" in report.summary()
    assert peak <= 0.5 * needed
    for got, want in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_no_graph_can_do_stays_as_it_is_where_it_fits():
    plain, needed = _trained()

    model, _ = _trained(share=2 * needed)

    assert model.memory_report.is_plain
    for got, want in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_no_graph_can_do_has_no_plan():
    with pytest.raises(ValueError, match="use `dtr` or `microbatches`"):
        _trained(remat="auto")
