"""`memory_budget` computes logits and scores in chunks where that is what
fits: one example cannot be split, and logits cannot be recomputed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from peaks import peaks_bytes

import kmem

pytestmark = pytest.mark.usefixtures("native_library")

_NUM_TOKENS = 512


def _language_model():
    inputs = keras.Input((_NUM_TOKENS,), dtype="int32")
    x = layers.Embedding(4000, 16)(inputs)
    model = keras.Model(inputs, layers.Dense(4000)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tokens = np.arange(_NUM_TOKENS)[None]
    return model, loss, tokens, (tokens + 1) % 4000


def _attention(dropout=0.0, kind=layers.MultiHeadAttention):
    inputs = keras.Input((_NUM_TOKENS, 16))
    attention = kind(4, 4, dropout=dropout)
    model = keras.Model(inputs, attention(inputs, inputs))
    x = np.random.default_rng(0).normal(size=(1, _NUM_TOKENS, 16))
    return model, "mse", x.astype("float32"), x.astype("float32")


def _made(make):
    keras.utils.set_random_seed(0)
    model, loss, x, y = make()
    model.compile(keras.optimizers.SGD(0.1), loss)
    return kmem.wrap(model), tf.constant(x), tf.constant(y)


def _half(model, x, y):
    """What is in memory, and half of what a plain step adds to it."""
    added = max(peaks_bytes(model.train_on_batch, x, y))
    return kmem.memory.current() + added // 2


@pytest.mark.parametrize(
    "make, option",
    [(_language_model, "chunked_loss"), (_attention, "chunked_attention")],
    ids=["logits", "scores"],
)
def test_what_fits_only_in_chunks_comes_in_chunks(make, option):
    plain, x, y = _made(make)
    losses = [plain.train_on_batch(x, y) for _ in range(2)]
    budget = _half(plain, x, y)

    model, x, y = _made(make)
    model.memory_options = kmem.MemoryOptions(memory_budget=budget)
    own = [model.train_on_batch(x, y) for _ in range(2)]
    with kmem.memory.track("CPU") as usage:
        model.train_on_batch(x, y)

    assert getattr(model.memory_report.chosen.options, option)
    assert option in model.memory_report.summary()
    assert usage.peak_bytes <= budget
    np.testing.assert_allclose(own, losses, rtol=1e-6)


class Reads(keras.Model):
    """A step of its own, which looks at the logits."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_logits_that_a_step_looks_at_are_there():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64, 8))
    model = Reads(inputs, layers.Dense(4000)(inputs))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    x, y = tf.ones((8, 64, 8)), tf.ones((8, 64, 4000))
    model = kmem.wrap(model)
    budget = _half(model, x, y)
    model.memory_options = kmem.MemoryOptions(memory_budget=budget)
    with pytest.warns(UserWarning, match="with a loss that is not Keras's"):
        model.train_on_batch(x, y)

    assert model.memory_report.chosen.options.num_parts > 1


class Asks(layers.Layer):
    """Asks for scores, so that they have to be there."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.inner = layers.MultiHeadAttention(*args, **kwargs)

    def call(self, query, value):
        return self.inner(query, value, return_attention_scores=True)[0]


@pytest.mark.parametrize(
    "kind, rate", [(layers.MultiHeadAttention, 0.1), (Asks, 0.0)]
)
def test_scores_that_are_drawn_or_asked_for_do_not_come_in_chunks(kind, rate):
    model, x, y = _made(lambda: _attention(rate, kind))
    budget = _half(model, x, y)
    model.memory_options = kmem.MemoryOptions(memory_budget=budget)

    # No warning is an error here: nobody has asked for chunks.
    with pytest.raises(ValueError, match="must be at least") as error:
        model.train_on_batch(x, y)
    assert "chunked" not in str(error.value)
