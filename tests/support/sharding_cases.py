"""Models that are cut into shards in different ways, as those of cases.py."""

import keras
import numpy as np
from cases import NUM_ROWS
from cases import dense
from cases import regression
from cases import rng
from cases import sequences
from keras import layers


def _images():
    floatx = keras.config.floatx()
    x = rng().normal(size=(NUM_ROWS, 8, 8, 3)).astype(floatx)
    return {"x": x, "y": np.mean(x, axis=(1, 2))}


def convolutions():
    """Kernels of all kinds, with statistics of the whole batch."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(5, 3, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.DepthwiseConv2D(3, activation="tanh"),
            layers.SeparableConv2D(7, 3, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model, _images()


def _block(x):
    attended = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.LayerNormalization()(x + attended)
    hidden = layers.Dense(16, activation="gelu")(x)
    return layers.LayerNormalization()(x + layers.Dense(8)(hidden))


def transformer():
    """Not with Adam, which is another one for rows that repeat in a batch."""
    ids, targets = sequences()
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(11, 8)(inputs)
    outputs = layers.Dense(2)(_block(_block(x)))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model, {"x": ids, "y": targets}


def words():
    """Classes of tokens, of which a mask counts some."""
    ids, _ = sequences()
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=True)(inputs)
    outputs = layers.Dense(30)(layers.Dense(8, "tanh")(_block(x)))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, weighted_metrics=["acc"])
    return model, {"x": ids, "y": (ids * 7 + 3) % 30}


def recurrent():
    """Loops, and a mask that the loss counts by."""
    ids, targets = sequences()
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(11, 4, mask_zero=True),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.GRU(4, return_sequences=True),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model, {"x": ids, "y": targets}


class Own(keras.Model):
    """Weights of its own, one of them a scalar, and a layer called twice."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.offset = self.add_weight(shape=(5,), initializer="zeros")
        self.shared = layers.Dense(5, activation="tanh")
        self.last = layers.Dense(3)

    def build(self, input_shape):
        self.shared.build(input_shape)
        self.last.build(input_shape)

    def call(self, x):
        x = self.shared(x * self.scale + self.offset)
        return self.last(self.shared(x))


def own_model():
    model = Own()
    model.build((None, 5))
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model, regression()


class Again(layers.Layer):
    """Runs again by itself, with variables that the function it wraps reads."""

    def __init__(self, wrap=keras.remat, **arguments):
        super().__init__(**arguments)
        self.wrap = wrap

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 4))
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        def function(x):
            return keras.ops.tanh((x @ self.kernel) * self.scale)

        return self.wrap(function)(x)


def own_gradients(wrap=keras.remat):
    """Gradients that are not those of the operations, in a shared layer."""
    inputs = keras.Input((5,))
    again = Again(wrap, name="again")
    outputs = layers.Dense(3)(again(layers.Dense(5)(again(inputs))))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model, regression()


def _wide(inputs, outputs, optimizer):
    """Weights that stay whole beside a large one."""
    outputs += layers.Dense(2, bias_regularizer="l2")(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, "mse", metrics=["mae"])
    x = rng().normal(size=(NUM_ROWS, 3000)).astype(keras.config.floatx())
    return model, {"x": x, "y": x[:, :2]}


def wide():
    optimizer = keras.optimizers.AdamW(1e-2, global_clipnorm=0.1)
    inputs = keras.Input((3000,))
    return _wide(inputs, inputs[:, :2], optimizer)


def wide_lookup():
    """As in `transformer`, not with Adam."""
    inputs = keras.Input((3000,))
    signs = keras.ops.cast(inputs[:, 0] > 0, "int32")
    outputs = layers.Embedding(2, 2)(signs)
    return _wide(inputs, outputs, keras.optimizers.SGD(1e-3))


def everything():
    """What an optimizer can do besides, all at once."""
    optimizer = keras.optimizers.AdamW(
        1e-2,
        weight_decay=0.1,
        global_clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
        gradient_accumulation_steps=2,
    )
    model = dense(optimizer=optimizer, steps_per_execution=2)
    return model, regression()


SHARDED = {
    "convolutions": convolutions,
    "transformer": transformer,
    "words": words,
    "recurrent": recurrent,
    "own_model": own_model,
    "own_gradients": own_gradients,
    "wide": wide,
    "wide_lookup": wide_lookup,
    "everything": everything,
}
