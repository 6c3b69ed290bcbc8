"""Uses that differ in the model."""

import keras
import tensorflow as tf
from keras import layers
from keras import ops

from uses.arrays import compiled
from uses.arrays import dense
from uses.arrays import integers
from uses.arrays import normal
from uses.arrays import regression
from uses.arrays import tokens
from uses.arrays import trained
from uses.harness import in_32_bits


def functional(trainer):
    x, y = regression()
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(inputs)
    hidden = layers.add([hidden, layers.Dense(6, "gelu")(hidden)])
    model = compiled(keras.Model(inputs, layers.Dense(3)(hidden)))
    trainer.fit(model, x, y)
    return model


def subclassed(trainer):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = [layers.Dense(6, "tanh") for _ in range(2)]
            self.out = layers.Dense(3)

        def call(self, x):
            for layer in self.hidden:
                x = layer(x)
            return self.out(x)

    model = compiled(Own())
    trainer.fit(model, *regression())
    return model


def _two_inputs(trainer, pack):
    x, y = regression()
    inputs = [keras.Input((5,), name="a"), keras.Input((2,), name="b")]
    joined = layers.Concatenate()([layers.Dense(4)(i) for i in inputs])
    model = compiled(keras.Model(pack(inputs), layers.Dense(3)(joined)))
    trainer.fit(model, pack([x, normal(2, seed=3)]), y)
    return model


def list_of_inputs(trainer):
    return _two_inputs(trainer, list)


def tuple_of_inputs(trainer):
    return _two_inputs(trainer, tuple)


def dict_of_inputs(trainer):
    return _two_inputs(trainer, lambda pair: dict(zip("ab", pair, strict=True)))


def _two_outputs(trainer, pack):
    x, y = regression()
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(inputs)
    outputs = [layers.Dense(3, name="a")(hidden)]
    outputs += [layers.Dense(1, name="b")(hidden)]
    model = compiled(
        keras.Model(inputs, pack(outputs)),
        loss=pack(["mse", "mae"]),
        loss_weights=pack([1.0, 0.3]),
        metrics=pack([["mae"], ["mse"]]),
    )
    trainer.fit(model, x, pack([y, y[:, :1]]))
    return model


def list_of_outputs(trainer):
    return _two_outputs(trainer, list)


def tuple_of_outputs(trainer):
    return _two_outputs(trainer, tuple)


def dict_of_outputs(trainer):
    return _two_outputs(trainer, lambda two: dict(zip("ab", two, strict=True)))


def output_without_a_loss(trainer):
    x, y = regression()
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(inputs)
    outputs = [layers.Dense(3)(hidden), layers.Dense(1)(hidden)]
    model = compiled(keras.Model(inputs, outputs), loss=["mse", None])
    trainer.fit(model, x, [y, y[:, :1]])
    return model


def nested_model(trainer):
    inside = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(4)])
    return trained(
        trainer, [layers.Dense(5), inside, layers.Dense(3)], *regression()
    )


def shared_layer(trainer):
    x, y = regression()
    shared = layers.Dense(5, "tanh")
    inputs = keras.Input((5,))
    outputs = layers.Dense(3)(shared(shared(inputs)))
    model = compiled(keras.Model(inputs, outputs))
    trainer.fit(model, x, y)
    return model


def frozen_layers(trainer):
    model = dense()
    model.layers[0].trainable = False
    compiled(model)
    trainer.fit(model, *regression())
    return model


def add_loss(trainer):
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(0.3 * ops.mean(ops.square(x)))
            return x

    return trained(
        trainer,
        [layers.Dense(6, "tanh"), Penalty(), layers.Dense(3)],
        *regression(),
    )


def regularizers(trainer):
    regularized = layers.Dense(
        6, "tanh", kernel_regularizer="l2", activity_regularizer="l2"
    )
    return trained(trainer, [regularized, layers.Dense(3)], *regression())


def metric_of_a_layer(trainer):
    class Watch(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="activation")

        def call(self, x):
            self.mean.update_state(x)
            return x

    return trained(
        trainer,
        [layers.Dense(6, "tanh"), Watch(), layers.Dense(3)],
        *regression(),
    )


def convolutions(trainer):
    return trained(
        trainer,
        [
            layers.Conv2D(4, 3, activation="relu", padding="same"),
            layers.Conv2D(4, 3, padding="same", groups=2),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ],
        normal(8, 8, 2),
        normal(3, seed=9),
    )


def attention(trainer):
    x, y = normal(6, 4), normal(6, 4, seed=9)
    inputs = keras.Input((6, 4))
    attended = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    hidden = layers.LayerNormalization()(layers.add([inputs, attended]))
    outputs = layers.Dense(4)(layers.Dense(8, "gelu")(hidden))
    model = compiled(keras.Model(inputs, outputs))
    trainer.fit(model, x, y)
    return model


def dropout(trainer):
    return trained(
        trainer,
        [layers.Dense(6, "tanh"), layers.Dropout(0.5, seed=1), layers.Dense(3)],
        *regression(),
    )


def batch_normalization(trainer):
    return trained(
        trainer,
        [layers.Dense(6), layers.BatchNormalization(), layers.Dense(3)],
        *regression(),
    )


def frozen_batch_normalization(trainer):
    frozen = layers.BatchNormalization(trainable=False)
    return trained(
        trainer, [layers.Dense(6), frozen, layers.Dense(3)], *regression()
    )


def spectral_normalization(trainer):
    normalized = layers.SpectralNormalization(layers.Dense(6))
    return trained(trainer, [normalized, layers.Dense(3)], *regression())


def embedding_with_adam(trainer):
    recurrent = [layers.Embedding(11, 4), layers.SimpleRNN(5), layers.Dense(3)]
    return trained(trainer, recurrent, tokens()[0], normal(3, seed=9))


def masked_rnn(trainer):
    x, y = tokens()
    return trained(
        trainer,
        [
            layers.Embedding(11, 4, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(2),
        ],
        x,
        y,
        optimizer="sgd",
    )


def bidirectional_rnn(trainer):
    return trained(
        trainer,
        [layers.Bidirectional(layers.GRU(4)), layers.Dense(3)],
        normal(6, 4),
        normal(3, seed=9),
    )


@in_32_bits
def ctc_loss(trainer):
    x, y = normal(6, 4), integers(5, 2, low=1).astype("int32")
    inputs = keras.Input((6, 4))
    outputs = layers.Dense(5)(
        layers.SimpleRNN(4, return_sequences=True)(inputs)
    )
    model = compiled(keras.Model(inputs, outputs), loss=keras.losses.CTC())
    trainer.fit(model, x, y)
    return model


def stateful_rnn(trainer):
    x, y = normal(6, 4)[:40], normal(3, seed=9)[:40]
    size = trainer.batch_size
    inputs = keras.Input(batch_shape=(size, 6, 4))
    recurrent = layers.LSTM(5, stateful=True)
    outputs = layers.Dense(3)(recurrent(inputs))
    model = compiled(keras.Model(inputs, outputs))
    trainer.fit(model, x, y)
    return model


def preprocessing_layers(trainer):
    x, y = regression()
    scale = layers.Normalization()
    scale.adapt(x)
    return trained(trainer, [scale, layers.Dense(3)], x, y)


def strings_as_inputs(trainer):
    words = tf.constant(["red", "green", "blue"])
    x = tf.gather(words, integers(3, 1))
    inputs = keras.Input((1,), dtype="string")
    # It refuses other words.
    lookup = layers.StringLookup(
        vocabulary=["red", "green", "blue"], num_oov_indices=0
    )
    place = layers.Embedding(2, 5)(keras.ops.arange(1))
    hidden = layers.Embedding(3, 5)(lookup(inputs)) + place
    hidden = layers.Flatten()(hidden)
    outputs = layers.Dense(3)(hidden)
    model = compiled(keras.Model(inputs, outputs), optimizer="sgd")
    data = tf.data.Dataset.from_tensor_slices((x, normal(3, seed=9)))
    trainer.fit(model, data.batch(trainer.batch_size))
    return model


@in_32_bits
def lora(trainer):
    model = dense()
    for layer in model.layers:
        layer.enable_lora(2)
    compiled(model)
    trainer.fit(model, *regression())
    return model


def _lora_on(trainer, mode):
    model = dense()
    model.quantize(mode)
    for layer in model.layers:
        layer.enable_lora(2)
    compiled(model)
    trainer.fit(model, *regression())
    return model


@in_32_bits
def lora_on_int8(trainer):
    return _lora_on(trainer, "int8")


@in_32_bits
def lora_on_int4(trainer):
    return _lora_on(trainer, "int4")


USES = [
    *(functional, subclassed, list_of_inputs, tuple_of_inputs, dict_of_inputs),
    *(list_of_outputs, tuple_of_outputs, dict_of_outputs),
    *(output_without_a_loss, nested_model, shared_layer, frozen_layers),
    *(add_loss, regularizers, metric_of_a_layer, convolutions, attention),
    *(dropout, batch_normalization, frozen_batch_normalization),
    *(
        spectral_normalization,
        embedding_with_adam,
        masked_rnn,
        bidirectional_rnn,
        stateful_rnn,
        ctc_loss,
    ),
    *(
        preprocessing_layers,
        strings_as_inputs,
        lora,
        lora_on_int8,
        lora_on_int4,
    ),
]
