"""A program stays within one memory budget, and keeps its numbers."""

import dataclasses
import gc
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from peaks import program_peaks

import kmem
from kmem.multilevel import Level
from kmem.multilevel import Program
from kmem.multilevel import level_plan

ROWS, WIDTH = 1024, 32


def one_level(block=(), **options):
    """A program whose activations take most memory."""
    keras.utils.set_random_seed(0)
    dense = [layers.Dense(WIDTH, "tanh") for _ in range(6)]
    model = keras.Sequential(
        [keras.Input((4,)), *dense, *block, layers.Dense(1)], name="model"
    )

    def loss(x):
        return ops.mean(ops.square(model(x, training=True) - 1.0))

    return Program([Level(model, loss, keras.optimizers.SGD(0.1), **options)])


def two_levels(**options):
    """The same, where another level learns what each error counts."""
    [lower] = one_level(**options).levels
    model, loss = lower.model, lower.loss
    weigh = keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, "sigmoid")], name="weigh"
    )

    def weighted_loss(x):
        errors = ops.square(model(x) - 1.0)
        return ops.mean(weigh(ops.stop_gradient(errors)) * errors)

    lower.loss = weighted_loss
    return Program([lower, Level(weigh, loss, keras.optimizers.SGD(0.1))])


def in_use():
    gc.collect()
    return kmem.memory.current("CPU")


def fit(program, rows=ROWS, **options):
    """Trains, and returns the most bytes of a step."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 4)).astype("float32")
    data = tf.data.Dataset.from_tensors(x)
    return max(program_peaks(program, data, 2, **options))


def plain(make, **options):
    """What a plain step adds to what is in use, and the weights after it."""
    program = make(**options)
    before = in_use()
    needed = fit(program) - before
    return needed, program.get_weights()


@pytest.fixture(scope="module")
def one():
    return plain(one_level)


@pytest.fixture(scope="module")
def two():
    return plain(two_levels)


def options_of(program):
    return [level.options for level in program.levels]


def assert_near(program, weights, tolerance=1e-6):
    for found, wanted in zip(program.get_weights(), weights, strict=True):
        np.testing.assert_allclose(found, wanted, 0, tolerance)


def test_levels_that_fit_are_left_as_they_are(native_library, two):
    needed, weights = two
    program = two_levels()

    fit(program, memory_budget=in_use() + int(1.3 * needed))

    assert all(level.options is level.given_options for level in program.levels)
    assert_near(program, weights, 0)


@pytest.mark.parametrize(
    "share", [pytest.param(0.5, marks=pytest.mark.slow), 0.2]
)
def test_a_step_of_all_levels_stays_within_the_budget(
    share, native_library, two
):
    needed, weights = two
    program = two_levels()
    budget = in_use() + int(share * needed)

    assert fit(program, memory_budget=budget) <= budget

    lower, upper = (level.options.num_parts for level in program.levels)
    assert lower > upper
    assert_near(program, weights)


@pytest.mark.parametrize(
    "layer", [layers.BatchNormalization, lambda: layers.Dropout(0.3, seed=1)]
)
def test_a_level_whose_loss_assigns_recomputes_instead(layer, native_library):
    needed, weights = plain(one_level, block=[layer()])
    program = one_level(block=[layer()])
    budget = in_use() + int(0.6 * needed)

    assert fit(program, memory_budget=budget) <= budget

    [level] = program.levels
    assert level.options.remat is not None and level.options.num_parts == 1
    assert_near(program, weights)


def test_the_fewest_micro_batches_that_fit_are_chosen(native_library, one):
    share, count = 0.5, 4
    program = one_level()
    fit(program, memory_budget=in_use() + int(share * one[0]))
    [options] = options_of(program)
    assert options.num_parts == count and options.remat is None

    # The next that divides the batch takes more than that.
    program = one_level(microbatches=count // 2)
    budget = in_use() + int(share * one[0])
    assert fit(program) > budget


def test_a_batch_that_has_no_divisors_is_not_split_into_its_examples(
    native_library, one
):
    program = one_level()
    fit(program, 1021, memory_budget=in_use() + int(0.5 * one[0]))

    [options] = options_of(program)
    assert options.num_parts == 4


def too_small(program, **options):
    """The smallest budget that is known, as the error says it."""
    message = r"room for the level 'model': give a budget of (\d+) bytes \("
    with pytest.raises(ValueError, match=message) as caught:
        fit(program, rows=4, **options)
    return int(re.search(message, str(caught.value))[1])


def test_a_budget_that_is_too_small_names_the_level_and_one_that_is_not(
    native_library,
):
    program = one_level()
    before = program.get_weights()

    budget = too_small(program, memory_budget=1)

    assert_near(program, before, 0)
    [level] = program.levels
    assert level.options is level.given_options and level.plan is None
    assert fit(program, rows=4, memory_budget=budget) <= budget
    fit(program, rows=4)
    assert options_of(program) == [program.levels[0].given_options]


@pytest.fixture
def needing_more(monkeypatch):
    """Whole steps need so many bytes more than their levels."""
    measure = level_plan.measure
    more_bytes = []

    def measured(program, levels):
        step = measure(program, levels)
        if step is None or len(levels) == 1:
            return step
        peak_bytes = step.peak_bytes + sum(more_bytes)
        return dataclasses.replace(step, peak_bytes=peak_bytes)

    monkeypatch.setattr(level_plan, "measure", measured)
    return more_bytes.append


@pytest.mark.slow
def test_what_whole_steps_need_beyond_is_taken_from_the_levels(
    native_library, two, needing_more
):
    needed, _ = two
    needing_more(int(0.8 * needed))
    program = two_levels()

    fit(program, memory_budget=in_use() + int(1.4 * needed))

    lower, upper = (level.options.num_parts for level in program.levels)
    assert (lower, upper) == (2, 1)


def test_what_whole_steps_need_beyond_is_in_the_budget_that_is_named(
    native_library, needing_more, two
):
    needing_more(two[0] // 10)
    given = in_use() + two[0] // 12

    assert too_small(two_levels(), memory_budget=given) > given


@pytest.mark.parametrize(
    "given, options, message",
    [
        ({}, {"sharding": "gradients"}, "beside sharding=Sharding"),
        ({"remat": "auto"}, {}, "beside remat=.* of level 'model'"),
    ],
)
def test_what_chooses_as_well_is_refused(given, options, message):
    with pytest.raises(
        ValueError, match=f"`memory_budget` must be .*{message}"
    ):
        fit(one_level(**given), memory_budget="1GB", **options)


def test_it_is_chosen_anew_for_other_batches_and_not_kept(native_library, one):
    program = one_level()
    [level] = program.levels
    budget = in_use() + int(0.5 * one[0])

    fit(program, memory_budget=budget)
    assert level.options.num_parts == 4
    fit(program, rows=ROWS // 4, memory_budget=budget)
    assert level.options is level.given_options
    fit(program, memory_budget=budget)
    assert level.options.num_parts == 4
    fit(program)
    assert level.options is level.given_options
