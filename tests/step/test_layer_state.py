"""What layers keep changes once a batch, in micro-batches as without them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from reference import MODES
from reference import relative_error
from reference import state
from reference import train

import kmem
from kmem.fit.session import Session


class CallCounter(layers.Layer):
    """Counts its calls, in whole numbers and in others."""

    def build(self, input_shape):
        self.calls = [
            self.add_weight(shape=(), dtype=dtype, trainable=False)
            for dtype in ("int32", "float32")
        ]

    def call(self, inputs):
        for count in self.calls:
            count.assign(count + 1)
        return inputs


def case(make):
    def made():
        layers_ = [keras.Input((4,)), make(), layers.Dense(1)]
        model = keras.Sequential(layers_)
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(32, 4))
        return model, {"x": x, "y": x[:, :1], "batch_size": 16}

    return made


def spectral():
    return layers.SpectralNormalization(layers.Dense(3))


@pytest.mark.filterwarnings("ignore:Layers whose state")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [spectral, CallCounter])
def test_state_that_depends_on_no_example_is_that_of_the_whole_batch(
    make, mode
):
    """Of 16 rows, three micro-batches are not equal."""
    whole, _ = train(case(make), mode=mode)
    parts, _ = train(case(make), mode=mode, microbatches=3)

    assert relative_error(state(parts), state(whole)) < 1e-12


def test_a_layer_that_assigns_its_weight_can_come_in_parts():
    model, _ = case(spectral)()
    session = Session(model, kmem.MemoryOptions(microbatches=2))
    batch = tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))

    assert session.layers_that_differ(batch) == []


@pytest.mark.filterwarnings("ignore:Layers whose state")
@pytest.mark.parametrize("mode", MODES)
def test_a_moving_mean_is_that_of_the_whole_batch(mode):
    whole, _ = train(case(layers.BatchNormalization), mode=mode)
    parts, _ = train(case(layers.BatchNormalization), mode=mode, microbatches=3)

    means = [model.layers[0].moving_mean.numpy() for model in (parts, whole)]
    np.testing.assert_allclose(*means, rtol=1e-12)


def test_layers_whose_state_depends_on_examples_are_named_once():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.BatchNormalization(name="normalized"),
            CallCounter(),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    x = np.ones((8, 4))
    fit = kmem.wrap(model).fit

    with pytest.warns(UserWarning, match="see one micro-batch") as warnings:
        fit(x, x[:, :1], microbatches=2, verbose=0)
    fit(x, x[:, :1], microbatches=2, verbose=0)

    told = [each for each in warnings if each.category is UserWarning]
    (message,) = [str(warning.message) for warning in told]
    assert message.endswith(
        "microbatches=2, layers normalized (BatchNormalization)"
    )


@pytest.mark.parametrize(
    "options", [{"microbatches": 2}, {"memory_budget": "1GB"}], ids=str
)
def test_a_state_for_each_example_is_refused_before_training(options):
    inputs = keras.Input(batch_shape=(8, 3, 2))
    outputs = layers.Bidirectional(layers.LSTM(2, stateful=True))(inputs)
    model = kmem.Model(inputs, outputs)
    model.compile("sgd", "mse")
    before = model.get_weights()

    with pytest.raises(ValueError, match=r"with stateful=True"):
        model.fit(np.ones((8, 3, 2)), np.ones((8, 4)), **options, batch_size=8)

    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "option", ["microbatches", "gradient_accumulation_steps"]
)
def test_weights_that_no_gradient_updates_are_refused(option):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    model.layers[0].quantize("float8")
    model.compile("sgd", "mse")

    with pytest.raises(ValueError, match="overwrite_with_gradient=True"):
        kmem.wrap(model).fit(np.ones((8, 4)), np.ones((8, 4)), **{option: 2})
