"""`memory_budget`: options are chosen with which the step fits, and it is
undone if it does not fit after all."""

import functools
import gc

import failing
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from peaks import peaks_bytes

import kmem
from kmem.budget import dry_run
from kmem.budget.report import describe
from kmem.fit import undoing
from kmem.step import batches

pytestmark = pytest.mark.usefixtures("native_library")

# So that there are few numbers of micro-batches to try.
_ROWS = 8


def _model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64, 64, 4))
    x = inputs
    for _ in range(7):
        x = layers.Conv2D(16, 3, padding="same", activation="tanh")(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return kmem.wrap(model)


def _data(rows=2 * _ROWS):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 64, 64, 4)).astype("float32")
    return x, random.normal(size=(rows, 3)).astype("float32")


class _Peaks(keras.callbacks.Callback):
    """The device's peak in each step of `fit`."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_begin(self, batch, logs=None):
        self._track = kmem.memory.track()
        self._usage = self._track.__enter__()

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(self._usage.peak_bytes)
        self._track.__exit__(None, None, None)


def _fit(model, callbacks=(), data=None, **options):
    peaks = _Peaks()
    x, y = data or _data()
    history = model.fit(
        x,
        y,
        batch_size=_ROWS,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[peaks, *callbacks],
        **options,
    )
    return history.history["loss"], peaks.found


def _weights(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def _assert_close(model, other, tolerance=1e-5):
    for got, expected in zip(_weights(model), _weights(other), strict=True):
        np.testing.assert_allclose(got, expected, tolerance, tolerance)


@pytest.fixture(scope="module")
def plain():
    """A model that was trained without a budget, and what its steps took of
    the memory that earlier tests have left."""
    model = _model()
    before = kmem.memory.current()
    _, peaks = _fit(model)
    return model, max(peaks) - before


def _budget(needed, share):
    gc.collect()
    return kmem.memory.current() + int(share * needed)


def test_nothing_is_changed_when_a_step_fits_as_it_is(plain):
    expected, needed = plain
    model = _model()
    budget = _budget(needed, 2)

    _, peaks = _fit(model, memory_budget=budget)

    report = model.memory_report
    assert report.chosen.options == kmem.MemoryOptions()
    assert report.plain.options == kmem.MemoryOptions()
    assert max(peaks) <= budget
    for got, value in zip(_weights(model), _weights(expected), strict=True):
        np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("option", [{"memory_budget": "1GB"}, {"remat": 1.0}])
@pytest.mark.parametrize("is_dataset", [False, True])
def test_an_optional_input_may_be_absent(is_dataset, option):
    class Adds(layers.Layer):
        def call(self, x, more=None):
            return x if more is None else x + more

    def trained(**options):
        keras.utils.set_random_seed(0)
        x = keras.Input((2,), name="x")
        more = keras.Input((2,), name="more", optional=True)
        outputs = layers.Dense(1)(Adds()(x, more))
        model = keras.Model({"x": x, "more": more}, outputs)
        model.compile("adam", "mse")
        data = {"x": np.ones((4, 2), "float32"), "more": None}, np.ones((4, 1))
        if is_dataset:
            data = (tf.data.Dataset.from_tensors(data),)
        kmem.wrap(model).fit(*data, shuffle=False, verbose=0, **options)
        return model

    model, expected = trained(**option), trained()
    for got, value in zip(_weights(model), _weights(expected), strict=True):
        np.testing.assert_array_equal(got, value)


class _Batches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)


@pytest.mark.parametrize("unrolled", [1, 8])
def test_the_data_may_end_within_an_execution(unrolled):
    def trained(**options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3)
        model.unrolled_steps_per_execution = unrolled
        seen = _Batches()
        arguments = {"batch_size": 16, "epochs": 2, "shuffle": False}
        history = kmem.wrap(model).fit(
            *(np.ones((100, 4)), np.ones((100, 1))),
            **(arguments | {"callbacks": [seen], "verbose": 0} | options),
        )
        return seen.begun, seen.ended, history.history, model.get_weights()

    *seen, logs, weights = trained(memory_budget="8GB")
    *seen_plainly, logs_plainly, weights_plainly = trained()

    assert seen == seen_plainly == [2 * [0, 3, 6], 2 * [2, 5, 8]]
    assert logs == logs_plainly
    np.testing.assert_array_equal(weights[0], weights_plainly[0])


class _Sum(layers.Layer):
    def call(self, x, other=None):
        return x if other is None else x + other


@pytest.mark.parametrize("option", ["memory_budget", "remat"])
def test_an_optional_input_of_a_generator_may_be_none(option):
    def generate():
        for _ in range(3):
            yield {"x": np.ones((2, 2), "float32"), "o": None}, np.ones((2, 2))

    def trained(**options):
        keras.utils.set_random_seed(0)
        x = keras.Input((2,), name="x")
        other = keras.Input((2,), name="o", optional=True)
        outputs = layers.Dense(2)(_Sum()(x, other))
        model = kmem.wrap(keras.Model({"x": x, "o": other}, outputs))
        model.compile("sgd", "mse")
        arguments = {"steps_per_epoch": 2, "shuffle": False, "verbose": 0}
        model.fit(generate(), **arguments, **options)
        return model.get_weights()

    got, expected = trained(**{option: "8GB"}), trained()

    np.testing.assert_array_equal(got[0], expected[0])


@pytest.mark.parametrize(
    "share", [pytest.param(0.7, marks=pytest.mark.exhaustive), 0.4]
)
def test_a_budget_is_kept_with_the_same_numbers(plain, share):
    expected, needed = plain
    model = _model()
    budget = _budget(needed, share)

    _, peaks = _fit(model, memory_budget=budget)

    report = model.memory_report
    assert report.chosen.options.microbatches or report.chosen.options.remat
    assert report.plain.predicted_peak_bytes > budget
    assert max(peaks) <= budget
    assert report.chosen.measured_peak_bytes <= budget
    assert not report.events
    _assert_close(model, expected)


@pytest.mark.exhaustive
def test_larger_parts_are_planned_for_where_single_rows_fit():
    hidden = [layers.Dense(64, "tanh") for _ in range(16)]
    model = keras.Sequential([keras.Input((256, 16)), *hidden])
    model.compile("sgd", "mse")
    data = np.zeros((4, 256, 16), "float32"), np.zeros((4, 256, 64), "float32")

    tried = _tried_with_the_room_of(4, model, data)

    assert {(4, False), (2, True)} <= tried


def _tried_with_the_room_of(count, model, data):
    """What is looked at for the budget that a number of parts keeps: numbers
    of parts, each with whether there is a plan."""
    model = kmem.wrap(model)
    model.memory_options = kmem.MemoryOptions(microbatches=count)
    for _ in range(3):
        with kmem.memory.track() as usage:
            model.train_on_batch(*data)
    budget = _budget(usage.peak_bytes - usage.start_bytes, 1.2)

    model.memory_options = kmem.MemoryOptions(memory_budget=budget)
    model.train_on_batch(*data)

    report = model.memory_report
    options = [c.options for c in (report.chosen, *report.alternatives)]
    counts = [o.microbatches.count if o.microbatches else 1 for o in options]
    return {(n, bool(o.remat)) for n, o in zip(counts, options, strict=True)}


class CountsTraces(keras.Sequential):
    """A class of its own, whose step is Keras's."""

    traces = 0

    def compute_loss(self, *args, **kwargs):
        CountsTraces.traces += 1
        return super().compute_loss(*args, **kwargs)


def _normalizing(layer):
    """A model in which a layer depends on the examples that it sees
    together."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((64, 64, 4))
    for number in range(6):
        x = layers.Conv2D(16, 3, padding="same", activation="tanh")(x)
        if number == 2:
            x = layer(x)
    outputs = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return kmem.wrap(model)


@pytest.mark.parametrize("layer", [layers.BatchNormalization, layers.Dropout])
def test_what_changes_no_number_is_chosen_first(plain, layer):
    _, needed = plain
    arguments = (0.1,) if layer is layers.Dropout else ()
    expected, model = (_normalizing(layer(*arguments)) for _ in range(2))
    _fit(expected)
    budget = _budget(needed, 0.75)

    _, peaks = _fit(model, memory_budget=budget)

    assert model.memory_report.chosen.options.remat is not None
    assert model.memory_report.chosen.options.microbatches is None
    assert max(peaks) <= budget
    _assert_close(model, expected)


def test_where_numbers_must_change_there_are_the_fewest_micro_batches(plain):
    _, needed = plain
    model = _normalizing(layers.BatchNormalization(name="norm"))
    budget = _budget(needed, 0.45)

    with pytest.warns(UserWarning, match="one micro-batch at a time"):
        _, peaks = _fit(model, memory_budget=budget)

    chosen = model.memory_report.chosen
    assert chosen.options.num_parts in (2, 4)
    assert max(peaks) <= budget


@pytest.mark.filterwarnings("ignore:Layers whose state can depend")
def test_time_decides_what_changes_statistics_only_if_that_is_allowed(plain):
    _, needed = plain
    model = _normalizing(layers.BatchNormalization())

    _fit(
        model,
        memory_budget=_budget(needed, 0.7),
        allow="batch_statistics",
    )

    report = model.memory_report
    tried = [report.chosen, *report.alternatives]
    assert any(choice.options.microbatches for choice in tried)


def test_a_search_takes_few_traces_however_large_the_batch(monkeypatch):
    """They are counted with what is traced to plan, and to train."""
    runs = []
    measured = dry_run.measured

    def counted(*args):
        runs.append(1)
        return measured(*args)

    monkeypatch.setattr(dry_run, "measured", counted)
    timed = dry_run.timed

    def second(*args):
        """On a busy machine a step looks slow by chance: others are tried."""
        timed(*args)
        return 1.0

    monkeypatch.setattr(dry_run, "timed", second)

    def search(rows):
        keras.utils.set_random_seed(0)
        blocks = [layers.Dense(64, "tanh") for _ in range(8)]
        last = layers.Dense(1)
        model = CountsTraces([keras.Input((256, 16)), *blocks, last])
        model.compile("sgd", "mse")
        model = kmem.wrap(model)
        data = tf.zeros((rows, 256, 16)), tf.zeros((rows, 256, 1))
        model.memory_options = kmem.MemoryOptions()
        needed = max(peaks_bytes(model.train_on_batch, *data))
        before = CountsTraces.traces
        budget = kmem.memory.current() + int(0.4 * needed)
        model.memory_options = kmem.MemoryOptions(memory_budget=budget)
        runs.clear()
        model.train_on_batch(*data)
        return CountsTraces.traces - before, len(runs)

    small, large, again = map(search, (16, 64, 64))

    assert small[0] <= 16
    assert large[0] <= 16
    # What was measured serves models of the same structure.
    assert again[1] < large[1]


def test_an_impossible_budget_names_the_smallest_that_would_do(plain):
    _, needed = plain
    model = _model()
    before = [v.numpy() for v in model.variables]

    gc.collect()
    with pytest.raises(ValueError, match="must be at least") as raised:
        _fit(model, memory_budget=kmem.memory.current() + 1000)

    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    smallest = raised.value.smallest_bytes
    assert kmem.memory.current() < smallest < _budget(needed, 0.5)
    assert describe(raised.value.options) in str(raised.value)
    # What is in the way: a convolution's activation for each example.
    size = -(-_ROWS // raised.value.options.num_parts)
    shapes = {t.shape for t in raised.value.tensors if "conv2d" in t.layer}
    assert (size, 64, 64, 16) in shapes
    assert str(raised.value.tensors[0]) in str(raised.value)
    _, peaks = _fit(model, memory_budget=smallest)
    assert max(peaks) <= smallest
    # It is right within 3 %.
    with pytest.raises(ValueError, match="must be at least"):
        _fit(_model(), memory_budget=int(0.97 * smallest))


@pytest.mark.parametrize("budget", ["1KB", 1000, 1e-9])
def test_an_impossible_budget_is_repeated_as_it_was_written(budget):
    model = _model()
    num_bytes = 1000 if budget != 1e-9 else int(1e-9 * kmem.memory.capacity())

    with pytest.raises(ValueError) as raised:
        _fit(model, memory_budget=budget)

    received = f"Received: memory_budget={budget!r} ("
    assert received in str(raised.value)
    assert str(num_bytes) in str(raised.value)


def test_layers_that_see_one_part_at_a_time_are_named_once():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    x = layers.BatchNormalization(name="norm")(inputs)
    for _ in range(3):
        x = layers.Dense(256, "tanh")(x)
    model = keras.Model(inputs, layers.Dense(16)(x))
    model.compile("sgd", "mse")
    data = np.ones((4096, 16), "float32")

    with pytest.warns(UserWarning) as warned:
        kmem.wrap(model).fit(
            *(data, data, 2048),
            epochs=2,
            verbose=0,
            memory_budget=kmem.memory.current() + 6 * 10**6,
        )

    texts = [str(each.message) for each in warned]
    (text,) = [text for text in texts if "one micro-batch at a time" in text]
    assert "norm (BatchNormalization)" in text
    report = model.memory_report
    assert report.chosen.options.num_parts > 1
    assert report.layers_that_see_parts == ("norm",)
    assert "one micro-batch at a time is seen by norm" in report.summary()


@pytest.mark.parametrize("options", [{}, {"sharding": "full"}], ids=str)
def test_the_logs_of_several_outputs_are_those_of_keras(options):
    def history(**options):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,))
        outputs = [
            layers.Dense(size, name=name)(inputs)
            for name, size in (("a", 3), ("b", 1))
        ]
        model = keras.Model(inputs, outputs)
        model.compile("sgd", ["mse", "mae"])
        x = np.random.default_rng(0).normal(size=(28, 5)).astype("float32")
        y = [x[:, :3], x[:, :1]]
        arguments = {"shuffle": False, "verbose": 0, "epochs": 2}
        model = kmem.wrap(model)
        # The last batch is smaller, by which Keras does not weigh these.
        return model.fit(x, y, 20, **arguments, **options).history

    expected, got = history(), history(memory_budget="8GB", **options)
    assert expected.keys() == got.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, 1e-5)


def _recurrent():
    """A model whose one large layer gains nothing by a plan, and a batch that
    is on the device."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((24, 32))
    model = keras.Model(inputs, layers.Dense(3)(layers.LSTM(160)(inputs)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    shapes = [(16, 24, 32), (16, 3)]
    return kmem.wrap(model), [tf.zeros(shape) + 1 for shape in shapes]


def test_the_smallest_budget_that_an_error_names_is_enough():
    model, (x, y) = _recurrent()
    fit = {"batch_size": len(x), "shuffle": False, "verbose": 0}
    with pytest.raises(ValueError, match="must be at least") as raised:
        model.fit(x, y, **fit, memory_budget=1)
    smallest = raised.value.smallest_bytes

    model.fit(x, y, **fit, epochs=3, memory_budget=smallest)

    report = model.memory_report
    assert report.chosen.options.num_parts > 1
    assert report.chosen.measured_peak_bytes <= smallest
    assert not report.events


def _of_weights(xla=False):
    """A model that needs more for a sum of gradients than for activations."""
    inputs = keras.Input((16,))
    x = layers.Dense(256, "tanh")(inputs)
    for _ in range(3):
        x = layers.Dense(256, "tanh")(x)
    model = kmem.wrap(keras.Model(inputs, layers.Dense(1)(x)))
    model.compile("sgd", "mse", jit_compile=xla)
    return model, (np.ones((16, 16), "float32"), np.ones((16, 1), "float32"))


# Beside what is in use a group of batches has a sum of gradients, too.
@pytest.mark.parametrize(
    "group, share", [({}, 0.5), ({"gradient_accumulation_steps": 2}, 0.9)]
)
def test_a_model_of_weights_recomputes_a_whole_batch(group, share):
    """Micro-batches need more than that: a further sum of gradients."""
    model, data = _of_weights()
    before = kmem.memory.current()
    _, peaks = _fit(model, data=data, **group)
    needed = max(peaks) - before
    model, data = _of_weights()
    with pytest.raises(ValueError, match="must be at least") as refused:
        _fit(model, data=data, memory_budget=_budget(needed, share), **group)
    assert refused.value.options.num_parts == 1
    budget = refused.value.smallest_bytes

    _, peaks = _fit(model, data=data, memory_budget=budget, **group)

    assert max(peaks) <= budget <= 1.05 * max(peaks)


@pytest.mark.filterwarnings("ignore:XLA compiled something")
def test_micro_batches_in_xla_are_tried_with_the_sum_of_their_gradients():
    """XLA has no loop, and no such sum, for two of them."""
    model, data = _of_weights(xla=True)
    weights = sum(v.numpy().nbytes for v in model.trainable_variables)
    budget = _budget(weights, 0.5)

    with pytest.raises(ValueError, match="must be at least") as refused:
        _fit(model, data=data, microbatches=8, memory_budget=budget)

    assert refused.value.smallest_bytes > budget + weights // 2


def test_a_batch_that_is_on_the_device_is_counted_once():
    # What runs beside a recurrent layer's loop depends on threads.
    model = kmem.wrap(keras.Sequential([layers.Dense(16), layers.Dense(3)]))
    model.compile("sgd", "mse")
    large = [tf.zeros((512, 768)) + 1, tf.zeros((512, 3)) + 1]
    model.memory_options = kmem.MemoryOptions(memory_budget="2GB")

    for _ in range(3):
        model.train_on_batch(*large)

    chosen = model.memory_report.chosen
    more = chosen.predicted_peak_bytes - chosen.measured_peak_bytes
    assert abs(more) < 0.5 * batches.num_bytes(large)


def _normalized_recurrent():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((24, 8))
    for _ in range(4):
        x = layers.LSTM(32, return_sequences=True)(x)
        x = layers.BatchNormalization()(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse")
    return kmem.wrap(model)


def test_recurrent_layers_run_again_before_a_batch_is_split():
    """A loop keeps what its iterations make in lists."""
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 24, 8)).astype("float32")
    fit = {"batch_size": 32, "shuffle": False, "verbose": 0}
    plain, peaks = _normalized_recurrent(), _Peaks()
    before = kmem.memory.current()
    plain.fit(x, x[..., :1], epochs=2, callbacks=[peaks], **fit)
    model = _normalized_recurrent()
    budget = _budget(max(peaks.found) - before, 0.7)

    model.fit(x, x[..., :1], epochs=2, memory_budget=budget, **fit)

    report = model.memory_report
    assert report.chosen.options.num_parts == 1
    assert report.chosen.measured_peak_bytes <= budget
    _assert_close(model, plain)


class StepsItself(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = [layers.Dense(256, "tanh") for _ in range(6)]

    def call(self, x):
        for layer in self.block:
            x = layer(x)
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_what_a_step_of_its_own_updates_is_in_memory_before_it():
    """A trace makes Adam's moments, which begin in the same zeros."""
    gc.collect()
    before = kmem.memory.current()
    model = kmem.wrap(StepsItself())
    model.compile("adam")
    x = np.ones((8, 256), "float32")

    model.fit(x, x, verbose=0, memory_budget="2GB")

    state = batches.num_bytes([*model.variables, *model.optimizer.variables])
    assert model.memory_report.in_use_bytes - before > 0.9 * state


class _Evaluates(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.loss = self.model.evaluate(*_data(), _ROWS, verbose=0)


def _evaluated(*callbacks, **options):
    evaluates = _Evaluates()
    _fit(_model(), [*callbacks, evaluates], **options)
    return evaluates.loss


@functools.cache
def _evaluated_plainly():
    return _evaluated()


@functools.cache
def _evaluated_with_a_callback_that_chooses():
    return _evaluated(kmem.callbacks.MemoryOptions(memory_budget="2GB"))


@pytest.mark.parametrize(
    "options", [{}, {"sharding": kmem.Sharding(cpu_offload=True)}]
)
def test_a_callback_may_evaluate_before_the_first_batch(options):
    given = _evaluated(memory_budget="2GB", **options)

    added = _evaluated_with_a_callback_that_chooses()
    assert given == added == _evaluated_plainly()


class _Before(keras.callbacks.Callback):
    """Does something before a step, and holds what that gives."""

    def __init__(self, step, do):
        super().__init__()
        self._step = step
        self._do = do

    def on_train_batch_begin(self, batch, logs=None):
        if self._step == 0:
            self._held = self._do()
        self._step -= 1


@pytest.mark.exhaustive
def test_steps_take_less_when_something_else_takes_memory(plain):
    expected, needed = plain
    model = _model()
    budget = _budget(needed, 0.9)
    other = _Before(1, lambda: tf.zeros([int(0.45 * needed) // 4]) + 1)

    _, peaks = _fit(model, [other], memory_budget=budget)

    assert "needed" in model.memory_report.events[0]
    assert peaks[1] > budget >= max(peaks[2:])
    _assert_close(model, expected)


def test_a_step_that_ran_out_of_memory_is_taken_again_in_another_way(plain):
    expected, needed = plain
    model = _model()
    limit = _budget(needed, 0.7)
    budget = _budget(needed, 2)

    smaller = _Before(2, lambda: kmem.memory.limit(limit, device="CPU"))

    _, peaks = _fit(model, [smaller], memory_budget=budget)

    events = model.memory_report.events
    assert len(events) >= 2
    assert all("ran out of memory" in event for event in events)
    assert peaks[-1] <= limit
    assert model.optimizer.iterations == 4
    _assert_close(model, expected)


def test_a_step_that_failed_for_a_moment_is_taken_again_as_it_was():
    model, history = failing.trained([0, 2, 3], memory_budget="1GB")
    expected, expected_history = failing.trained([])

    assert len(model.memory_report.events) == 6
    assert history == expected_history
    for got, value in zip(_weights(model), _weights(expected), strict=True):
        np.testing.assert_array_equal(got, value)


class _Squeezes(keras.callbacks.Callback):
    """Leaves each step a random part of the memory that it needs, until it is
    undone or done."""

    def __init__(self, monkeypatch):
        super().__init__()
        self._random = np.random.default_rng(0)
        self._needed = 0
        squeezes = self

        class State(undoing.State):
            def __init__(self, variables, metrics):
                super().__init__(variables, metrics)
                squeezes.begin()

            def restore(self):
                kmem.memory.limit(None, device="CPU")
                super().restore()

        monkeypatch.setattr(undoing, "State", State)
        self._fails = True

    def begin(self):
        if self._needed and self._fails:
            room = int(self._random.uniform(0.05, 0.8) * self._needed)
            limit = kmem.memory.current() + room
            kmem.memory.limit(limit, device="CPU")
        # Not the second attempt.
        self._fails = not self._fails

    def on_train_batch_end(self, batch, logs=None):
        kmem.memory.limit(None, device="CPU")
        self._fails = True
        report = self.model.memory_report
        self._needed = report.chosen.measured_peak_bytes - report.in_use_bytes


@pytest.mark.exhaustive
def test_steps_that_fail_at_random_allocations_leave_no_trace(monkeypatch):
    def trained(callbacks, **options):
        keras.utils.set_random_seed(0)
        dense = [layers.Dense(64, activation="tanh") for _ in range(3)]
        model = keras.Sequential(
            [
                keras.Input((32,)),
                *dense,
                layers.BatchNormalization(),
                layers.Dropout(0.5),
                layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
        x = np.random.default_rng(0).normal(size=(64 * 75, 32))
        # Nothing is made ready beside a step, which could fail as well.
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(64)
        history = kmem.wrap(model).fit(
            data,
            shuffle=False,
            epochs=4,
            verbose=0,
            callbacks=callbacks,
            **options,
        )
        return model, history.history

    expected, expected_history = trained([])
    squeezes = _Squeezes(monkeypatch)
    model, history = trained([squeezes], memory_budget="1GB")

    assert len(model.memory_report.events) >= 200
    assert history == expected_history
    for got, value in zip(_weights(model), _weights(expected), strict=True):
        np.testing.assert_array_equal(got, value)


@pytest.mark.exhaustive
def test_a_callback_chooses_when_the_first_batch_comes(plain):
    expected, needed = plain
    model = _model()
    memory = kmem.callbacks.MemoryOptions(memory_budget=_budget(needed, 0.8))
    train_function = model.train_function

    _, peaks = _fit(model, [memory])

    chosen = model.memory_report.chosen.options
    assert chosen.microbatches or chosen.remat
    assert max(peaks[1:]) <= memory.options.memory_budget
    assert model.train_function is not train_function
    _assert_close(model, expected)


@pytest.mark.exhaustive
def test_longer_batches_are_chosen_for_and_shorter_ones_are_not():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None, 8))
    x = inputs
    for _ in range(4):
        x = layers.Dense(64, activation="tanh")(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = kmem.wrap(keras.Model(inputs, layers.Dense(1)(x)))
    model.compile("sgd", "mse")
    lengths = [64, 32, 128, 16]
    batches = [
        (tf.ones((16, length, 8)), tf.ones((16, 1))) for length in lengths
    ]
    spec = (tf.TensorSpec([16, None, 8]), tf.TensorSpec([16, 1]))
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=spec
    ).apply(tf.data.experimental.assert_cardinality(len(batches)))
    reports = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            reports.append(model.memory_report.plain.predicted_peak_bytes)

    model.fit(
        data, shuffle=False, verbose=0, callbacks=[Notes()], memory_budget="1GB"
    )

    assert reports[0] == reports[1] < reports[2]
    assert reports[3] == reports[0]


@pytest.mark.filterwarnings("ignore:Layers")
def test_the_fewest_micro_batches_are_chosen_among_all_options():
    """Dropout draws for each: with half of the memory fewer will do."""
    x = np.ones((8, 256, 4), "float32")
    quiet = {"batch_size": 8, "verbose": 0}

    def fit(**options):
        keras.utils.set_random_seed(0)
        outputs = inputs = keras.Input((256, 4))
        for width in (64, 64, 64, 64, 4):
            outputs = layers.Dense(width, "tanh")(outputs)
            outputs = layers.Dropout(0.1)(outputs)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        model = kmem.wrap(model)
        model.fit(x, x, **quiet, **options)
        return model

    half = {"mixed_precision": "bfloat16", "microbatches": 4}
    model = fit(**half)
    gc.collect()
    in_use = kmem.memory.current()
    with kmem.memory.track() as usage:
        model.fit(x, x, **quiet, **half)
    budget = in_use + int(1.3 * (usage.peak_bytes - in_use))

    alone = fit(memory_budget=budget).memory_report.chosen.options
    model = fit(memory_budget=budget, allow="mixed_precision")

    chosen = model.memory_report.chosen.options
    assert chosen.mixed_precision and chosen.num_parts < alone.num_parts


class Rows(layers.Layer):
    """For batches of one size alone."""

    def call(self, x):
        return keras.ops.reshape(keras.ops.tanh(x), (_ROWS, -1, 64))[:, 0]


def test_a_model_for_batches_of_one_size_is_not_split():
    x = np.ones((_ROWS, 64, 64), "float32")

    def fit(**options):
        keras.utils.set_random_seed(0)
        blocks = [layers.Dense(64, "tanh") for _ in range(9)]
        ends = keras.Input((64, 64)), Rows(), layers.Dense(1)
        model = keras.Sequential([ends[0], *blocks, *ends[1:]])
        model.compile("sgd", "mse")
        model = kmem.wrap(model)
        _, peaks = _fit(model, data=(x, x[:, 0, :1]), **options)
        return model, max(peaks)

    with pytest.raises(ValueError, match="at least") as refused:
        fit(memory_budget=1000)
    least = refused.value.smallest_bytes
    del refused  # Its traceback holds a model.
    gc.collect()
    model, peak = fit(memory_budget=least)

    assert model.memory_report.chosen.options.microbatches is None
    assert peak <= least


@pytest.mark.parametrize("option", ["remat", "memory_budget"])
def test_a_batch_whose_tensors_differ_in_rows_stays_whole(option):
    """Those of graphs do: a label is of several nodes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype("float32"), np.repeat(range(8), 5)
    data = tf.data.Dataset.from_tensors((x, np.ones((8, 16), "float32")))
    inputs = [keras.Input((6,)), keras.Input((), dtype="int64")]

    def weights(**options):
        keras.utils.set_random_seed(0)
        nodes = inputs[0]
        for _ in range(3):
            nodes = layers.Dense(16, "tanh")(nodes)
        sums = keras.ops.segment_sum(nodes, inputs[1], num_segments=8)
        model = keras.Model(inputs, layers.Dense(16)(sums))
        model.compile("sgd", "mse")
        quiet = {"shuffle": False, "verbose": 0}
        kmem.wrap(model).fit(data.repeat(2), **quiet, **options)
        return model.get_weights()

    expected = weights()
    got = weights(**{option: "1GB"})

    for value, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.exhaustive
def test_half_precision_is_chosen_only_where_it_is_allowed(plain):
    _, needed = plain
    model = _model()
    budget = _budget(needed, 0.7)

    _, peaks = _fit(model, memory_budget=budget, allow=("mixed_precision",))

    report = model.memory_report
    tried = [report.chosen, *report.alternatives]
    assert any(choice.options.mixed_precision for choice in tried)
    assert max(peaks) <= budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "auto"}, "`memory_budget` and `remat` exclude each other"),
        ({"dtr": True}, "exclude each other"),
        ({"allow": ("dtr",)}, "`allow` must be one of"),
    ],
)
def test_what_is_chosen_cannot_be_given_as_well(options, message):
    with pytest.raises(ValueError, match=message):
        kmem.MemoryOptions(memory_budget="1GB", **options)


def test_a_callback_does_not_choose_for_several_processes():
    callback = kmem.callbacks.MemoryOptions(
        memory_budget="1GB", sharding="full"
    )
    with pytest.raises(ValueError, match="must be given to the `fit`"):
        _fit(_model(), [callback])


def test_nothing_can_be_allowed_without_a_budget():
    with pytest.raises(ValueError, match="must come with `memory_budget`"):
        kmem.MemoryOptions(allow="mixed_precision", microbatches=2)


def test_models_that_are_made_alike_need_alike():
    def key(optimizer=keras.optimizers.SGD, rate=0.1, metric="mae"):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
        scaled = keras.optimizers.LossScaleOptimizer(optimizer(rate))
        metrics = [metric, keras.metrics.AUC(), keras.losses.mean_squared_error]
        model.compile(scaled, "mse", metrics=metrics)
        return dry_run.beside_layers(model)

    assert key() == key() == key(rate=0.2)
    assert len({key(), key(keras.optimizers.Adam), key(metric="mse")}) == 3


def test_a_metric_counts_in_a_model_of_layers_that_were_measured():
    x, y = tf.ones((64, 8)), tf.ones((64, 1))
    data = tf.data.Dataset.from_tensors((x, y))
    needed = []
    for metric in ("mae", keras.metrics.AUC(num_thresholds=20_000)):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric])
        gc.collect()
        budget = kmem.memory.current() + 10**7
        kmem.wrap(model).fit(
            data, shuffle=False, verbose=0, memory_budget=budget
        )
        report = model.memory_report
        peak_bytes = report.chosen.predicted_peak_bytes
        needed.append(peak_bytes - report.in_use_bytes)

    # Of each threshold the counts of four kinds, in float32.
    assert needed[1] - needed[0] > 4 * 4 * 20_000
