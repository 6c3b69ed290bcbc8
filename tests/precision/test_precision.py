"""Mixed policies on a built model, and its own ones back."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from precision_models import DTYPES
from precision_models import MODELS
from precision_models import build_application
from precision_models import build_mlp
from precision_models import compiled
from precision_models import is_plain
from precision_models import normal
from precision_models import output_dtypes
from precision_models import policies
from precision_models import step_of

import kmem
from kmem import precision
from kmem.base.private_keras import all_layers
from kmem.options import MixedPrecision


def check_trains_and_leaves_no_trace(model, data, dtype, mode):
    compiled(model, data)
    target = np.ones((len(data), 3), "float32")
    model.train_on_batch(data, target)
    before = policies(model), [v.numpy() for v in model.variables]
    prediction = model.predict(data, verbose=0)
    step = step_of(model, MixedPrecision(dtype), mode)
    logs = step((tf.constant(data), target))
    assert np.isfinite(logs["loss"])
    assert any(
        np.any(now.numpy() != then)
        for now, then in zip(model.variables, before[1], strict=True)
    )
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    assert is_plain(model)
    for now, then in zip(policies(model), before[0], strict=True):
        assert now is then
    for variable, value in zip(model.variables, before[1], strict=True):
        variable.assign(value)
    np.testing.assert_array_equal(model.predict(data, verbose=0), prediction)


@pytest.mark.parametrize(
    "name, dtype",
    [
        # At every run each model in one of them.
        pytest.param(
            name,
            dtype,
            marks=() if (number + position) % 2 else pytest.mark.exhaustive,
        )
        for number, name in enumerate(MODELS)
        for position, dtype in enumerate(DTYPES)
    ],
)
def test_a_built_model_trains_in_16_bits_and_is_itself_again(name, dtype):
    model, data = MODELS[name]()
    check_trains_and_leaves_no_trace(model, data, dtype, "graph")


@pytest.mark.parametrize("mode", ("eager", "xla"))
def test_all_modes_train_and_leave_no_trace(mode):
    model, data = build_mlp()
    check_trains_and_leaves_no_trace(model, data, "bfloat16", mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param("MobileNetV2", "float16", marks=pytest.mark.exhaustive),
        pytest.param(
            "EfficientNetB0", "bfloat16", marks=pytest.mark.exhaustive
        ),
        pytest.param("MobileNetV2", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("EfficientNetB0", "float16", marks=pytest.mark.exhaustive),
    ],
)
def test_applications_train_and_leave_no_trace(name, dtype):
    model, data = build_application(name)
    check_trains_and_leaves_no_trace(model, data, dtype, "graph")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_computes_in_16_bits(name, dtype):
    model, data = MODELS[name]()
    model(data)
    seen = output_dtypes(model, data, MixedPrecision(dtype))
    assert len(seen) > 2
    # Its statistics are float32.
    seen.pop("normalization", None)
    assert set(seen.values()) - {"bool"} == {dtype}
    assert model(data).dtype == "float32"


@pytest.mark.parametrize("mode", ("eager", "graph"))
def test_normalization_sees_its_inputs_unrounded(mode):
    class Normalizes(keras.Model):
        def __init__(self):
            super().__init__()
            self.normalize = layers.Normalization(mean=1e4, variance=1.0)
            self.normalize.build((None, 1))

        def call(self, inputs):
            return self.normalize(inputs)

    model = Normalizes()
    data = tf.constant([[10001.0], [9999.0]])
    model(data)
    function = model
    if mode == "graph":
        function = tf.function(model, autograph=False)
    with precision.applied(model, MixedPrecision("bfloat16")):
        np.testing.assert_array_equal(function(data), [[1.0], [-1.0]])


def test_layers_that_no_public_list_shows_change_too():
    model, _ = MODELS["bidirectional"]()
    with precision.applied(model, MixedPrecision("bfloat16")):
        (bidirectional,) = (
            x for x in model.layers if isinstance(x, layers.Bidirectional)
        )
        halves = bidirectional.forward_layer, bidirectional.backward_layer
        for half in halves:
            assert half not in model.layers
            assert half.compute_dtype == "bfloat16"
            assert half.cell.compute_dtype == "bfloat16"


def test_the_gradient_is_that_of_the_model_in_a_mixed_policy():
    def gradient(policy, option):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, "gelu", dtype=policy),
                layers.Dense(3, dtype=policy),
            ]
        )
        with precision.applied(model, option), tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(normal(4, 6)) ** 2)
        return tape.gradient(loss, model.trainable_weights)

    ours = gradient("float32", MixedPrecision("bfloat16"))
    keras_own = gradient("mixed_bfloat16", MixedPrecision("bfloat16"))
    for one, other in zip(ours, keras_own, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fit_gives_the_weights_of_keras_own_mixed_precision(dtype):
    def trained(policy, **options):
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        try:
            model, data = build_mlp()
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile(keras.optimizers.Adam(), "mse")
        arguments = {"epochs": 5, "shuffle": False, "verbose": 0, **options}
        history = kmem.wrap(model).fit(data, np.ones((4, 3)), **arguments)
        return history.history["loss"], model

    own_loss, own = trained(f"mixed_{dtype}")
    loss, model = trained("float32", mixed_precision=dtype)
    assert loss == own_loss
    for one, other in zip(model.get_weights(), own.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert is_plain(model)
    assert type(model.optimizer) is keras.optimizers.Adam


@pytest.mark.parametrize("mode", ("eager", "graph"))
def test_an_exception_leaves_the_model_plain(mode):
    def fail(x):
        if x.dtype != "float32":
            raise RuntimeError("on purpose")
        return x

    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(3), layers.Lambda(fail)]
    )
    compiled(model, normal(4, 6))
    before = policies(model)
    step = step_of(model, MixedPrecision("bfloat16"), mode)
    with pytest.raises(RuntimeError, match="on purpose"):
        step((tf.constant(normal(4, 6)), np.ones((4, 3), "float32")))
    assert is_plain(model)
    assert all(a is b for a, b in zip(policies(model), before, strict=True))


def test_a_shared_map_of_policies_comes_back_as_it_was():
    policy_map = keras.dtype_policies.DTypePolicyMap("float32")
    dense = layers.Dense(3, name="dense", dtype=policy_map)
    kept = layers.Dense(3, name="kept", dtype=policy_map)
    model = keras.Sequential([keras.Input((6,)), dense, kept])
    policy_map[kept.path] = keras.DTypePolicy("mixed_float16")
    policy_map[dense.path[:-1] + ".*"] = keras.DTypePolicy("float32")
    entries = [(key, policy_map[key]) for key in policy_map]
    with precision.applied(model, MixedPrecision("bfloat16")):
        assert dense.compute_dtype == "bfloat16"
        # It computes in 16 bits already, of another kind.
        assert kept.compute_dtype == "float16"
    assert dense.dtype_policy is policy_map
    assert kept.dtype_policy is policy_map
    assert [(key, policy_map[key]) for key in policy_map] == entries


def test_layers_made_meanwhile_end_with_the_policy_around_them():
    class Lazy(layers.Layer):
        def build(self, input_shape):
            self.inner = layers.Dense(3, dtype=self.dtype_policy)
            self.inner.build(input_shape)

        def call(self, inputs):
            return self.inner(inputs)

    lazy = Lazy()
    model = keras.Sequential([lazy])
    with precision.applied(model, MixedPrecision("bfloat16")):
        assert model(normal(4, 6)).dtype == "bfloat16"
    assert lazy.inner.dtype_policy is lazy.dtype_policy
    assert is_plain(model)
    assert model(normal(4, 6)).dtype == "float32"


@pytest.mark.parametrize("order", ["abc", "acb", "bca", "cba"])
def test_entries_may_end_in_any_order(order):
    model, _ = build_mlp()
    before = policies(model)
    option = MixedPrecision("bfloat16")
    entries = {name: precision.applied(model, option) for name in "abc"}
    for entry in entries.values():
        entry.__enter__()
    for name in order:
        assert model.compute_dtype == "bfloat16"
        entries[name].__exit__(None, None, None)
    assert is_plain(model)
    assert all(a is b for a, b in zip(policies(model), before, strict=True))


def test_replicas_may_take_turns_within():
    model, data = build_mlp()
    barrier = threading.Barrier(2)
    dtypes = []

    def replica(leaves_first):
        with precision.applied(model, MixedPrecision("bfloat16")):
            barrier.wait()
            dtypes.append(model(data).dtype)
            if not leaves_first:
                barrier.wait()
                dtypes.append(model(data).dtype)
        if leaves_first:
            barrier.wait()

    threads = [threading.Thread(target=replica, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dtypes == ["bfloat16"] * 3
    assert is_plain(model)


def test_models_that_share_layers_may_be_nested():
    shared = layers.Dense(6)
    inputs = keras.Input((6,))
    inner = keras.Model(inputs, shared(inputs))
    outer = keras.Sequential([keras.Input((6,)), inner, layers.Dense(3)])
    option = MixedPrecision("bfloat16")
    with precision.applied(outer, option):
        with precision.applied(inner, option):
            assert shared.compute_dtype == "bfloat16"
        assert shared.compute_dtype == "bfloat16"
    assert is_plain(outer)


def test_two_options_at_one_time_are_refused():
    model, _ = build_mlp()
    with precision.applied(model, MixedPrecision("bfloat16")):
        with pytest.raises(ValueError, match="same for all steps"):
            with precision.applied(model, MixedPrecision("float16")):
                pass
        assert model.compute_dtype == "bfloat16"
    assert is_plain(model)


def test_a_float64_layer_is_named_before_anything_changes():
    inputs = keras.Input((6,))
    x = layers.Dense(3)(inputs)
    model = keras.Model(inputs, layers.Dense(3, "relu", dtype="float64")(x))
    name = model.layers[-1].name
    with pytest.raises(ValueError, match=rf"Received: '{name}' \(float64\)$"):
        with precision.applied(model, MixedPrecision("bfloat16")):
            pass
    assert is_plain(model)
    option = MixedPrecision("bfloat16", exclude=(name,))
    with precision.applied(model, option):
        assert model.layers[-1].compute_dtype == "float64"
        assert model(normal(4, 6)).dtype == "float64"


@pytest.mark.parametrize("name", ("mlp", "attention", "bidirectional"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_is_left_out_computes_in_float32(name, dtype):
    model, data = MODELS[name]()
    model(data)
    chosen = model.layers[2]
    option = MixedPrecision(dtype, exclude=(chosen.name,))
    seen = output_dtypes(model, data, option)
    inside = {layer.name for layer in all_layers(chosen)}
    for layer_name, output_dtype in seen.items():
        expected = "float32" if layer_name in inside else dtype
        assert output_dtype in (expected, "bool"), layer_name
    assert is_plain(model)


def test_a_misspelt_layer_to_leave_out_is_corrected():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(3, name="hidden")]
    )
    with pytest.raises(ValueError, match=r"mean 'hidden'\? Received: 'hiden'"):
        with precision.applied(
            model, MixedPrecision("float16", exclude=["hiden"])
        ):
            pass


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_penalties_of_activations_are_added_to_the_loss(dtype):
    """Also that what Keras adds them up with is where it was."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(3, activity_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile("sgd", "mse")
    x = np.ones((8, 4), "float32")
    want = model.evaluate(x, x[:, :3], verbose=0)

    history = kmem.wrap(model).fit(
        x, x[:, :3], mixed_precision=dtype, verbose=0
    )

    np.testing.assert_allclose(history.history["loss"], want, rtol=0.02)
    assert "_aggregate_additional_loss" not in vars(model)
