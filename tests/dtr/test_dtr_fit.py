"""`fit(dtr=...)`: Keras's numbers, in less memory."""

import gc
import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.dtr.device import DeviceSession
from kmem.dtr.feasible import with_least_threshold

pytestmark = [
    pytest.mark.early,
    pytest.mark.usefixtures("native_library"),
]

ROWS = 64


def convolutional():
    x = inputs = keras.Input((16, 16, 3))
    for _ in range(3):
        x = layers.Conv2D(16, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("gelu")(x)
        x = layers.Dropout(0.2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(4)(x)), (16, 16, 3)


def recurrent():
    model = keras.Sequential(
        [
            keras.Input((12, 8)),
            layers.LSTM(64, return_sequences=True),
            layers.LSTM(64),
            layers.Dense(4),
        ]
    )
    return model, (12, 8)


def attention():
    x = inputs = keras.Input((32, 64))
    for _ in range(2):
        y = layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + y)
        x = layers.Dense(64, activation="relu")(x)
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(4)(x)), (32, 64)


def data(shape, rows=ROWS):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, *shape)).astype("float32")
    return x, rng.integers(0, 4, rows)


def compiled(make, run_eagerly=False):
    keras.utils.set_random_seed(5)
    model, shape = make()
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=run_eagerly,
    )
    return kmem.wrap(model), shape


def train(make, run_eagerly=False, **options):
    """Losses, values of all variables, and the peak of fit in bytes."""
    gc.collect()
    model, shape = compiled(make, run_eagerly)
    x, y = data(shape)
    with kmem.memory.track("CPU") as usage:
        history = model.fit(x, y, batch_size=32, epochs=2, verbose=0, **options)
    values = [v.numpy() for v in model.variables + model.optimizer.variables]
    return history.history, values, usage.peak_bytes


def check_same(got, want):
    assert got[0] == want[0]
    for one, other in zip(got[1], want[1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "make, compile",
    [
        (convolutional, "layers"),
        (convolutional, None),
        (recurrent, "layers"),
        pytest.param(recurrent, None, marks=pytest.mark.exhaustive),
        pytest.param(attention, "layers", marks=pytest.mark.exhaustive),
        (attention, None),
    ],
)
def test_numbers_are_those_of_plain_eager_at_every_threshold(make, compile):
    gc.collect()
    # What earlier tests still hold cannot be given up.
    held = kmem.memory.current("CPU")
    want = train(make, run_eagerly=True)
    for share in (1.5, 0.5):
        threshold = int(held + share * (want[2] - held))
        options = kmem.DTR(threshold, evictee_minimum_size=0, compile=compile)
        got = train(make, dtr=options)
        check_same(got, want)
        assert got[2] <= threshold
    assert kmem.dtr.statistics().num_recomputations > 0


@pytest.mark.filterwarnings("ignore:Layers whose state can depend")
@pytest.mark.parametrize(
    "options, share",
    [
        ({"microbatches": 2}, 0.6),
        ({"gradient_accumulation_steps": 2}, 0.6),
        ({"mixed_precision": "bfloat16"}, 0.8),
        ({"mixed_precision": "float16"}, 0.8),
    ],
    ids=str,
)
def test_it_goes_with_the_other_options(options, share):
    want = train(convolutional, run_eagerly=True, **options)
    threshold = int(share * want[2])
    dtr = kmem.DTR(threshold, evictee_minimum_size=0, compile="layers")
    got = train(convolutional, dtr=dtr, **options)

    check_same(got, want)
    assert got[2] <= threshold


def test_the_callback_does_the_same():
    want = train(convolutional, run_eagerly=True)
    callback = kmem.callbacks.DTR(int(0.6 * want[2]), evictee_minimum_size=0)
    got = train(convolutional, callbacks=[callback])

    check_same(got, want)


def test_the_model_is_plain_keras_afterwards():
    model, shape = compiled(convolutional)
    x, y = data(shape)
    model.fit(x, y, dtr=True, verbose=0)

    assert not model.run_eagerly
    assert "KMEM" not in model(x[:2]).device
    assert not any("KMEM" in v.value.device for v in model.variables)
    model.fit(x, y, verbose=0)
    assert isinstance(
        model.train_function(iter([(tf.constant(x), tf.constant(y))])), dict
    )


def test_the_name_of_the_device_is_not_in_a_saved_model(tmp_path):
    model, shape = compiled(convolutional)
    x, y = data(shape)
    model.fit(x, y, dtr=True, verbose=0)
    model.save(tmp_path / "model.keras")
    model.export(tmp_path / "exported", verbose=False)

    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"KMEM_DTR" not in path.read_bytes()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x[:2]), model(x[:2]))


class Fails(keras.layers.Layer):
    error = None

    def call(self, x):
        if Fails.error is not None:
            raise Fails.error("stop")
        return x * 1.0


def with_failure():
    x = inputs = keras.Input((512,))
    x = layers.Dense(512)(x)
    return keras.Model(inputs, layers.Dense(4)(Fails()(x))), (512,)


def test_to_find_a_threshold_leaves_the_model_as_the_error_does():
    model, shape = compiled(convolutional)
    x, y = data(shape)
    model.build(x.shape)
    kernel = model.trainable_weights[0].numpy()
    with pytest.raises(tf.errors.ResourceExhaustedError, match="was tried"):
        model.fit(x, y, dtr="2MB", verbose=0)

    np.testing.assert_array_equal(model.trainable_weights[0], kernel)
    assert model.optimizer.iterations == 0
    slots = model.optimizer.variables[2:]
    assert slots and not any(slot.numpy().any() for slot in slots)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_a_step_leaves_nothing_behind(error, monkeypatch):
    model, shape = compiled(with_failure)
    x, y = data(shape)
    model.fit(x, y, dtr=True, verbose=0)
    monkeypatch.setattr(Fails, "error", error)
    with pytest.raises(error):
        model.fit(x, y, dtr=True, verbose=0)
    gc.collect()

    statistics = kmem.dtr.statistics()
    assert (statistics.num_operators, statistics.live_bytes) == (0, 0)
    assert "KMEM" not in (tf.ones(9) + 1.0).device
    monkeypatch.setattr(Fails, "error", None)
    model.fit(x, y, dtr=True, verbose=0)


def test_too_small_a_threshold_says_what_would_do():
    want = train(convolutional, run_eagerly=True)

    with pytest.raises(
        tf.errors.ResourceExhaustedError,
        match="(?s)at least .* bytes for this step.*bytes: nothing is left",
    ) as error:
        train(convolutional, dtr=int(0.1 * want[2]))
    least = int(error.value.message.split("at least ")[1].split()[0])
    del error  # Its traceback holds tensors.

    gc.collect()
    statistics = kmem.dtr.statistics()
    assert (statistics.num_operators, statistics.live_bytes) == (0, 0)
    got = train(convolutional, dtr=least)
    check_same(got, want)
    assert got[2] <= least


@pytest.mark.parametrize("asked_for", [10**9, 99 * 10**8])
def test_the_threshold_that_would_do_is_near_the_smallest(asked_for):
    smallest, raised = 10**10, 2 * 10**10

    def step(threshold):
        return threshold if threshold >= smallest else raised

    error: Any = with_least_threshold(asked_for, "No room.", step)

    least = int(error.message.split("at least ")[1].split()[0])
    assert smallest <= least <= 1.05 * smallest


def test_the_threshold_that_would_do_leaves_room_for_an_input_pipeline():
    error: Any = with_least_threshold(
        10**10, "No room.", lambda threshold: max(threshold, 10**10), 10**9
    )

    least = int(error.message.split("at least ")[1].split()[0])
    assert 11 * 10**9 <= least <= 11.5 * 10**9


@pytest.mark.parametrize(
    "make, compile",
    [
        pytest.param(recurrent, None, marks=pytest.mark.exhaustive),
        (attention, "layers"),
    ],
)
def test_out_of_memory_leaves_the_counts_at_their_start(make, compile):
    model, shape = compiled(make)
    x, y = data(shape)
    settings = {"evictee_minimum_size": 0, "compile": compile}
    model.fit(x, y, dtr=kmem.DTR(**settings), verbose=0)
    gc.collect()
    before = kmem.memory.current("CPU")
    with kmem.memory.track("CPU") as usage:
        model.fit(x, y, dtr=kmem.DTR(**settings), verbose=0)
    threshold = before + int(0.2 * (usage.peak_bytes - before))
    for dtr in (kmem.DTR(threshold, **settings), kmem.DTR(**settings)):
        try:
            model.fit(x, y, dtr=dtr, verbose=0)
        except tf.errors.ResourceExhaustedError:
            assert dtr.eviction_threshold
        else:
            assert not dtr.eviction_threshold
        gc.collect()
        statistics = kmem.dtr.statistics()
        assert (statistics.num_operators, statistics.live_bytes) == (0, 0)
    # What was compiled holds some constants.
    assert kmem.memory.current("CPU") - before < 10**5


class Steps:
    """Takes steps with a recurrent model on batches of varying sizes."""

    largest = 64, 10  # Rows, and length.

    def __init__(self):
        model, _ = compiled(recurrent)
        self.model = kmem.wrap(keras.Sequential(model.layers))
        self.model.compile("adam", "mse", run_eagerly=True)
        self.take(*self.largest)  # Makes the variables.

    def use(self, dtr):
        self.model.memory_options = dtr and kmem.MemoryOptions(dtr=dtr)

    def take(self, rows, length):
        """What a step needs above what is there."""
        x = tf.ones((rows, length, 8))
        y = tf.ones((rows, 4))
        with kmem.memory.track("CPU") as usage:
            self.model.train_on_batch(x, y)
        return usage.peak_bytes - usage.start_bytes


def test_without_evictions_the_peak_is_that_of_plain_eager():
    steps = Steps()
    sizes = [(64, 4), (64, 9), (48, 6)]
    want = [steps.take(*size) for size in sizes]
    steps.use(kmem.DTR(evictee_minimum_size=0, compile=None))

    got = [steps.take(*size) for size in sizes]
    assert got == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize(
    "compile, share, num_steps",
    [
        # Compiled calls need more at a time.
        ("layers", 0.85, 24),
        pytest.param("layers", 0.85, 2000, marks=pytest.mark.exhaustive),
        pytest.param(None, 0.7, 100, marks=pytest.mark.slow),
        pytest.param(None, 0.5, 2000, marks=pytest.mark.exhaustive),
    ],
)
def test_nothing_grows_over_steps_of_varying_sizes(compile, share, num_steps):
    steps = Steps()
    settings = {"evictee_minimum_size": 0, "compile": compile}
    steps.use(kmem.DTR(**settings))
    # Of steps in which everything is compiled: threads run what is within a
    # compiled call in another order each time.
    needed = max([steps.take(*steps.largest) for _ in range(6)][1:])
    gc.collect()
    threshold = kmem.memory.current("CPU") + int(share * needed)
    steps.use(kmem.DTR(threshold, **settings))
    rng = np.random.default_rng(1)
    seen = []
    for step in range(num_steps):
        steps.take(rng.integers(8, 64), rng.integers(2, 10))
        statistics = kmem.dtr.statistics()
        assert (statistics.num_operators, statistics.live_bytes) == (0, 0)
        if step >= 4 and step % (num_steps // 20) == 0:
            gc.collect()
            seen.append(kmem.memory.current("CPU"))
    assert statistics.num_recomputations > num_steps
    assert max(seen) - min(seen) < 10**5


def test_statistics_are_in_the_logs():
    want = train(convolutional, run_eagerly=True)
    history, _, _ = train(
        convolutional,
        dtr=kmem.DTR(int(0.6 * want[2]), evictee_minimum_size=0),
        callbacks=[kmem.callbacks.MemoryMonitor("CPU")],
    )

    first, second = history["dtr_recomputations"]
    assert first > 0
    assert first + second == kmem.dtr.statistics().num_recomputations
    assert all(count > 0 for count in history["dtr_evictions"])


class Largest(keras.metrics.Metric):
    """Its result is a variable, which Keras's eager mode cannot hand on."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        largest = keras.ops.max(keras.ops.abs(y_pred))
        self.largest.assign(keras.ops.maximum(self.largest, largest))

    def result(self):
        return self.largest.value


def test_the_result_of_a_metric_may_be_its_variable():
    histories = []
    for options in ({}, {"dtr": True}):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        kmem.wrap(model).compile("sgd", "mse", metrics=[Largest()])
        x = np.random.default_rng(0).normal(size=(8, 4))
        history = model.fit(x, x[:, :2], verbose=0, shuffle=False, **options)
        histories.append(history.history)
    np.testing.assert_allclose(*(each["largest"] for each in histories))


def test_compilation_by_xla_is_refused():
    model, shape = compiled(convolutional)
    model.jit_compile = True

    with pytest.raises(ValueError, match="Received: jit_compile=True"):
        model.fit(*data(shape), dtr=True, verbose=0)


def test_a_data_set_and_validation_are_not_on_the_device():
    model, shape = compiled(convolutional)
    x, y = data(shape)
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
    history = model.fit(
        rows.map(lambda a, b: (a + 0.0, b)),
        validation_data=rows,
        steps_per_epoch=3,
        shuffle=False,
        dtr=True,
        verbose=0,
    )

    assert len(history.history["val_loss"]) == 1


def test_functions_inside_of_a_step_are_traced_without_the_device():
    @tf.function
    def twice(x):
        return 2.0 * x

    class Twice(keras.layers.Layer):
        def call(self, x):
            return twice(x)

    def make():
        x = inputs = keras.Input((128,))
        x = Twice()(layers.Dense(128)(x))
        return keras.Model(inputs, layers.Dense(4)(x)), (128,)

    check_same(train(make, dtr=True), train(make, run_eagerly=True))
    assert float(twice(tf.constant(1.5))) == 3


@pytest.mark.parametrize("compile", ["layers", None])
def test_a_step_that_fails_leaves_weights_and_optimizer_as_they_were(
    compile, monkeypatch, native_library
):
    """Also where memory runs out between two updates."""
    # Without a search for what would do, which takes most of the time.
    monkeypatch.setattr(
        "kmem.fit.mechanisms.with_least_threshold",
        lambda threshold, message, step, reserved: (
            tf.errors.ResourceExhaustedError(None, None, message)
        ),
    )
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(256, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(global_clipnorm=1.0), "mse")
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")

    def fit(threshold):
        # Of one heuristic, which is not tried again.
        option = kmem.DTR(threshold, heuristic="dtr_eq", compile=compile)
        kmem.wrap(model).fit(x, x[:, :1], 64, verbose=0, dtr=option)

    def state():
        changed = [*model.trainable_variables, *model.optimizer.variables]
        return [variable.numpy() for variable in changed]

    fit(0)
    in_use = kmem.memory.current("CPU")
    with kmem.memory.track("CPU") as usage:
        fit(0)
    num_failed = 0
    for share in np.linspace(0.1, 0.9, 9):
        before = state()
        try:
            fit(int(in_use + share * (usage.peak_bytes - in_use)))
        except tf.errors.ResourceExhaustedError:
            num_failed += 1
            for got, want in zip(state(), before, strict=True):
                np.testing.assert_array_equal(got, want)
    assert num_failed > 2


class TwoOptimizers(keras.Model):
    """Draws noise, and runs out of memory between its updates."""

    num_steps = 0
    fails_at = 0

    def train_step(self, data):
        self.num_steps += 1
        x, y = data
        x += tf.random.normal(tf.shape(x)) + keras.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_weights
        pairs = [*zip(tape.gradient(loss, weights), weights, strict=True)]
        self.optimizer.apply_gradients(pairs[:2])
        if self.num_steps == self.fails_at:
            raise tf.errors.ResourceExhaustedError(None, None, "No room.")
        self.other.apply_gradients(pairs[2:])
        return {"loss": loss}


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_step_that_is_taken_again_has_its_numbers(fails_at, monkeypatch):
    """The first one has made the optimizers' variables by then."""
    x, y = data((8,))

    def train(fails_at, **options):
        keras.utils.clear_session()  # The state of `keras.random`.
        keras.utils.set_random_seed(5)
        inputs = keras.Input((8,))
        outputs = layers.Dense(1)(layers.Dense(16, "tanh")(inputs))
        model = kmem.wrap(TwoOptimizers(inputs, outputs))
        model.other = keras.optimizers.Adam(1e-2)
        model.compile(keras.optimizers.Adam(1e-2), "mse", run_eagerly=True)
        model.fails_at = fails_at
        history = model.fit(x, y, batch_size=32, verbose=0, **options)
        changed = [model, model.optimizer, model.other]
        values = [v.numpy() for each in changed for v in each.variables]
        return history.history, values

    want = train(0)
    for dtr in (True, "1GB"):
        # There is no other heuristic that would do.
        with pytest.raises(tf.errors.ResourceExhaustedError, match="No room"):
            train(fails_at, dtr=dtr)
    names = map(str, itertools.count())
    monkeypatch.setattr(
        DeviceSession, "heuristic", property(lambda _: next(names))
    )
    check_same(train(fails_at, dtr=True), want)
