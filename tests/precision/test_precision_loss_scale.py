"""The loss is scaled for float16, around the model's own optimizer."""

import gc
import subprocess
import sys

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from precision_models import build_mlp
from precision_models import compiled
from precision_models import is_plain
from precision_models import normal
from precision_models import step_of

import kmem
from kmem import precision
from kmem.options import MixedPrecision
from kmem.precision import loss_scale

LOADS = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
assert "kmem" not in sys.modules
assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}
optimizer = model.optimizer
assert type(optimizer) is keras.optimizers.Adam
assert int(optimizer.iterations.numpy()) == 3, optimizer.iterations
momentums = sum(np.abs(v.numpy()).sum() for v in optimizer.variables[2:])
assert momentums > 0
print(float(model(np.ones((1, 6), "float32"))[0, 0]))
"""


def test_a_file_saved_between_steps_loads_without_kmem(tmp_path):
    model, data = build_mlp()
    compiled(model, data, keras.optimizers.Adam())
    option = MixedPrecision("float16", initial_scale=8.0)
    target = np.ones((4, 3), "float32")
    model.train_on_batch(data, target)
    step = scaled_step(model, option)
    step((data, target))
    step((data, target))
    model.save(tmp_path / "model.keras")
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", LOADS]
        + [tmp_path / "model.keras"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    expected = model(np.ones((1, 6), "float32"))[0, 0]
    assert float(result.stdout) == pytest.approx(float(expected), abs=1e-6)


def scaled_step(model, option, wrapper=None, mode="graph"):
    """A float16 step: the scaling optimizer is in place only within."""
    if wrapper is None:
        wrapper = precision.loss_scaled(model, option)

    def step(data):
        inner, model.optimizer = model.optimizer, wrapper
        try:
            with precision.applied(model, option):
                return model.train_step(data)
        finally:
            model.optimizer = inner

    if mode == "eager":
        return step
    function = tf.function(step, jit_compile=mode == "xla", autograph=False)
    # As a trainer does: the graph does not keep the wrapper's variables.
    function.wrapper = wrapper
    return function


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(),
    "adam_ema": lambda: keras.optimizers.Adam(use_ema=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(momentum=0.1, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(),
    "adadelta": lambda: keras.optimizers.Adadelta(),
    "adamax": lambda: keras.optimizers.Adamax(),
    "nadam": lambda: keras.optimizers.Nadam(),
    "ftrl": lambda: keras.optimizers.Ftrl(),
    "lion": lambda: keras.optimizers.Lion(),
    "lamb": lambda: keras.optimizers.Lamb(),
    "adafactor": lambda: keras.optimizers.Adafactor(),
    "muon": cases.muon,
    "accumulating": lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
}


def small_model(optimizer, train=True):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(3, name="d")], name="m"
    )
    model.compile(optimizer, "mse")
    if train:
        model.train_on_batch(normal(4, 6), np.ones((4, 3), "float32"))
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaling_the_loss_keeps_a_used_optimizer_as_it_is(name):
    model = small_model(OPTIMIZERS[name]())
    inner = model.optimizer
    attributes = set(vars(inner))
    variables = [id(v) for v in inner.variables]
    values = [v.numpy() for v in inner.variables]
    wrapper = precision.loss_scaled(model, MixedPrecision("float16"))
    assert isinstance(wrapper, keras.optimizers.LossScaleOptimizer)
    assert wrapper.inner_optimizer is inner
    assert model.optimizer is inner
    assert set(vars(inner)) == attributes
    assert [id(v) for v in inner.variables] == variables
    for variable, value in zip(inner.variables, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    gradients = [tf.ones_like(v) for v in model.trainable_variables]
    wrapper.apply(gradients, model.trainable_variables)
    assert [id(v) for v in inner.variables] == variables


def test_a_users_optimizer_is_not_built_again():
    class Own(keras.optimizers.SGD):
        builds = 0

        def build(self, variables):
            self.builds += 1
            super().build(variables)

    model = small_model(Own())
    assert model.optimizer.builds == 1
    precision.loss_scaled(model, MixedPrecision("float16"))
    assert model.optimizer.builds == 1
    model.optimizer.build([])
    assert model.optimizer.builds == 2


def test_an_unused_optimizer_is_built_as_keras_builds_it():
    trained = small_model(keras.optimizers.Adam(name="adam"))
    model = small_model(keras.optimizers.Adam(name="adam"), train=False)
    wrapper = precision.loss_scaled(model, MixedPrecision("float16"))
    assert wrapper.built and model.optimizer.built
    paths = [v.path for v in trained.optimizer.variables]
    assert [v.path for v in model.optimizer.variables] == paths


@pytest.mark.parametrize(
    "optimizer, dtype",
    [
        (keras.optimizers.SGD(), "bfloat16"),
        (keras.optimizers.SGD(loss_scale_factor=64.0), "float16"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "float16",
        ),
    ],
    ids=["bfloat16", "static scale", "scaled by the user"],
)
def test_the_optimizer_is_taken_as_it_is(optimizer, dtype):
    factor = optimizer.loss_scale_factor
    model = small_model(optimizer)
    assert precision.loss_scaled(model, MixedPrecision(dtype)) is optimizer
    assert optimizer.loss_scale_factor == factor
    precision.remember_scale(optimizer)


def test_a_model_without_optimizer_needs_no_scale():
    model = small_model(keras.optimizers.SGD())
    model.optimizer = None
    assert precision.loss_scaled(model, MixedPrecision("float16")) is None


@pytest.mark.parametrize("mode", ("eager", "graph", "xla"))
def test_a_model_may_be_built_by_its_first_step(mode):
    model = keras.Sequential([layers.Dense(3)])
    model.compile(keras.optimizers.Adam(), "mse")
    step = scaled_step(model, MixedPrecision("float16", 4.0), mode=mode)
    data = tf.constant(normal(4, 6)), np.ones((4, 3), "float32")
    step(data)
    weights = model.get_weights()
    step(data)
    assert not any(map(np.array_equal, model.get_weights(), weights))
    assert int(model.optimizer.iterations.numpy()) == 2
    assert len(model.optimizer.variables) == 6
    assert is_plain(model)


@pytest.mark.parametrize("mode", ("eager", "graph", "xla"))
def test_the_scale_halves_on_overflow_and_doubles_after_growth_steps(mode):
    model = small_model(keras.optimizers.SGD(1e-3))
    option = MixedPrecision(
        "float16", initial_scale=2.0**7, dynamic_growth_steps=2
    )
    wrapper = precision.loss_scaled(model, option)
    step = scaled_step(model, option, wrapper, mode)
    target = np.ones((4, 3), "float32")
    weights = model.get_weights()
    step((tf.fill((4, 6), 6e4), target))
    assert wrapper.dynamic_scale.numpy() == 2.0**6
    assert all(map(np.array_equal, model.get_weights(), weights))
    scales = []
    for _ in range(4):
        step((tf.constant(normal(4, 6)), target))
        scales.append(float(wrapper.dynamic_scale.numpy()))
    assert scales == [2.0**6, 2.0**7, 2.0**7, 2.0**8]
    assert not any(map(np.array_equal, model.get_weights(), weights))
    assert model.optimizer is wrapper.inner_optimizer


def test_a_scaled_step_is_an_unscaled_one():
    def weights(option, make_step):
        model = small_model(keras.optimizers.SGD(0.1))
        step = make_step(model, option)
        step((normal(4, 6), np.ones((4, 3), "float32")))
        return model.get_weights()

    scaled = weights(
        MixedPrecision("float16", initial_scale=2.0**6), scaled_step
    )
    plain = weights(
        MixedPrecision("float16"), lambda m, o: step_of(m, o, "graph")
    )
    for one, other in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_the_next_fit_begins_with_the_scale_that_was_reached():
    model = small_model(keras.optimizers.SGD())
    option = MixedPrecision("float16", initial_scale=32.0)
    first = precision.loss_scaled(model, option)
    first.dynamic_scale.assign(4.0)
    first.step_counter.assign(1500)
    precision.remember_scale(first)
    second = precision.loss_scaled(model, option)
    assert second.dynamic_scale.numpy() == 4.0
    assert second.step_counter.numpy() == 1500
    other = MixedPrecision("float16", 32.0, dynamic_growth_steps=10)
    assert precision.loss_scaled(model, other).step_counter.numpy() == 9
    # Another first scale is a wish for that one.
    other = MixedPrecision("float16", initial_scale=16.0)
    assert precision.loss_scaled(model, other).dynamic_scale.numpy() == 16.0
    assert "scale" not in " ".join(v.path for v in model.optimizer.variables)


def test_a_scale_that_was_saved_is_the_one_that_runs():
    model = small_model(keras.optimizers.SGD())
    assert precision.scale_of(model.optimizer) is None
    option = MixedPrecision("float16", initial_scale=32.0)
    wrapper = precision.loss_scaled(model, option)
    wrapper.dynamic_scale.assign(4.0)
    saved = precision.scale_of(model.optimizer)
    wrapper.dynamic_scale.assign(1.0)

    precision.set_scale(model.optimizer, saved)

    assert wrapper.dynamic_scale.numpy() == 4.0
    again = precision.loss_scaled(model, option)
    assert again.dynamic_scale.numpy() == 4.0


def test_what_a_fit_reached_does_not_keep_the_optimizer_alive():
    model = small_model(keras.optimizers.SGD())
    before = len(loss_scale._scales)
    precision.remember_scale(
        precision.loss_scaled(model, MixedPrecision("float16"))
    )
    assert len(loss_scale._scales) == before + 1
    model.optimizer = None
    del model
    gc.collect()
    assert len(loss_scale._scales) <= before


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"gradient_accumulation_steps": 1},
        {"mixed_precision": "bfloat16"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_scale_of_a_model_that_fit_builds_is_the_one_it_has_by_then(
    options,
):
    """What a trace reads of an optimizer without variables stays."""

    def losses(**options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Dense(16, "elu"), layers.Dense(2)])
        optimizer = keras.optimizers.SGD(1.0)
        model.compile(
            # Doubled each time: a step of another scale is another step.
            keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=2.0, dynamic_growth_steps=1
            ),
            "mse",
        )
        x = np.random.default_rng(0).normal(size=(80, 8)).astype("float32")
        fit = kmem.wrap(model).fit
        history = fit(
            *(x, x[:, :2]), 16, shuffle=False, verbose=0, epochs=2, **options
        )
        return history.history["loss"]

    assert losses(**options) == pytest.approx(losses(), rel=0.05)
