"""Memory options of levels save memory, and keep the numbers."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from multilevel_cases import Reweighting
from multilevel_cases import relative_error
from peaks import least_peak_bytes
from peaks import program_peaks

import kmem
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Program

SQRT = kmem.Remat(solver="sqrt")


@pytest.mark.parametrize(
    "dtype, tolerance", [("float16", 5e-3), ("bfloat16", 3e-2)]
)
def test_sixteen_bits_round_the_mixed_product_as_they_round_a_gradient(
    dtype, tolerance
):
    single = Reweighting(dtype="float32")
    half = Reweighting(dtype="float32", mixed_precision=dtype)
    for level in (half.lower, half.upper):
        level.models = [half.classifier, half.reweight]
    vector = single.vector()

    error = relative_error(
        half.found(Identity(), vector), single.found(Identity(), vector)
    )

    assert 0 < error < tolerance


@pytest.mark.parametrize("hypergradient", [Identity(), ConjugateGradient(2)])
def test_a_hypergradient_leaves_nothing_in_memory(
    native_library, hypergradient
):
    gc.collect()
    before = kmem.memory.current("CPU")
    program, _ = fitted(
        width=256, depth=2, rows=8, epochs=1, hypergradient=hypergradient
    )

    gc.collect()
    more = kmem.memory.current("CPU") - before
    assert more < 1.1 * sum(v.nbytes for v in program.get_weights())


def deep(width=32, depth=8, rows=2048, normalized=False, **options):
    """A program whose activations take most memory."""
    normalize = [layers.BatchNormalization()] if normalized else []
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((width,)),
            *(layers.Dense(width, "tanh", name=f"d{i}") for i in range(depth)),
            *normalize,
            layers.Dense(1),
        ],
        name="model",
    )
    weigh = keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, "sigmoid")], name="weigh"
    )

    def errors(x):
        return ops.square(model(x) - 1.0)

    def weighted_loss(x):
        return ops.mean(weigh(ops.stop_gradient(errors(x))) * errors(x))

    def plain_loss(x):
        return ops.mean(errors(x))

    program = Program(
        [
            Level(model, weighted_loss, keras.optimizers.SGD(0.1), **options),
            Level(weigh, plain_loss, keras.optimizers.SGD(0.1), **options),
        ]
    )
    x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    return program, tf.data.Dataset.from_tensors(x)


def fitted(epochs=2, **options):
    program, data = deep(**options)
    history = program.fit(
        dict.fromkeys(("model", "weigh"), data), epochs=epochs, verbose=0
    )
    return program, history.history


@pytest.mark.parametrize("remat", ["auto", SQRT])
def test_planned_recomputation_changes_no_number(remat):
    expected, logs = fitted()
    program, history = fitted(remat=remat)

    for one, other in zip(program.variables, expected.variables, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    for key, values in history.items():
        np.testing.assert_allclose(values, logs[key], 1e-5)


def test_a_plan_may_be_given_or_not_be_possible():
    program, data = deep()
    spec = tf.TensorSpec((2048, 32))
    plan = kmem.plan(program.levels[0].model, spec, costs="flops")
    assert plan.segments

    fitted(epochs=1, remat=plan)
    other = keras.Sequential([keras.Input((32,)), layers.Dense(3)])
    plan = kmem.plan(other, spec, costs="flops")
    with pytest.raises(ValueError, match="must be a plan for this model"):
        fitted(remat=plan)


def test_a_level_that_recomputes_must_call_a_model():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)], name="lower")

    def size_of_weights(x):
        return ops.mean(x) * ops.sum(ops.square(model.trainable_weights[0]))

    program = Program([Level(model, size_of_weights, "sgd", remat="auto")])
    x = tf.data.Dataset.from_tensors(np.ones((8, 4), "float32"))
    with pytest.raises(ValueError, match="Received: .* 'lower' calls none"):
        program.fit({"lower": x}, verbose=0)


def step_bytes(program, data):
    """The most that is in memory in a step of `fit`."""
    return max(program_peaks(program, data, 5)[1:])


def test_a_step_stays_within_the_budget_of_a_level(native_library):
    # Of operations that take their time, so that they end in one order.
    program, data = deep(rows=2**13, depth=12)
    program = Program(program.levels[:1])
    needed = step_bytes(program, data) - kmem.memory.current("CPU")
    budget = kmem.memory.current("CPU") + int(0.8 * needed)
    program, data = deep(rows=2**13, depth=12, remat=budget)
    program = Program(program.levels[:1])

    assert step_bytes(program, data) <= budget


def test_plans_are_made_anew_for_other_batches_and_another_compile():
    program, data = deep(depth=2, remat="auto")

    def plans(rows=2048):
        x = tf.data.Dataset.from_tensors(tf.ones((rows, 32)))
        program.prepare(dict.fromkeys(("model", "weigh"), x))
        return [level.plan for level in program.levels]

    first = plans()
    assert plans() == first
    program.compile(run_eagerly=True)
    second = plans()
    assert set(second).isdisjoint(first)
    assert set(plans(rows=64)).isdisjoint(second)


def test_a_budget_that_is_too_small_names_the_level_and_the_smallest(
    native_library,
):
    program, data = deep(depth=2, remat=1)

    with pytest.raises(ValueError, match="the level 'model'.* [0-9]+ bytes"):
        step_bytes(program, data)


def test_float16_trains_with_scaled_losses():
    program, history = fitted(4, mixed_precision="float16")

    assert history["model_loss"][-1] < history["model_loss"][0]
    assert all(np.all(np.isfinite(v)) for v in program.variables)
    assert program.levels[0].model.compute_dtype == "float32"


def test_all_options_train_together():
    options = {"microbatches": 2, "mixed_precision": "bfloat16"}
    _, expected = fitted(normalized=True, **options)
    _, history = fitted(normalized=True, remat=SQRT, **options)

    for key, values in history.items():
        np.testing.assert_allclose(values, expected[key], 0.05)


def test_what_models_give_may_be_mixed_whatever_they_compute_in():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    loss = keras.losses.MeanSquaredError(reduction="none")

    def mixing(x):
        outputs = model(x)
        assert outputs.dtype == tf.float32
        return ops.mean(outputs[:, 0] * loss(x[:, :2], outputs))

    level = Level(model, mixing, "sgd", mixed_precision="bfloat16")

    kernel, _ = level.gradient(tf.ones((3, 4)))

    assert kernel.dtype == tf.float32


def test_an_overflow_anywhere_on_the_path_skips_the_update():
    huge = kmem.MixedPrecision("float16", initial_scale=2.0**40)
    program, data = deep()
    lower, upper = program.levels
    # The lower level alone computes in 16 bits: the upper level's gradient
    # passes through it.
    lower = Level(
        lower.model, lower.loss, "sgd", mixed_precision=huge, name="model"
    )
    program = Program([lower, upper])
    before = [v.numpy() for v in program.variables]

    program.fit(dict.fromkeys(("model", "weigh"), data), verbose=0)

    for variable, value in zip(program.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    scales = [float(o.dynamic_scale) for o in program.optimizers]
    assert scales == [2.0**39, 2.0**39]


def test_names_of_excluded_layers_are_those_of_any_model():
    option = kmem.MixedPrecision("bfloat16", exclude=("d0",))
    fitted(epochs=1, mixed_precision=option)

    option = kmem.MixedPrecision("bfloat16", exclude=("unknown",))
    with pytest.raises(ValueError, match="must name layers of the model"):
        fitted(mixed_precision=option)


def product_bytes(hypergradient, **options):
    """What a gradient through the lower level takes, in a graph."""
    program, data = deep(**options)
    program.prepare(dict.fromkeys(("model", "weigh"), data))
    lower, upper = program.levels
    x = next(iter(data))
    vector = lower.gradient(x)

    @tf.function(autograph=False)
    def run(x):
        return hypergradient(vector, lower, x, upper.variables)

    return least_peak_bytes(run, x)


def gradient_bytes(**options):
    program, data = deep(**options)
    lower = program.levels[0]
    x = next(iter(data))
    lower.look(x)
    return least_peak_bytes(tf.function(lower.gradient, autograph=False), x)


def peak_of_level(program, data):
    """What `summary` prints for the first level, and what is in use."""
    data = {level.name: data for level in program.levels}
    program.prepare(data)
    gc.collect()
    lines = []
    program.summary(data, print_fn=lines.append)
    _, _, _, _, size, unit, *_ = lines[0].splitlines()[1].split()
    assert unit == "MB"
    return 1e6 * float(size), kmem.memory.current("CPU")


def test_the_summary_tells_the_peak_of_a_step_hence_of_a_micro_batch(
    native_library,
):
    needed_bytes = []
    for options in ({}, {"microbatches": 8}):
        program, data = deep(rows=2**13, depth=12, **options)
        program = Program(program.levels[:1])
        peak, in_use = peak_of_level(program, data)
        # A batch may be there once more in one of them, and of operations in
        # another order one activation, which is as large as the batch.
        [x] = data
        difference = peak - step_bytes(program, data)
        assert abs(difference) <= 2.1 * x.numpy().nbytes
        needed_bytes.append(peak - in_use)

    assert needed_bytes[1] < 0.4 * needed_bytes[0]


def test_the_summary_is_that_of_the_data_it_is_given(native_library):
    program, data = deep()
    fewer = data.map(lambda x: x[:512])
    peak, in_use = peak_of_level(program, data)

    assert peak_of_level(program, fewer)[0] - in_use < (peak - in_use) / 2
    assert peak_of_level(program, data)[0] == pytest.approx(peak, rel=0.01)


def test_a_product_in_micro_batches_takes_less_than_a_plain_gradient(
    native_library,
):
    plain = gradient_bytes()

    assert product_bytes(Identity(), microbatches=4) <= plain
    assert product_bytes(FiniteDifference(), microbatches=4) <= plain / 2


def test_recomputation_makes_a_product_smaller(native_library):
    case = {"depth": 16, "microbatches": 2}
    recomputed = product_bytes(Identity(), remat=SQRT, **case)

    assert recomputed < 0.85 * product_bytes(Identity(), **case)
