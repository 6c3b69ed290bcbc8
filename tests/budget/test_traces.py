"""What was traced to choose for a model trains it, in one `fit` and the next.

A trace takes as long as many steps. A loss is called once in each of a step.
"""

import functools
import gc
import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.budget import planner
from kmem.budget import trial
from kmem.fit import pipeline

pytestmark = pytest.mark.usefixtures("native_library")

_ROWS, _WIDTH, _DEPTH = 1024, 64, 12
_LAYER_BYTES = _ROWS * _WIDTH * 4


class Counting(keras.losses.MeanSquaredError):
    num_calls = 0

    def call(self, y_true, y_pred):
        type(self).num_calls += 1
        return super().call(y_true, y_pred)


@pytest.fixture(name="traces")
def _traces(monkeypatch):
    """How often a step was traced since this was asked for."""
    monkeypatch.setenv("KMEM_CACHE", "0")
    Counting.num_calls = 0

    def traces():
        count, Counting.num_calls = Counting.num_calls, 0
        return count

    return traces


def _model():
    keras.utils.set_random_seed(0)
    blocks = [layers.Dense(_WIDTH, "tanh") for _ in range(_DEPTH)]
    model = keras.Sequential([keras.Input((4,)), *blocks, layers.Dense(1)])
    model.compile("adam", Counting())
    return kmem.wrap(model)


def _fit(model, rows=2 * _ROWS, callbacks=(), dtype="float32", **options):
    """Trains for an epoch; returns the peak, and the weights afterwards."""
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(dtype)
    data = {"batch_size": _ROWS, "shuffle": False, "callbacks": callbacks}
    with kmem.memory.track("CPU") as usage:
        model.fit(x, x[:, :1], **data, **options, verbose=0)
    return usage.peak_bytes, model.get_weights()


@functools.cache
def _needed_bytes():
    """What a plain step takes beside what is held."""
    peak, _ = _fit(_model())
    gc.collect()
    return peak - kmem.memory.current("CPU")


def _options(name):
    """An option under which a step has to keep less than a plain one."""
    needed = _needed_bytes()
    gc.collect()
    return {name: kmem.memory.current("CPU") + int(0.7 * needed)}


@functools.cache
def _plain_weights(num_fits):
    model = _model()
    for _ in range(num_fits):
        _, weights = _fit(model)
    return weights


@pytest.mark.parametrize("name", ["remat", "memory_budget", "what fits"])
# With a remainder Keras's graph knows no number of rows.
@pytest.mark.parametrize("rows", [2 * _ROWS, 2 * _ROWS - 8])
@pytest.mark.parametrize(
    "callbacks, dtype, count",
    [
        ([], "float32", 0),
        # As ids are: a search has to take some that there are.
        ([], "int32", 0),
        ([keras.callbacks.LambdaCallback()], "float32", 1),
    ],
)
def test_a_fit_trains_as_was_traced_for_its_choice(
    traces, monkeypatch, name, rows, callbacks, dtype, count
):
    module = importlib.import_module("kmem.model")
    choose = module._session

    def chosen(*arguments):
        session = choose(*arguments)
        # What comes after it is training.
        assert traces() > 0
        return session

    monkeypatch.setattr(module, "_session", chosen)
    # What is known of one model serves others.
    monkeypatch.setattr(planner, "_learned", {})
    monkeypatch.setattr(trial, "_measurements", {})
    model = _model()
    model.optimizer.build(model.trainable_variables)
    options: dict = {"remat": "auto"}
    if name == "memory_budget":
        options = {**_options(name), "microbatches": 1}
    elif name == "what fits":
        options = {"memory_budget": "1GB"}

    _fit(model, rows, callbacks, dtype, **options)

    assert traces() == count
    planned = model.memory_report and model.memory_report.chosen.plan
    assert (planned is None) == (name != "memory_budget")


class OfKnownRows(keras.Model):
    """Asks for the number of rows as Python has it."""

    def train_step(self, data):
        assert isinstance(data[0].shape[0], int)
        return super().train_step(data)


class Warming(keras.optimizers.schedules.LearningRateSchedule):
    """Has no configuration."""

    def __call__(self, step):
        return 0.1 * keras.ops.minimum(keras.ops.cast(step, "float32"), 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": "1GB"},
        {"remat": "auto"},
        {"remat": "auto", "mixed_precision": "float16"},
    ],
)
def test_a_step_of_known_rows_and_a_schedule_of_its_own_are_planned(options):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat(2)

    def weights(**options):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = OfKnownRows(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))
        model.compile(keras.optimizers.SGD(Warming()), "mse")
        kmem.wrap(model).fit(data, shuffle=False, verbose=0, **options)
        return model.get_weights()

    tolerance = 2e-3 if "mixed_precision" in options else 1e-6
    for got, want in zip(weights(**options), weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance)


def test_a_step_takes_no_more_than_was_predicted():
    """What the search has traced besides is let go of, and is not let go of
    while it measures."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((4,))
    for _ in range(12):
        x = layers.Dropout(0.1)(layers.Dense(4, "gelu")(x))
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    kmem.wrap(model)
    model.fit(x, x, batch_size=64, verbose=0)
    gc.collect()
    in_use = kmem.memory.current("CPU")
    with kmem.memory.track("CPU") as usage:
        model.fit(x, x, batch_size=64, verbose=0)
    budget = in_use + int(0.7 * (usage.peak_bytes - in_use))

    model.fit(x, x, batch_size=64, verbose=0, memory_budget=budget)

    chosen = model.memory_report.chosen
    assert not model.memory_report.events
    assert chosen.measured_peak_bytes <= chosen.predicted_peak_bytes


@pytest.mark.parametrize("option", ["remat", "memory_budget", "auto"])
def test_the_next_fit_traces_nothing(traces, option):
    model = _model()
    options = {"remat": "auto"} if option == "auto" else _options(option)

    _fit(model, **options)
    assert traces()
    in_use = []
    for _ in range(2):
        _, weights = _fit(model, **options)
        gc.collect()
        in_use.append(kmem.memory.current("CPU"))

    assert traces() == 0
    assert in_use[1] - in_use[0] < _LAYER_BYTES / 10
    for value, other in zip(weights, _plain_weights(3), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)


def test_a_plan_is_made_anew_when_memory_was_taken(traces):
    model = _model()
    model.optimizer.build(model.trainable_variables)
    options = _options("remat")
    before, _ = _fit(model, **options)
    traces()

    held = tf.ones([options["remat"] - before + _LAYER_BYTES // 4], tf.uint8)
    peak, _ = _fit(model, **options)

    assert traces()
    assert peak <= options["remat"]
    del held


def test_what_callbacks_may_change_is_traced_again():
    own = keras.callbacks.Callback()
    stopping = keras.callbacks.EarlyStopping()
    x = np.zeros((4, 1))
    for callbacks, may_change in [
        (None, False),
        (stopping, False),
        ([stopping, keras.callbacks.TerminateOnNaN()], False),
        ([stopping, own], True),
        (keras.callbacks.LambdaCallback(on_train_begin=print), True),
        (keras.callbacks.TensorBoard(), True),
        (keras.callbacks.CallbackList([]), True),
    ]:
        arguments = {"x": x, "callbacks": callbacks}
        assert pipeline.keeps_traces(arguments) is not may_change


class _Knowing(layers.Layer):
    """Takes 4 MB more where the number of rows is not known."""

    def call(self, x):
        if x.shape[0] is None:
            wide = tf.tile(x, [1, 2**20 // _WIDTH])
            return x + 0 * tf.reduce_mean(tf.sin(wide))
        return x


class _Peak(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.peaks = []

    def on_train_batch_begin(self, batch, logs=None):
        kmem.memory.reset_peak("CPU")

    def on_train_batch_end(self, batch, logs=None):
        self.peaks.append(kmem.memory.peak("CPU"))


@pytest.mark.parametrize("option", ["remat", "memory_budget"])
def test_a_budget_is_kept_beside_a_callback_of_ones_own(option):
    """It is traced anew, with what the graph knows of the batches."""
    keras.utils.set_random_seed(0)
    blocks = [layers.Dense(_WIDTH, "tanh") for _ in range(_DEPTH)]
    model = keras.Sequential([keras.Input((_WIDTH,)), *blocks, _Knowing()])
    model.compile("adam", "mse")
    x = np.ones((4, _WIDTH), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
    assert data.element_spec[0].shape[0] is None
    kmem.wrap(model)
    peak, quiet = _Peak(), {"shuffle": False, "verbose": 0}
    with pytest.raises(ValueError, match="must be at least") as caught:
        model.fit(data, callbacks=[peak], **quiet, **{option: "1KB"})

    budget = {option: caught.value.smallest_bytes}
    model.fit(data, epochs=2, callbacks=[peak], **quiet, **budget)

    assert max(peak.peaks) <= caught.value.smallest_bytes


def test_summaries_of_a_users_own_writer_are_written(tmp_path):
    class Writing(layers.Layer):
        def call(self, x):
            tf.summary.histogram("inputs", x, step=0)
            return x

    keras.utils.set_random_seed(0)
    blocks = [layers.Dense(_WIDTH, "tanh") for _ in range(_DEPTH)]
    model = keras.Sequential([keras.Input((4,)), Writing(), *blocks])
    model.compile("adam", "mse")
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        _fit(kmem.wrap(model), remat="auto")
    (path,) = tmp_path.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(path))
    written = [e for e in events if e.summary.value]
    assert len(written) >= 2
