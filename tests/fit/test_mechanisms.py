"""Each mechanism of a session by itself: without `fit`, and without a session.

`mechanism.Mechanism` says when a session calls which method.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.base.patching import guarded
from kmem.fit import pipeline
from kmem.fit import requirements
from kmem.fit.mechanisms import Evicting
from kmem.fit.mechanisms import Mixed
from kmem.fit.mechanisms import SplitStep
from kmem.fit.mechanisms import WholeStep
from kmem.fit.mechanisms import planned
from kmem.fit.undoing import Changes
from kmem.fit.undoing import Reader
from kmem.fit.undoing import Undoing
from kmem.step.mechanism import Mechanism
from kmem.step.parts import Alone

ROWS = 12


class Noting(layers.Layer):
    """Notes the dtypes of its inputs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def call(self, x):
        self.calls.append(x.dtype.name)
        return tf.identity(x)


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    block = [layers.Dense(8, "tanh"), Noting(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *block])
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    model.layers[1].calls.clear()
    model.history = keras.callbacks.History()  # Of an earlier `fit`.
    return model


def batch():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return tf.constant(x), tf.constant(x[:, :1])


def values(variables):
    return [variable.numpy() for variable in variables]


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_that_says_nothing_changes_nothing():
    mechanism = Mechanism()

    def function(data):
        return data + 1

    mechanism.start()
    assert mechanism.take(function, 1) == 2
    assert mechanism.wrapped(function) is function
    with mechanism.computing(training=True), mechanism.updating():
        pass
    assert not mechanism.stays(failed=True)
    mechanism.stop(failed=True)


def test_a_whole_step_is_the_model_s_own(model):
    step = WholeStep(model.train_step)

    logs = step.update(step.compute(batch()))

    assert model.optimizer.iterations == 1
    assert logs.keys() == {"loss"}
    assert step.layers_that_see_parts == []


def split_step(model, **options):
    options = kmem.MemoryOptions(**options)
    return SplitStep(
        *(model, model.train_step, model.optimizer, options, Alone()),
        ordered=False,
        early=False,
    )


def test_a_split_step_changes_no_weight_before_its_update(model):
    step = split_step(model, microbatches=3)
    before = values(model.trainable_variables)
    step.start()

    computed = step.compute(batch())
    assert_equal(values(model.trainable_variables), before)
    assert computed.variables == model.trainable_variables
    logs = step.update(computed)
    step.stop()

    assert model.optimizer.iterations == 1
    assert len(model.layers[1].calls) >= 3
    assert logs.keys() == {"loss"}


def test_a_split_step_updates_once_for_a_group_and_for_its_rest(model):
    step = split_step(model, gradient_accumulation_steps=2)
    step.start()
    updates = []
    for _ in range(3):
        step.update(step.compute(batch()))
        updates.append(int(model.optimizer.iterations))
    step.end_group()
    step.stop()

    assert updates == [0, 1, 1]
    assert model.optimizer.iterations == 2


def test_xla_compiles_a_whole_step_only_if_each_batch_updates(model):
    assert split_step(model, microbatches=2).allows_xla
    assert not split_step(model, gradient_accumulation_steps=2).allows_xla


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layers_compute_in_16_bits_only_within(model, dtype):
    mixed = Mixed(model, kmem.MixedPrecision(dtype))
    x, _ = batch()
    mixed.start()
    with mixed.computing(training=True):
        model(x)
    model(x)
    mixed.stop()

    assert model.layers[1].calls == [dtype, "float32"]
    assert mixed.kinds == ("train", "test")
    # Only float16 has gradients that would be zero without a scale.
    assert (mixed.optimizer is model.optimizer) == (dtype == "bfloat16")


def test_changes_are_the_weights_and_the_optimizer_s(model):
    changes = Changes(model, model.optimizer)
    model.optimizer.built = False
    changes.build()

    variables = {id(each) for each in changes.variables}
    for each in (*model.trainable_variables, *model.optimizer.variables):
        assert {id(each), id(each.value)} & variables, each.path
    assert changes.layers_are_built


def test_changes_are_undone(model):
    changes = Changes(model, model.optimizer)
    changes.build()
    everything = [*model.variables, *model.optimizer.variables]
    before = values(everything)

    with changes.undone():
        model.train_step(batch())
        assert model.optimizer.iterations == 1

    assert_equal(values(everything), before)


@pytest.mark.parametrize(
    "error, is_undone",
    [
        (None, False),
        (ValueError, True),
        (KeyboardInterrupt, True),
        # The data ended: what was taken before is done.
        (StopIteration, False),
    ],
)
def test_a_step_that_raises_is_undone(model, error, is_undone):
    def function(iterator):
        model.train_step(next(iterator))
        if error is not None:
            raise error
        return "logs"

    undoing = Undoing(model, Changes(model, model.optimizer))
    undoing.is_on = True
    undoing.start()
    before = values(model.trainable_variables)
    try:
        assert undoing.wrapped(function)(iter([batch()])) == "logs"
    except (ValueError, KeyboardInterrupt, StopIteration) as raised:
        assert type(raised) is error
    undoing.stop()

    after = values(model.trainable_variables)
    same = all(map(np.array_equal, after, before))
    assert same == is_undone


def test_variables_are_read_in_one_call_in_the_end():
    """One by one at first: a short training makes no function for it."""
    variables = [tf.Variable(0.0), tf.Variable([0, 0]), tf.Variable([""])]
    reader = Reader(variables)
    for number in range(25):
        variables[0].assign(number / 2)
        variables[1].assign([number, -number])
        variables[2].assign([str(number)])

        half, pair, text = reader.read()

        assert half == number / 2 and list(pair) == [number, -number]
        assert list(text) == [str(number).encode()]
        is_function = hasattr(reader._read, "get_concrete_function")
        assert is_function == (number >= 19)


def evicting(model, option):
    changes = Changes(model, model.optimizer)
    changes.build()
    return Evicting(model, option, changes, compiles=False, repeats=True)


def test_a_threshold_that_is_too_small_names_one_that_would_do(
    model, native_library
):
    x = tf.ones((4096, 4))
    Changes(model, model.optimizer).build()
    threshold = kmem.memory.current("CPU") + 100_000
    mechanism = evicting(model, kmem.DTR(threshold))
    before = values(model.variables)

    with pytest.raises(tf.errors.ResourceExhaustedError, match="at least"):
        mechanism.take(model.train_step, (x, x[:, :1]))

    assert mechanism.runs_eagerly
    assert "KMEM" not in (x + 1.0).device

    assert_equal(values(model.variables), before)


def test_layers_of_a_plan_run_again_only_in_its_step(model):
    options = kmem.MemoryOptions(remat="auto")
    plan = kmem.plan(model, batch(), costs="flops")
    step, noting = planned(model, options, plan), model.layers[1]
    before = model.get_weights()

    def weights(take):
        model.set_weights(before)
        model.optimizer.build(model.trainable_variables)
        for variable in model.optimizer.variables[2:]:
            variable.assign(tf.zeros_like(variable))
        model.optimizer.iterations.assign(0)
        noting.calls.clear()
        take(batch())
        return model.get_weights(), len(noting.calls)

    got, times = weights(step)
    want, once = weights(model.train_step)

    assert_equal(got, want)
    assert once == 1
    segments = [range(s.start, s.stop) for s in plan.segments]
    assert times == (2 if any(1 in segment for segment in segments) else 1)


def test_a_plan_for_another_model_is_refused(model):
    other = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    other.compile("sgd", "mse")
    plan = kmem.plan(other, batch(), costs="flops")

    with pytest.raises(ValueError, match="plan"):
        planned(model, kmem.MemoryOptions(remat=plan), plan)


class Session:
    """What `guarded` needs of one."""

    def __init__(self, model):
        self.model = model
        self.removed = []

    def remove(self, failed=False):
        self.removed.append(failed)


@pytest.mark.parametrize(
    "error, removed",
    [(None, []), (StopIteration, []), (KeyboardInterrupt, [True])],
)
def test_a_guarded_function_takes_its_session_off_when_it_raises(
    model, error, removed
):
    def function(iterator):
        if error is not None:
            raise error
        return "logs"

    session = Session(model)
    call = guarded(session, "train_function", function)
    try:
        assert call(iter([])) == "logs"
    except (StopIteration, KeyboardInterrupt) as raised:
        assert type(raised) is error

    assert session.removed == removed


def test_a_guarded_function_takes_its_session_off_in_a_later_fit(model):
    session = Session(model)
    call = guarded(session, "train_function", lambda iterator: "session's")
    model.history = keras.callbacks.History()

    logs = call(iter([batch()]))

    assert session.removed == [False]
    assert logs.keys() == {"loss"}


@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="batches are elsewhere"
)
def test_an_input_pipeline_holds_the_arrays_and_a_few_batches():
    x = np.zeros((100, 4), "float32")
    spec = tf.TensorSpec((10, 4), tf.float32)

    assert pipeline.ready_bytes(spec) == pipeline.BATCHES_READY * 160
    held = pipeline.held_bytes({"x": x, "epochs": 3}, spec)
    assert held == x.nbytes + pipeline.ready_bytes(spec)
    assert pipeline.in_hand_bytes((tf.zeros((10, 4)), x)) == 160


@pytest.mark.parametrize(
    "options, num_traces",
    [
        ({"mixed_precision": "bfloat16"}, 1),
        # Once more for what a loss divides by, and to try one made by hand.
        ({"gradient_accumulation_steps": 2}, 3),
        ({"microbatches": 2}, 3),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else None,
)
def test_a_step_that_makes_variables_is_traced_once(options, num_traces):
    """Those of the optimizer, of metrics and of sums; Keras alone traces such
    a step twice."""
    traces = []

    class Counts(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            traces.append(tf.executing_eagerly())
            return super().compute_loss(*args, **kwargs)

    model = Counts([keras.Input((4,)), layers.Dense(2), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    x = np.ones((ROWS, 4), "float32")

    kmem.wrap(model).fit(x, x[:, :1], batch_size=4, verbose=0, **options)

    assert traces == [False] * num_traces


def test_what_cannot_work_is_refused_before_anything_is_changed(model):
    options = kmem.MemoryOptions(dtr=True)
    requirements.check(model, options)
    model.jit_compile = True

    with pytest.raises(ValueError, match="Received: jit_compile=True"):
        requirements.check(model, options)
    with pytest.raises(ValueError, match="not be larger than the batch size"):
        requirements.check_batch(
            {"x": np.zeros((8, 4)), "batch_size": 4},
            kmem.MemoryOptions(microbatches=5),
        )
