"""Validation, `evaluate` and `predict` stay within a budget as well."""

import gc
import math

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from failing import Fails
from keras import layers

import kmem
from kmem.base.sizes import format_size
from kmem.budget.inference import BudgetedInference
from kmem.budget.inference_steps import InferenceSteps
from kmem.budget.inference_steps import some_rows
from kmem.budget.report import ImpossibleBudget

pytestmark = pytest.mark.usefixtures("native_library")

_ROWS = 24
_ARGUMENTS = {"batch_size": _ROWS, "verbose": 0}


def _model(*more):
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((32, 32, 4))
    for _ in range(3):
        x = layers.Conv2D(16, 3, padding="same", activation="tanh")(x)
    for layer in more:
        x = layer(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile("sgd", "mse", metrics=["mae"])
    return kmem.wrap(model)


@pytest.fixture(scope="module")
def data():
    """Two batches, and one that is smaller."""
    random = np.random.default_rng(0)
    rows = 2 * _ROWS + 5
    x = random.normal(size=(rows, 32, 32, 4)).astype("float32")
    weights = random.uniform(size=rows).astype("float32")
    return x, random.normal(size=(rows, 3)).astype("float32"), weights


@pytest.fixture(scope="module")
def plain(data):
    """What `evaluate` and `predict` give, and need besides the data."""
    x, y, weights = data
    model = _model(layers.BatchNormalization())
    logs = model.evaluate(
        x, y, sample_weight=weights, return_dict=True, **_ARGUMENTS
    )
    outputs = model.predict(x, **_ARGUMENTS)
    batch = tf.constant(x[:_ROWS]), tf.constant(y[:_ROWS])
    for _ in range(2):
        with kmem.memory.track() as usage:
            model.test_on_batch(*batch)
    return logs, outputs, usage.peak_bytes - usage.start_bytes


def _budget(needed, share, arrays):
    gc.collect()
    held = sum(array.nbytes for array in arrays)
    # The batches that the input pipeline has ready, and the one at hand.
    held += 5 * sum(array[:_ROWS].nbytes for array in arrays)
    return kmem.memory.current() + held + int(share * needed)


def _assert_same(got, expected, tolerance=1e-6):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=tolerance), name


def test_evaluate_and_predict_stay_within_a_budget(plain, data):
    expected, outputs, needed = plain
    x, y, weights = data
    model = _model(layers.BatchNormalization())
    before = [v.numpy() for v in model.variables]
    budget = _budget(needed, 0.4, data)

    with kmem.memory.track() as usage:
        logs = model.evaluate(
            *(x, y),
            sample_weight=weights,
            return_dict=True,
            memory_budget=budget,
            **_ARGUMENTS,
        )
        in_parts = model.predict(x, memory_budget=budget, **_ARGUMENTS)

    assert usage.peak_bytes <= budget
    _assert_same(logs, expected)
    np.testing.assert_array_equal(in_parts, outputs)
    assert isinstance(in_parts, np.ndarray)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    # Without a budget they are Keras's again.
    assert model.predict_function is None
    again = model.evaluate(
        x, y, sample_weight=weights, return_dict=True, **_ARGUMENTS
    )
    assert again == expected


def test_what_fits_is_not_split_and_gives_the_same_bits(plain, data):
    expected, outputs, _ = plain
    x, y, weights = data
    model = _model(layers.BatchNormalization())
    model.memory_options = kmem.MemoryOptions(memory_budget="2GB")

    logs = model.evaluate(
        x, y, sample_weight=weights, return_dict=True, **_ARGUMENTS
    )

    assert logs == expected
    np.testing.assert_array_equal(model.predict(x, **_ARGUMENTS), outputs)


@pytest.mark.early
def test_a_fit_stays_within_a_limit_with_its_validation(plain, data):
    _, _, needed = plain
    x, y, _ = data
    arguments = {"epochs": 2, "shuffle": False, **_ARGUMENTS, "batch_size": 4}
    validation = {"validation_data": (x, y), "validation_batch_size": _ROWS}
    expected = _model().fit(x[:8], y[:8], **arguments, **validation).history
    model = _model()
    # What others have left would make room if it were freed later.
    gc.collect()
    # So little that plain Keras has no room, though the pipeline is behind
    # and holds one batch where the budget counts five.
    limit = _budget(needed, 0.25, [x, y])
    kmem.memory.limit(limit, "CPU")
    try:
        with pytest.raises(tf.errors.ResourceExhaustedError):
            _model().fit(x[:8], y[:8], **arguments, **validation)
        gc.collect()
        with kmem.memory.track() as usage:
            history = model.fit(
                *(x[:8], y[:8]),
                **(arguments | validation | {"memory_budget": limit}),
            ).history
    finally:
        kmem.memory.limit(None, "CPU")

    assert usage.peak_bytes <= limit
    # Training was not split, and does as it did.
    assert model.memory_report.chosen.options == kmem.MemoryOptions()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, 1e-6)


def test_a_budget_that_no_example_fits_in_is_refused_before_training(data):
    x, y, _ = data
    model = _model()

    with pytest.raises(ValueError, match="must be at least") as raised:
        model.evaluate(x, y, memory_budget=1000, **_ARGUMENTS)

    smallest = raised.value.smallest_bytes
    assert format_size(smallest) in str(raised.value)
    # What the error's frames hold.
    del raised
    gc.collect()
    with kmem.memory.track() as usage:
        model.evaluate(x, y, memory_budget=smallest, **_ARGUMENTS)
    assert usage.peak_bytes <= smallest


class _Centred(layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def test_what_depends_on_other_examples_is_refused_if_it_does_not_fit(
    plain, data
):
    x, y, _ = data
    model = _model(_Centred())
    before = [v.numpy() for v in model.variables]

    def fit(budget):
        return model.fit(
            *(x[:8], y[:8]),
            validation_data=(x, y),
            validation_batch_size=_ROWS,
            memory_budget=budget,
            **(_ARGUMENTS | {"batch_size": 4}),
        )

    match = "depend on the other examples"
    with pytest.raises(ImpossibleBudget, match=match) as raised:
        # Before it trains.
        fit(_budget(plain[2], 0.5, [x, y]))

    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    smallest = raised.value.smallest_bytes
    del raised
    gc.collect()
    fit(smallest)
    model.evaluate(x, y, memory_budget="2GB", **_ARGUMENTS)


class _NoneOfOne(layers.Layer):
    """Gives no numbers of a single example."""

    def call(self, x):
        others = keras.ops.cast(keras.ops.shape(x)[0] - 1, x.dtype)
        return x * (others / others)


def _steps(model):
    steps = {"test": model.test_step, "predict": model.predict_step}
    return InferenceSteps(model, steps)


def _logs(model, steps, arguments, count):
    """The metrics of batches, the last of which is smaller."""
    data = [arguments.get(name) for name in ("x", "y", "sample_weight")]
    for metric in model.metrics:
        metric.reset_state()
    for start in range(0, cases.NUM_ROWS, 20):
        batch = keras.utils.pack_x_y_sample_weight(*data)
        batch = some_rows(batch, start, 20)
        batch = keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.constant(leaf), batch
        )
        logs, message = steps.take("test", batch, count)
        assert not message
    return {name: float(value) for name, value in logs.items()}


_IN_MODES = [(name, {}) for name in cases.ALL] + [
    ("sample_weight", {"run_eagerly": True}),
    ("sample_weight", {"jit_compile": True}),
    ("several_outputs", {"steps_per_execution": 2}),
]
_EVALUATED = (
    *("sample_weight", "several_outputs", "two_losses", "penalties"),
    *("masked_regularized", "own_compute_loss", "several_inputs"),
)


@pytest.mark.parametrize(
    ("name", "mode"), [case for case in _IN_MODES if case[0] in _EVALUATED]
)
def test_losses_and_metrics_in_parts_are_those_of_whole_batches(name, mode):
    keras.utils.set_random_seed(0)
    model, arguments = cases.ALL[name]()
    for attribute, value in mode.items():
        setattr(model, attribute, value)
    steps = _steps(model)

    whole, in_parts = (_logs(model, steps, arguments, n) for n in (1, 3))

    _assert_same(in_parts, whole)


class SumsErrors(keras.Model):
    def test_step(self, data):
        x, y = data
        return {"error": tf.reduce_sum((self(x, training=False) - y) ** 2)}


class MeanError(keras.Model):
    def test_step(self, data):
        x, y = data
        return {"error": tf.reduce_mean((self(x, training=False) - y) ** 2)}

    def predict_step(self, data):
        return tf.reduce_mean(super().predict_step(data), 0, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "model_type", "layer", "message"),
    [
        ("test", keras.Model, layers.Activation("tanh"), ""),
        ("test", MeanError, layers.Activation("tanh"), ""),
        ("test", SumsErrors, layers.Activation("tanh"), "results/error became"),
        ("test", keras.Model, _Centred(), "became another by"),
        ("predict", keras.Model, layers.Activation("tanh"), ""),
        ("predict", keras.Model, _Centred(), "results became another by"),
        ("predict", MeanError, layers.Activation("tanh"), "became (2, 3)"),
        ("predict", keras.Model, _NoneOfOne(), "results became another by nan"),
    ],
)
def test_it_is_told_whether_parts_give_what_a_whole_batch_does(
    kind, model_type, layer, message
):
    inputs = keras.Input((5,))
    model = model_type(inputs, layers.Dense(3)(layer(inputs)))
    model.compile("sgd", "mse")
    x, y = (tf.constant(a[:3]) for a in cases.regression().values())

    text = _steps(model).difference(kind, (x, y) if kind == "test" else (x,))

    assert message in text if message else not text


class _Counts(layers.Layer):
    num_calls = 0

    def call(self, x):
        self.num_calls += 1
        return x


def test_texts_of_all_lengths_have_two_traces_as_in_keras():
    counts = _Counts()
    inputs = keras.Input((None, 4))
    pooled = layers.GlobalAveragePooling1D()(counts(inputs))
    model = kmem.wrap(keras.Model(inputs, pooled))

    def predict(length):
        x = np.ones((6, length, 4), "float32")
        budget = {"memory_budget": "1GB", "batch_size": 3, "verbose": 0}
        np.testing.assert_array_equal(model.predict(x, **budget), x[:, 0])

    predict(5)
    predict(4)
    num_calls = counts.num_calls
    for length in (3, 2, 1):
        predict(length)

    assert counts.num_calls == num_calls


def test_that_a_step_cannot_be_split_is_told_once(monkeypatch):
    """Of one that needs more than was measured."""
    monkeypatch.setattr(InferenceSteps, "needed_bytes", lambda *given: -(10**6))
    model = keras.Sequential([keras.Input((5,)), _Centred()])
    lines = []
    gc.collect()
    x = tf.ones((64, 5))
    options = kmem.MemoryOptions(memory_budget=kmem.memory.current())
    steps = {"predict": model.predict_step}
    inference = BudgetedInference(model, options, steps, lines.append)

    for _ in range(3):
        inference.predict([(x,)])

    needed, refused = lines
    assert "needed" in needed and "cannot be split" in refused


def test_a_step_that_runs_out_of_memory_is_taken_again_in_parts():
    keras.utils.set_random_seed(0)
    fails = Fails()
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(3)(fails(inputs)))
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = cases.regression().values()
    expected = kmem.wrap(model).evaluate(x, y, 20, 0, return_dict=True)

    class Tells(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            fails.fails = batch == 1

    logs = model.evaluate(
        *(x, y, 20, 0),
        return_dict=True,
        callbacks=[Tells()],
        memory_budget="2GB",
    )

    _assert_same(logs, expected)
    assert not fails.fails


@pytest.mark.parametrize("fixed", [0, 10_000])
@pytest.mark.parametrize("rows", [1, 7, 24, 100])
@pytest.mark.parametrize("fits", [1, 2, 5, 23, 99])
def test_there_are_the_fewest_parts_that_fit(monkeypatch, rows, fits, fixed):
    """On computed bytes, which are a line, and with few of them computed."""
    each, measured = 100_000, []

    def needed_bytes(steps, kind, batch, size, count):
        measured.append(size)
        return fixed + each * -(-size // count)

    monkeypatch.setattr(InferenceSteps, "needed_bytes", needed_bytes)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    batch = (tf.TensorSpec((rows, 2)),)
    whole = 8 * rows
    gc.collect()
    budget = kmem.memory.current() + fixed + each * fits + whole + 50_000
    # Some is left free.
    options = kmem.MemoryOptions(memory_budget=int(budget / 0.99))
    lines = []
    steps = {"predict": model.predict_step}
    inference = BudgetedInference(model, options, steps, lines.append)

    inference.prepare("predict", batch, None, 0)

    count = math.ceil(rows / min(fits, rows))
    assert len(measured) <= 7
    assert len(lines) == (count > 1)
    if lines:
        assert f" in {count} parts of {math.ceil(rows / count)}" in lines[0]


def test_a_state_for_each_example_is_refused():
    model = keras.Sequential(
        [keras.Input((3, 2), batch_size=4), layers.LSTM(2, stateful=True)]
    )
    model.compile("sgd", "mse")
    x = np.zeros((4, 3, 2))

    with pytest.raises(ValueError, match="with stateful=True"):
        kmem.wrap(model).predict(x, batch_size=4, memory_budget="1GB")


class _Rows(layers.Layer):
    """For batches of eight examples alone."""

    def call(self, x):
        return keras.ops.reshape(x, (8, 4))


def test_a_step_for_batches_of_one_size_is_taken_whole():
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")

    def logs(**options):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(4)(_Rows()(inputs)))
        model.compile("sgd", "mse")
        fit = {"batch_size": 8, "validation_data": (x, x), "verbose": 0}
        return kmem.wrap(model).fit(x, x, **fit, **options).history

    assert logs(memory_budget="1GB") == logs()


class NamesOne(keras.Model):
    """Leaves the compiled metrics to Keras."""

    @property
    def metrics(self):
        return super().metrics[:1]


def test_metrics_that_a_model_does_not_name_are_the_same():
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")

    def logs(**options):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = NamesOne(inputs, layers.Dense(4)(inputs))
        model.compile("sgd", "mse", metrics=["mae"])
        fit = {"batch_size": 8, "validation_data": (x, x), "verbose": 0}
        return kmem.wrap(model).fit(x, x, **fit, **options).history

    assert logs(memory_budget="1GB") == logs()
