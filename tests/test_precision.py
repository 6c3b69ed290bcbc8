"""Mixed precision on a built model, and off again."""

import contextlib
import functools
import gc
import subprocess
import sys
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from kmem import capture
from kmem import precision
from kmem.options import MixedPrecision
from kmem.precision import guards

DTYPES = ("bfloat16", "float16")
IDS = np.array([[1001, 2049], [4097, 257]])


def build_mlp():
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.3)(x)
    x = keras.ops.concatenate([x, x * 2.0], axis=-1)
    return keras.Model(inputs, layers.Dense(3)(x)), normal(4, 6)


def build_cnn():
    inputs = keras.Input((6, 6, 3))
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.SeparableConv2D(4, 3, activation="relu")(x)
    x = layers.Conv2D(4, 3, padding="same")(x)
    x = layers.GroupNormalization(2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(3)(x)), normal(4, 6, 6, 3) * 255


def build_nested():
    block = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6), layers.LayerNormalization()]
    )
    inner = keras.Input((6,))
    inner = keras.Model(inner, layers.Add()([block(inner), inner]))
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(3)(inner(inputs))), normal(4, 6)


class OwnWeights(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(6,), initializer="ones")
        self.blocks = [layers.Dense(6), layers.Dense(3)]

    def call(self, inputs):
        x = inputs * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def build_subclassed():
    return OwnWeights(), normal(4, 6)


def build_recurrent(layer):
    def build():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(9, 4, mask_zero=True)(inputs)
        x = layer(x)
        data = np.random.RandomState(0).randint(0, 9, (4, 5))
        return keras.Model(inputs, layers.Dense(3)(x)), data

    return build


def build_attention():
    inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
    x = layers.LayerNormalization()(x + inputs)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(3)(x)), normal(4, 5, 8)


def build_normalization():
    data = normal(4, 6)
    normalization = layers.Normalization(name="normalization")
    normalization.adapt(data)
    inputs = keras.Input((6,))
    x = layers.Lambda(lambda x: keras.ops.tanh(x) * 2.0)(normalization(inputs))
    return keras.Model(inputs, layers.Dense(3)(x)), data


MODELS = {
    "mlp": build_mlp,
    "cnn": build_cnn,
    "nested": build_nested,
    "subclassed": build_subclassed,
    "lstm": build_recurrent(lambda x: layers.LSTM(4, dropout=0.2)(x)),
    "gru": build_recurrent(lambda x: layers.GRU(4, recurrent_dropout=0.2)(x)),
    "bidirectional": build_recurrent(
        lambda x: layers.Bidirectional(layers.LSTM(4))(x)
    ),
    "attention": build_attention,
    "normalization": build_normalization,
}


def build_application(name):
    build = getattr(keras.applications, name)
    model = build(weights=None, input_shape=(32, 32, 3), classes=3)
    return model, normal(4, 32, 32, 3)


def normal(*shape):
    return np.random.RandomState(0).normal(size=shape).astype("float32")


def compiled(model, data, optimizer=None):
    keras.utils.set_random_seed(0)
    model(data)
    loss = keras.losses.MeanSquaredError()
    model.compile(optimizer or keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def step_of(model, option, mode):
    """A step as kmem's trainer makes it: options only while Python runs."""

    def step(data):
        with precision.applied(model, option):
            return model.train_step(data)

    if mode == "eager":
        return step
    return tf.function(step, jit_compile=mode == "xla", autograph=False)


def policies(model):
    return [layer.dtype_policy for layer in guards.all_layers(model)]


def is_plain(model):
    """Nothing of kmem is left on any layer."""
    return all(
        "call" not in vars(layer)
        and type(layer.dtype_policy).__module__.startswith("keras.")
        for layer in guards.all_layers(model)
    )


def output_dtypes(model, data, option):
    """Name of a layer -> dtype of what it returned, while `option` acts."""
    seen = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(precision.applied(model, option))
        for layer in guards.all_layers(model):
            call = recording(layer, seen)
            stack.enter_context(capture.attribute(layer, "call", call))
        model(data, training=True)
    return seen


def recording(layer, seen):
    call = layer.call

    @functools.wraps(call)
    def recording_call(*args, **kwargs):
        outputs = call(*args, **kwargs)
        seen[layer.name] = keras.tree.flatten(outputs)[0].dtype.name
        return outputs

    return recording_call


def check_trains_and_leaves_no_trace(model, data, dtype, mode):
    compiled(model, data)
    target = np.ones((len(data), 3), "float32")
    model.train_on_batch(data, target)
    before = policies(model), [v.numpy() for v in model.variables]
    prediction = model.predict(data, verbose=0)
    step = step_of(model, MixedPrecision(dtype), mode)
    logs = step((tf.constant(data), target))
    assert np.isfinite(logs["loss"].numpy())
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_built_model_trains_in_16_bits_and_is_itself_again(name, dtype):
    model, data = MODELS[name]()
    check_trains_and_leaves_no_trace(model, data, dtype, "graph")


@pytest.mark.parametrize("mode", ("eager", "xla"))
def test_all_modes_train_and_leave_no_trace(mode):
    model, data = build_mlp()
    check_trains_and_leaves_no_trace(model, data, "bfloat16", mode)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("MobileNetV2", "EfficientNetB0"))
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalization_sees_its_inputs_unrounded(dtype):
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
    with precision.applied(model, MixedPrecision(dtype)):
        np.testing.assert_array_equal(model(data), [[1.0], [-1.0]])


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


def test_a_quantized_layer_is_named():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="q")])
    model.layers[0].quantize("int8")
    with pytest.raises(ValueError, match=r"Received: 'q' \(int8\)"):
        with precision.applied(model, MixedPrecision("bfloat16")):
            pass


@pytest.mark.parametrize("name", ("mlp", "attention", "bidirectional"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_is_left_out_computes_in_float32(name, dtype):
    model, data = MODELS[name]()
    model(data)
    chosen = model.layers[2]
    option = MixedPrecision(dtype, exclude=(chosen.name,))
    seen = output_dtypes(model, data, option)
    inside = {layer.name for layer in guards.all_layers(chosen)}
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
    "muon": lambda: keras.optimizers.Muon(),
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


def test_an_unbuilt_model_is_refused():
    model = keras.Sequential([layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must be built before its loss"):
        precision.loss_scaled(model, MixedPrecision("float16"))


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


def test_what_a_fit_reached_does_not_keep_the_optimizer_alive():
    from kmem.precision import loss_scale

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


MIRRORED = """
import numpy as np, keras, tensorflow as tf
from kmem import precision
from kmem.options import MixedPrecision
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential([
        keras.Input((1,), dtype="int32"), keras.layers.Embedding(4, 2),
        keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(), "mse")
option = MixedPrecision("float16", initial_scale=4.0)
wrapper = precision.loss_scaled(model, option)
policy = model.layers[-1].dtype_policy

def step(data):
    x, y = data
    with precision.applied(model, option):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(x), "float32") * y)
            loss = wrapper.scale_loss(loss)
        assert model.layers[-1].compute_dtype == "float16"
        variables = model.trainable_variables
        wrapper.apply(tape.gradient(loss, variables), variables)

@tf.function
def run(data):
    strategy.run(step, args=(data,))

def batch(bad):
    def value(context):
        replica = context.replica_id_in_sync_group
        y = np.inf if replica == bad else 1.0
        return tf.constant([[1]]), tf.fill((1, 2), np.float32(y))
    pair = [strategy.experimental_distribute_values_from_function(
        lambda context, i=i: value(context)[i]) for i in (0, 1)]
    return tuple(pair)

weights = model.get_weights()
for bad, scale in ((0, 2.0), (1, 1.0)):
    run(batch(bad))
    assert wrapper.dynamic_scale.numpy() == scale, wrapper.dynamic_scale
    assert all(map(np.array_equal, model.get_weights(), weights))
run(batch(None))
assert wrapper.dynamic_scale.numpy() == 1.0
assert np.isfinite(model.get_weights()[1]).all()
assert not np.array_equal(model.get_weights()[1], weights[1])
assert model.layers[-1].dtype_policy is policy
"""


def test_an_overflow_on_any_replica_skips_the_update_on_all():
    result = subprocess.run(
        [sys.executable, "-c", MIRRORED],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


class Embeds(keras.Model):
    """Its `select` says how the ids get from the input to the table."""

    def __init__(self, select, table=None):
        super().__init__()
        self.select = select
        self.table = table or layers.Embedding(5000, 2, name="table")

    def call(self, inputs):
        return self.table(self.select(inputs))


class Within(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)


def functional_table(shape):
    inputs = keras.Input(shape)
    table = layers.Embedding(5000, 2, name="table")
    return keras.Model(inputs, table(inputs))


def sequential_table():
    return keras.Sequential(
        [keras.Input((2,)), layers.Embedding(5000, 2, name="table")]
    )


class OwnTable(layers.Layer):
    """An embedding that a user wrote."""

    def build(self, input_shape):
        self.rows = self.add_weight(shape=(5000, 2))

    def call(self, inputs):
        return tf.gather(self.rows, tf.cast(inputs, "int32"))


REACHED = {
    "subclassed": lambda: Embeds(lambda x: x),
    "in a layer": lambda: Embeds(
        lambda x: x, Within(layers.Embedding(5000, 2))
    ),
    "functional": lambda: functional_table((2,)),
    "sequential": sequential_table,
    "functional in subclassed": lambda: Embeds(
        lambda x: x, functional_table((2,))
    ),
    "sequential in subclassed": lambda: Embeds(lambda x: x, sequential_table()),
}


@pytest.mark.parametrize("name", REACHED)
@pytest.mark.parametrize("mode", ("eager", "graph"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_ids_reach_their_rows_exactly(name, mode, dtype):
    model = REACHED[name]()
    expected = model(IDS)
    function = model
    if mode == "graph":
        function = tf.function(model, autograph=False)
    with precision.applied(model, MixedPrecision(dtype)):
        rows = function(tf.constant(IDS, "float32"))
        assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, tf.cast(expected, dtype))


def reshaped():
    inputs = keras.Input((2,))
    x = layers.Reshape((1, 2))(inputs)
    return keras.Model(inputs, layers.Embedding(5000, 2, name="table")(x))


def in_a_loop(x):
    return tf.map_fn(lambda row: row + 0, x)


ROUNDED = {
    "sliced": lambda: Embeds(lambda x: x[:, 0]),
    "shifted": lambda: Embeds(lambda x: x + 1.0),
    "cast up": lambda: Embeds(lambda x: tf.cast(x, "float32")),
    "sliced into functional": lambda: Embeds(
        lambda x: x[:, :1], functional_table((1,))
    ),
    "reshaped": reshaped,
    "in a loop": lambda: Embeds(in_a_loop),
    "in a function": lambda: Embeds(tf.function(lambda x: x * 1)),
    "own table": lambda: Embeds(lambda x: x, OwnTable(name="table")),
    "own table, sliced": lambda: Embeds(
        lambda x: x[:, 0], OwnTable(name="table")
    ),
    "own table in a function": lambda: Embeds(
        lambda x: x, Within(layers.Lambda(tf.function(to_int), name="table"))
    ),
}


def to_int(x):
    return tf.one_hot(tf.cast(x, "int32"), 3)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("mode", ("eager", "graph"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_that_would_be_rounded_raise(name, mode, dtype):
    model = ROUNDED[name]()
    function = model
    if mode == "graph":
        function = tf.function(model, autograph=False)
    with precision.applied(model, MixedPrecision(dtype)):
        with pytest.raises(ValueError, match="Layer 'table' must get ids as"):
            function(tf.constant(IDS, "float32"))
    assert is_plain(model)
    assert not guards._thread.running


@pytest.mark.parametrize("name", ("sliced", "in a loop", "own table, sliced"))
def test_integer_ids_may_take_any_way(name):
    model = ROUNDED[name]()
    expected = model(IDS)
    with precision.applied(model, MixedPrecision("bfloat16")):
        rows = model(tf.constant(IDS))
    np.testing.assert_array_equal(rows, tf.cast(expected, "bfloat16"))


def test_a_layer_that_is_left_out_sees_its_inputs_unrounded():
    model = Embeds(lambda x: x, OwnTable(name="table"))
    expected = model(IDS)
    option = MixedPrecision("bfloat16", exclude=("table",))
    with precision.applied(model, option):
        rows = model(tf.constant(IDS, "float32"))
    np.testing.assert_array_equal(rows, expected)


def test_integers_made_of_computed_values_are_no_ids():
    class Codes(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)

        def call(self, inputs):
            codes = tf.cast(self.dense(inputs), "int32")
            return inputs * tf.cast(codes, inputs.dtype)

    model = keras.Sequential([keras.Input((4,)), Codes()])
    with precision.applied(model, MixedPrecision("bfloat16")):
        assert model(normal(3, 4)).dtype == "bfloat16"


class Constant(layers.Layer):
    def __init__(self, name, function=tf.matmul):
        super().__init__(name=name)
        self.function = function
        self.constant = tf.ones((6, 3))

    def call(self, inputs):
        return self.function(inputs, self.constant)


MIXES_DTYPES = {
    "layer": lambda: Constant("mixes"),
    "lambda": lambda: layers.Lambda(
        lambda x: tf.matmul(x, tf.ones((6, 3))), name="mixes"
    ),
    "nested": lambda: Within(Within(Constant("mixes"))),
    "operator": lambda: Constant("mixes", lambda x, c: x @ c + 0),
}


@pytest.mark.parametrize("name", MIXES_DTYPES)
@pytest.mark.parametrize("mode", ("eager", "graph"))
def test_float16_code_with_a_float32_constant_is_named(name, mode):
    model = keras.Sequential([keras.Input((6,)), MIXES_DTYPES[name]()])
    compiled(model, normal(4, 6))
    data = normal(4, 6), np.ones((4, 3), "float32")
    message = r"Layer 'mixes' must compute.*exclude=\('mixes',\)\)` *\. Rec"
    with pytest.raises(ValueError, match=message.replace(" *", "")):
        step_of(model, MixedPrecision("float16"), mode)(data)
    assert is_plain(model)
    option = MixedPrecision("float16", exclude=("mixes",))
    with precision.applied(model, option):
        assert model(normal(4, 6)).dtype == "float32"


@pytest.mark.parametrize("name", MIXES_DTYPES)
def test_bfloat16_code_that_promotes_is_named_once(name):
    model = keras.Sequential([keras.Input((6,)), MIXES_DTYPES[name]()])
    option = MixedPrecision("bfloat16")
    with precision.applied(model, option):
        with pytest.warns(UserWarning, match="'mixes' computes in") as caught:
            model(normal(4, 6))
            model(normal(4, 6))
    assert len(caught) == 1


def test_a_head_that_is_left_out_is_no_reason_to_warn():
    class Head(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = layers.Dense(4)
            self.head = layers.Dense(3, name="head")

        def call(self, inputs):
            return self.head(self.body(inputs))

    option = MixedPrecision("bfloat16", exclude=("head",))
    model = Head()
    with precision.applied(model, option), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(normal(4, 6)).dtype == "float32"


def test_other_errors_of_a_layer_pass_as_they_are():
    def fail(x):
        raise ValueError("something else")

    model = keras.Sequential(
        [keras.Input((6,)), layers.Lambda(fail, output_shape=(6,))]
    )
    with precision.applied(model, MixedPrecision("float16")):
        with pytest.raises(ValueError, match="something else") as caught:
            model(normal(4, 6))
    assert "kmem" not in str(caught.value)
