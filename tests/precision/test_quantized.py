"""`mixed_precision` on quantized layers: what Keras makes of a model that was
made under a mixed policy and then quantized."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import kmem
from kmem import precision
from kmem.base.private_keras import all_layers
from kmem.options import MixedPrecision

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a")
QUANTIZED = {"int8": "int8", "int4": "int4"}
# Keras 3.12 has one scale for each channel only.
if hasattr(keras.quantizers, "Int4QuantizationConfig"):
    config = keras.quantizers.Int4QuantizationConfig
    QUANTIZED["int4"] = config(block_size=None)
    QUANTIZED["int4 in groups"] = config(block_size=4)
WORDS, LENGTH = 400, 6


def adapted(quantization, policy="float32"):
    """A quantized model of all kinds of layers that Keras quantizes."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, 8)(inputs)
        x = layers.MultiHeadAttention(2, 4)(x, x)
        x = layers.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d")(x)
        x = layers.Dense(8, "gelu")(x)
        model = keras.Model(inputs, layers.Dense(5)(x))
        if isinstance(quantization, str):
            model.quantize(quantization)
        else:
            model.quantize(config=quantization)
    finally:
        keras.config.set_dtype_policy(before)
    for layer in all_layers(model):
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def trained(model, **options):
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (16, LENGTH))
    y = rng.integers(0, 5, (16, LENGTH))
    if options:
        kmem.wrap(model)
    arguments = dict(batch_size=8, epochs=2, shuffle=False, verbose=0)
    history = model.fit(x, y, **arguments, **options).history
    return history["loss"], model.get_weights()


@functools.cache
def trained_by_keras(name, dtype):
    """What Keras makes of a model that was made under a mixed policy."""
    model = adapted(QUANTIZED[name], f"mixed_{dtype}")
    if dtype == "float16":
        model.optimizer.loss_scale_factor = 2.0**15
    return trained(model)


CASES = [
    *((name, "bfloat16") for name in QUANTIZED),
    *((name, "float16") for name in QUANTIZED if name != "int8"),
]


@pytest.mark.parametrize("name, dtype", CASES)
def test_training_is_that_of_a_model_made_under_a_mixed_policy(name, dtype):
    want = trained_by_keras(name, dtype)
    model = adapted(QUANTIZED[name])
    before = [(layer.dtype_policy, layer) for layer in all_layers(model)]
    dtypes = [v.dtype for v in model.variables]

    got = trained(model, mixed_precision=dtype)

    assert got[0] == want[0]
    for some, others in zip(got[1], want[1], strict=True):
        np.testing.assert_array_equal(some, others)
    for policy, layer in before:
        assert layer.dtype_policy is policy
        assert "quantized_call" not in vars(layer)
    assert [v.dtype for v in model.variables] == dtypes
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


@pytest.mark.parametrize("option", ["microbatches", "remat", "dtr", "sharding"])
def test_other_options_agree_to_the_rounding_of_16_bits(option):
    value = {"microbatches": 2, "remat": "auto", "sharding": "full"}
    losses, weights = trained_by_keras("int8", "bfloat16")

    got, others = trained(
        adapted("int8"),
        mixed_precision="bfloat16",
        **{option: value.get(option, True)},
    )

    np.testing.assert_allclose(got, losses, rtol=2e-3)
    for some, other in zip(others, weights, strict=True):
        np.testing.assert_allclose(some, other, atol=4e-3)


def test_what_keras_does_not_compute_in_16_bits_is_refused():
    def build(mode):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="q")])
        model.layers[0].quantize(mode)
        return model

    for mode, dtype in (("int8", "float16"), ("float8", "bfloat16")):
        with pytest.raises(ValueError, match=rf"Received: 'q' \({mode}\)"):
            with precision.applied(build(mode), MixedPrecision(dtype)):
                pass


def test_a_quantized_layer_that_is_left_out_gets_its_inputs_unrounded():
    hidden = layers.Dense(4, name="hidden")
    model = keras.Sequential([keras.Input((6,)), hidden])
    hidden.quantize("int8")
    x = np.random.default_rng(0).normal(size=(2, 6)).astype("float32")
    want = model(x)

    option = MixedPrecision("bfloat16", exclude=("hidden",))
    with precision.applied(model, option):
        got = model(x)

    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", QUANTIZED)
def test_ids_as_floats_find_their_rows(name):
    inputs = keras.Input((1,))
    lookup = layers.Embedding(WORDS, 8)
    model = keras.Model(inputs, lookup(inputs))
    config = None if name == "int8" else QUANTIZED[name]
    lookup.quantize(name[:4], config=config)
    # In bfloat16 it would be 302.
    ids = np.array([[301.0]], "float32")
    want = model(ids)

    with precision.applied(model, MixedPrecision("bfloat16")):
        got = model(ids)

    np.testing.assert_allclose(got, want, rtol=0.02, atol=1e-4)
