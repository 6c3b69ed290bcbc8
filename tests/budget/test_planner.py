"""A budget is kept, with the same numbers, and nothing else changes.

Models are wide enough that activations are most of what a step holds.
"""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.budget import planner

pytestmark = pytest.mark.usefixtures("native_library")

ROWS, WIDTH, DEPTH = 2048, 64, 12
GENETIC = kmem.Genetic(thresh_nr_try=2, genetic_nr_iter=2, num_worker=1)


def stack(depth=DEPTH, optimizer="adam", **compile_arguments):
    keras.utils.set_random_seed(0)
    block = []
    for _ in range(depth // 3):
        block += [
            layers.Dense(WIDTH, "relu"),
            layers.Dropout(0.2),
            layers.Dense(WIDTH, "tanh"),
        ]
    block.append(layers.Dense(1))
    model = keras.Sequential([keras.Input((WIDTH,)), *block])
    model.compile(optimizer, "mse", **compile_arguments)
    return model


def batch(rows=ROWS):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, WIDTH)).astype("float32")
    return x, x[:, :1]


def dataset(rows=ROWS):
    return tf.data.Dataset.from_tensors(batch(rows)).repeat(3)


def train(model, **options):
    """The loss of each step, the weights, and the peak of the last steps."""

    class Steps(keras.callbacks.Callback):
        losses, peaks = [], []

        def on_train_batch_begin(self, batch, logs=None):
            kmem.memory.reset_peak("CPU")

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append(logs["loss"])
            self.peaks.append(kmem.memory.peak("CPU"))

    steps = Steps()
    arguments = {"verbose": 0, "shuffle": False, "callbacks": [steps]}
    kmem.wrap(model).fit(dataset(), **arguments, **options)
    return steps.losses, model.get_weights(), max(steps.peaks[1:])


def train_and_share(share, model):
    """What training gives, and the share of its peak that is asked for.

    TensorFlow keeps the weights of each model that was trained in a graph.
    What earlier tests left so is part of the peak, and no plan can drop it.
    """
    gc.collect()
    held = kmem.memory.current("CPU")
    want = train(model)
    return want, (held + share * (want[2] - held)) / want[2]


@pytest.fixture(scope="module")
def computed_plan():
    """A plan of computed costs for a `stack()`."""
    return kmem.plan(stack(), batch(), costs="flops")


def assert_equal(got, want):
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "share", [pytest.param(0.9, marks=pytest.mark.exhaustive), 0.8]
)
def test_a_budget_is_kept_with_the_same_numbers(share):
    want, budget = train_and_share(share, stack())
    model = stack()
    plan = kmem.plan(model, batch(), budget=budget)

    got = train(model, remat=plan)

    assert_equal(got, want)
    assert plan.segments
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert got[2] < want[2]


def test_a_step_within_fit_needs_what_was_predicted():
    model = stack()
    plan = kmem.plan(model, batch(), budget="auto")
    held = kmem.memory.current("CPU")
    data = tf.constant(batch()[0]), tf.constant(batch()[1])
    inputs = kmem.memory.current("CPU") - held
    kmem.wrap(model).memory_options = kmem.MemoryOptions(remat=plan)
    model.train_on_batch(*data)

    with kmem.memory.track("CPU") as usage:
        model.train_on_batch(*data)

    # Its own batch, as in a dry run, is part of the prediction.
    assert inputs >= 0
    assert usage.peak_bytes <= 1.05 * plan.predicted_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "solver",
    [
        "sqrt",
        pytest.param("optimal", marks=pytest.mark.exhaustive),
        pytest.param(GENETIC, marks=pytest.mark.exhaustive),
    ],
)
def test_every_solver_gives_plans_that_train_alike(solver):
    want, budget = train_and_share(0.85, stack())

    got = train(stack(), remat=kmem.Remat(budget=budget, solver=solver))

    assert_equal(got, want)


def test_auto_saves_memory_and_says_what_it_costs(computed_plan):
    plan = computed_plan

    assert plan.budget_bytes is None
    assert plan.predicted_peak_bytes < plan.unplanned_peak_bytes
    assert 1 < plan.slowdown <= 1.3


def test_a_budget_that_holds_everything_recomputes_nothing():
    plan = kmem.plan(stack(), batch(), budget="2GB")

    assert plan.segments == ()
    assert plan.slowdown == 1


def test_computed_costs_give_the_same_plan_twice(computed_plan):
    again = kmem.plan(stack(), batch(), budget="auto", costs="flops")

    assert again.segments == computed_plan.segments
    assert again.slowdown == computed_plan.slowdown


def test_an_impossible_budget_names_the_smallest():
    with pytest.raises(ValueError, match="Received") as error:
        kmem.plan(stack(), batch(), budget="200kB", costs="flops")

    assert error.value.smallest_bytes > 200_000


@pytest.mark.parametrize(
    "budget, message",
    [(-1, "number of bytes"), ("200kB", "at least .* smallest peak")],
)
def test_a_bad_budget_is_refused_before_training(budget, message):
    model = stack(3)
    before = model.get_weights()

    with pytest.raises(ValueError, match=message):
        train(model, remat=budget)

    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_plan_file_that_is_damaged_is_refused_by_fit(computed_plan, tmp_path):
    path = tmp_path / "plan.json"
    computed_plan.save(path)
    path.write_bytes(path.read_bytes()[:1000])

    with pytest.raises(ValueError, match=r"truncated or damaged.*plan\.json"):
        train(stack(), remat=str(path))


def test_a_layer_that_does_not_fit_by_itself_is_named():
    model, x = stack(), batch(16 * ROWS)
    gc.collect()  # what earlier tests left would make room
    kmem.memory.limit(kmem.memory.current("CPU") + 500_000, "CPU")

    with pytest.raises(tf.errors.ResourceExhaustedError, match="even alone"):
        kmem.plan(model, x, budget="1GB")


class Counting(layers.Layer):
    """Counts its runs in a variable that is not Keras's."""

    def build(self, shape):
        self.runs = tf.Variable(0, trainable=False)

    def call(self, x):
        self.runs.assign_add(1)
        return keras.ops.tanh(x)


def test_a_layer_that_cannot_be_recomputed_is_named_and_runs_once_a_step():
    def counted():
        keras.utils.set_random_seed(0)
        block = [layers.Dense(WIDTH, "relu") for _ in range(6)]
        block.insert(3, Counting(name="counting"))
        model = keras.Sequential(
            [keras.Input((WIDTH,)), *block, layers.Dense(1)]
        )
        model.compile("adam", "mse")
        return model

    want, model = train(counted()), counted()
    plan = kmem.plan(counted(), batch(), costs="flops", solver="sqrt")

    got = train(model, remat=plan)

    assert plan.segments
    assert "cannot repeat   counting," in plan.summary()
    assert model.get_layer("counting").runs.numpy() == 3
    assert_equal(got, want)


def tiny():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return kmem.wrap(model), np.ones((32, 4), "float32")


def test_a_share_of_all_of_the_peak_is_always_possible():
    got, x = tiny()
    want, _ = tiny()
    want.fit(x, x[:, :1], verbose=0)
    got.fit(x, x[:, :1], remat=1.0, verbose=0)
    for a, b in zip(got.get_weights(), want.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "remat, written",
    [
        (0.01, r"remat=0\.01 \(\d+ bytes\)"),
        ("5KB", r"remat='5KB' \(5000 bytes\)"),
        (kmem.Remat(budget="4.5KiB"), r"remat='4.5KiB' \(4608 bytes\)"),
        (5000, r"remat=5000$"),
    ],
)
def test_a_budget_that_is_too_small_is_repeated_as_it_was_written(
    remat, written
):
    model, x = tiny()
    with pytest.raises(ValueError, match=f"`remat` must.*Received: {written}"):
        model.fit(x, x[:, :1], remat=remat, verbose=0)


def two_outputs(losses=("mse", "mae")):
    inputs = keras.Input((4,))
    first = layers.Dense(8, "tanh")(inputs)
    second = layers.Dense(8, "tanh")(first)
    outputs = [layers.Dense(2)(second), layers.Dense(1)(first)]
    model = keras.Model(inputs, outputs)
    model.compile("adam", list(losses))
    return model


def two_inputs():
    inputs = [keras.Input((4,)), keras.Input((2,))]
    x = layers.Dense(8, "tanh")(layers.Concatenate()(inputs))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def own_step():
    model = OwnStep([keras.Input((4,)), layers.Dense(8, "tanh")])
    model.add(layers.Dense(1))
    model.compile("adam")
    return model


class _Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x**2))
        return x


def losses_of_layers(loss=None):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2), _Penalty()])
    model.add(layers.Dense(1))
    model.compile("adam", loss)
    return model


_X = np.random.default_rng(0).normal(size=(16, 7)).astype("float32")
_FOUR, _TWO, _ONE = _X[:, :4], _X[:, 4:6], _X[:, 6:]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "make, x, y",
    [
        (two_outputs, _FOUR, [_TWO, _ONE]),
        (two_outputs, _FOUR, (_TWO, _ONE)),
        (lambda: two_outputs(("mse", None)), _FOUR, [_TWO, None]),
        (two_inputs, [_FOUR, _TWO], _ONE),
        (two_inputs, (_FOUR, _TWO), _ONE),
        (own_step, _FOUR, _ONE),
        (losses_of_layers, _FOUR, _ONE),
        (lambda: losses_of_layers("mse"), _FOUR, _ONE),
    ],
)
def test_what_keras_trains_in_its_first_fit_is_planned(make, x, y):
    def trained(planned):
        keras.utils.set_random_seed(0)
        model = kmem.wrap(make())
        options = {}
        if planned:
            options["remat"] = kmem.plan(model, (x, y), costs="flops")
        history = model.fit(x, y, verbose=0, shuffle=False, **options)
        return history.history["loss"], model.get_weights()

    assert_equal(trained(True), trained(False))


def test_a_model_that_is_not_built_is_refused():
    model = keras.Sequential([layers.Dense(1)])

    with pytest.raises(ValueError, match="must be built"):
        kmem.plan(model, batch())


def test_a_plan_for_another_batch_is_refused(computed_plan):
    x, y = batch(64)

    with pytest.raises(ValueError, match=r"float32\[2048, 64\].*\[64, 64\]"):
        kmem.wrap(stack()).fit(x, y, batch_size=64, remat=computed_plan)


def test_a_plan_for_another_model_is_refused(computed_plan):
    with pytest.raises(ValueError, match="plan for this model.* gives "):
        train(stack(6), remat=computed_plan)


def state(model):
    found = [*model.variables, *model.optimizer.variables]
    for metric in model.metrics:
        found += metric.variables
    return [variable.numpy() for variable in found]


@pytest.mark.parametrize("runs_out", [False, True])
def test_planning_leaves_state_and_model_as_they_are(runs_out):
    model = stack(metrics=["mae"])
    model.fit(dataset(), verbose=0, shuffle=False)
    before, attributes = state(model), set(vars(model))
    function = model.train_function
    if runs_out:
        kmem.memory.limit(kmem.memory.current("CPU") + 4_500_000, "CPU")

    plan = planner.plan(model, batch(), "auto", costs="flops")

    assert plan.segments
    for got, want in zip(state(model), before, strict=True):
        np.testing.assert_array_equal(got, want)
    assert model.train_function is function
    assert set(vars(model)) == attributes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        pytest.param(
            {"gradient_accumulation_steps": 2}, marks=pytest.mark.exhaustive
        ),
        {"mixed_precision": "bfloat16"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_plans_combine_with_other_options(options):
    want = train(stack(), **options)

    got = train(stack(), remat="auto", **options)

    assert_equal(got, want)


def test_eager_steps_follow_a_plan():
    want = train(stack(run_eagerly=True))

    got = train(stack(run_eagerly=True), remat="auto")

    assert_equal(got, want)


def test_a_share_is_of_what_eager_steps_need_where_steps_are_eager():
    want, budget = train_and_share(0.85, stack(run_eagerly=True))
    model = stack(run_eagerly=True)

    plan = kmem.plan(model, batch(), budget=budget)
    got = train(model, remat=plan)

    assert plan.mode == "eager"
    assert plan.budget_bytes == pytest.approx(budget * want[2], rel=0.15)
    assert got[2] <= plan.budget_bytes
    assert_equal(got, want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:XLA compiled something")
def test_compiled_steps_follow_a_plan():
    """XLA fuses otherwise: the numbers differ in their last bits."""
    plain = stack(jit_compile=True, optimizer="sgd")
    want, budget = train_and_share(0.85, plain)

    got = train(stack(jit_compile=True, optimizer="sgd"), remat=budget)

    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


def test_after_fit_the_model_is_plain_again():
    model = kmem.wrap(stack())
    model.fit(dataset(), verbose=0, shuffle=False)
    attributes, function = set(vars(model)), model.train_function

    model.fit(dataset(), verbose=0, shuffle=False, remat="auto")

    assert model.train_function is function
    # Traces, for the next time.
    assert set(vars(model)) - attributes <= {"_kmem_sessions"}
    for layer in model.layers:
        assert "call" not in vars(layer)


class Again(layers.Layer):
    """Runs a layer again for its gradient, whatever a plan says."""

    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(WIDTH, "tanh")
        self.run = keras.remat(lambda x: self.layer(x))

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.run(x)


def _runs_again():
    keras.utils.set_random_seed(0)
    block = [layers.Dense(WIDTH, "tanh") for _ in range(6)]
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *block[:3], Again(), *block[3:], Again()]
    )
    model.add(layers.Dense(1))
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def trained_again():
    return train_and_share(0.9, _runs_again())


@pytest.mark.parametrize("budget", ["8GB", 0.9])
def test_what_runs_again_by_itself_is_trained_within_a_plan(
    budget, trained_again
):
    want, share = trained_again

    got = train(_runs_again(), remat=share if budget == 0.9 else budget)

    assert_equal(got, want)


WORDS = np.array([["a b c"], ["b d"], ["d c b a"], ["a"]] * 8)


def _of_words(length):
    keras.utils.set_random_seed(0)
    look_up = layers.TextVectorization(output_sequence_length=length)
    look_up.adapt(WORDS)
    block = [layers.Dense(64, "tanh") for _ in range(6)]
    return keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            look_up,
            layers.Embedding(8, 64),
            *block,
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )


def _fit_words(model, **options):
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((WORDS, np.ones((32, 1))))
    fit = {"verbose": 0, "shuffle": False}
    history = kmem.wrap(model).fit(rows.batch(16), **fit, **options)
    return history.history, model.get_weights()


def test_a_model_that_looks_up_its_words_has_a_plan():
    plan = kmem.plan(_of_words(4), WORDS[:16])
    assert plan.segments

    got = _fit_words(_of_words(4), remat="auto")

    assert_equal(got, _fit_words(_of_words(4)))


def test_a_length_that_no_graph_knows_is_named():
    message = r"known.*Received: text_vectorization.*gives \(16, None\)"
    with pytest.raises(ValueError, match=message):
        _fit_words(_of_words(None), remat="auto")


def test_what_was_loaded_as_a_graph_is_not_run_again(tmp_path):
    keras.utils.set_random_seed(0)
    recurrent = layers.LSTM(8, return_sequences=True)
    keras.Sequential([keras.Input((10, 8)), recurrent]).export(
        tmp_path, verbose=False
    )
    x = inputs = keras.Input((10, 8))
    for _ in range(2):
        x = layers.Dense(8, "tanh")(x)
        x = layers.TFSMLayer(tmp_path, call_endpoint="serve")(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(8, "tanh")(x)))
    model.compile("sgd", "mse")
    x = np.ones((16, 10, 8), "float32")

    kmem.wrap(model).fit(x, x[..., :1], verbose=0, remat="auto")
