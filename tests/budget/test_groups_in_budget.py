"""`memory_budget` beside `gradient_accumulation_steps`: the sums of a group's
gradients are within the budget, and last when the options change."""

import gc

import failing
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from peaks import Peaks

import kmem

pytestmark = pytest.mark.usefixtures("native_library")

_FEATURES = 32


def _model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((_FEATURES,))])
    for _ in range(4):
        model.add(layers.Dense(64, "tanh"))
    model.add(layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return kmem.wrap(model)


def _data(sizes):
    """Batches of these sizes, of which a graph does not know the rows."""
    x = np.random.default_rng(0).normal(size=(sum(sizes), _FEATURES))
    x = x.astype("float32")
    ends = np.cumsum([0, *sizes])

    def examples():
        for begin, end in zip(ends[:-1], ends[1:], strict=True):
            yield x[begin:end], x[begin:end, :1]

    specs = (
        tf.TensorSpec((None, _FEATURES), tf.float32),
        tf.TensorSpec((None, 1), tf.float32),
    )
    data = tf.data.Dataset.from_generator(examples, output_signature=specs)
    return data.apply(tf.data.experimental.assert_cardinality(len(sizes)))


def _fit(sizes, model=None, **options):
    model = model or _model()
    peaks = Peaks()
    history = model.fit(
        _data(sizes),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[peaks],
        gradient_accumulation_steps=3,
        **options,
    )
    values = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    return model, [*values, history.history["loss"]], peaks.found


def _needed(sizes):
    gc.collect()
    before = kmem.memory.current()
    _, values, peaks = _fit(sizes)
    return values, max(peaks) - before


def _budget(needed, share):
    gc.collect()
    return kmem.memory.current() + int(share * needed)


def _assert_close(values, others, tolerance=1e-5):
    for got, want in zip(values, others, strict=True):
        np.testing.assert_allclose(got, want, tolerance, tolerance)


def test_a_group_that_fits_is_added_up_as_it_is():
    sizes = [512] * 7
    want, needed = _needed(sizes)

    model, values, _ = _fit(sizes, memory_budget=_budget(needed, 2))

    assert model.memory_report.is_plain
    for got, value in zip(values, want, strict=True):
        np.testing.assert_array_equal(got, value)


def test_the_sums_of_a_group_are_within_the_budget():
    sizes = [1024] * 7
    want, needed = _needed(sizes)
    budget = _budget(needed, 0.6)

    model, values, peaks = _fit(sizes, memory_budget=budget)

    assert not model.memory_report.is_plain
    assert max(peaks[1:]) <= budget
    _assert_close(values, want)


def test_a_group_goes_on_when_a_larger_batch_needs_other_options():
    sizes = [128, 1024, 128, 512, 128, 1024, 64]
    want, needed = _needed(sizes)
    budget = _budget(needed, 0.6)

    model, values, _ = _fit(sizes, memory_budget=budget)

    # The first batch fits as it is, and the second one does not.
    assert model.memory_report.budget_bytes == budget
    _assert_close(values, want)
    # What was chosen serves a next `fit`, whose larger batch comes in time.
    _, _, peaks = _fit(sizes, model, memory_budget=budget)
    assert max(peaks) <= budget


# The layer that fails calls Python, which is not called to try the loss.
@pytest.mark.filterwarnings("ignore:Losses that compare the examples")
def test_a_group_goes_on_after_a_step_that_ran_out_of_memory():
    group = {"gradient_accumulation_steps": 3}
    want, _ = failing.trained([], **group)

    model, _ = failing.trained([1, 2], memory_budget="1GB", **group)

    assert len(model.memory_report.events) == 4
    for got, value in zip(model.variables, want.variables, strict=True):
        np.testing.assert_array_equal(got, value)
