"""Models of all kinds, and how the tests of mixed precision look at them."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from kmem import precision
from kmem.base import patching
from kmem.precision import guards

DTYPES = ("bfloat16", "float16")


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
            stack.enter_context(patching.attribute(layer, "call", call))
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
