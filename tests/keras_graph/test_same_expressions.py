"""A planned step computes what plain training computes, to the bit.

Compared is what TensorFlow's graph optimizer makes of the two steps: it joins
operations, puts products in another order and moves constants, each by who
else reads a result.
"""

import dataclasses

import expressions
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops

import kmem
from kmem.planning.network import Segment

WIDTH, TOKENS, ROWS = 12, 10, 6
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")


class RootMeanSquare(layers.Layer):
    """As language models normalize; each writes it in another way."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        # An array that the step does not make, but reads.
        self.epsilon = ops.convert_to_tensor(np.float32(1e-6))

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        if self.kind == "square":
            variance = ops.mean(ops.square(x), axis=-1, keepdims=True)
        else:
            variance = ops.mean(ops.power(x, 2), axis=-1, keepdims=True)
        if self.kind == "reciprocal":
            x = x * ops.reciprocal(ops.sqrt(variance + self.epsilon))
            return x * (1 + self.scale)
        return self.scale * (x * ops.rsqrt(variance + self.epsilon))


def gated(x, activation):
    gate = layers.Dense(2 * WIDTH, activation, use_bias=False)(x)
    x = gate * layers.Dense(2 * WIDTH, use_bias=False)(x)
    return layers.Dense(WIDTH, use_bias=False)(x)


def attended(x):
    return layers.MultiHeadAttention(2, WIDTH // 2)(x, x, use_causal_mask=True)


def among_experts(x):
    weights = layers.Dense(3, "softmax")(x)
    best, _ = ops.top_k(weights, 2)
    weights = weights * ops.cast(weights >= best[..., -1:], "float32")
    experts = [layers.Dense(WIDTH, "silu")(x) for _ in range(3)]
    experts = ops.stack(experts, axis=-1)
    return ops.sum(experts * weights[:, :, None], axis=-1)


BLOCKS = {
    "gelu": lambda x: gated(x, "gelu"),
    "silu": lambda x: gated(x, "silu"),
    "attention": attended,
    "experts": among_experts,
}


def language_model(kind, block, pooled):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(20, WIDTH)(tokens)
    for _ in range(3):
        x = x + BLOCKS[block](RootMeanSquare(kind)(x))
    x = RootMeanSquare(kind)(x)
    x = layers.GlobalAveragePooling1D()(x) if pooled else x
    model = keras.Model(tokens, layers.Dense(4)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return kmem.wrap(model)


CASES = [
    ("square", "gelu", False),
    ("square", "attention", True),
    ("power", "silu", True),
    ("power", "experts", False),
    ("reciprocal", "silu", False),
    ("reciprocal", "attention", True),
]


@pytest.mark.parametrize("kind, block, pooled", CASES)
def test_a_planned_step_computes_what_the_plain_one_does(kind, block, pooled):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (ROWS, TOKENS))
    shape = (ROWS, 4) if pooled else (ROWS, TOKENS, 4)
    y = rng.normal(size=shape).astype("float32")
    model = language_model(kind, block, pooled)
    want = expressions.of_training(model, x, y)

    model = language_model(kind, block, pooled)
    got = expressions.of_training(model, x, y, remat="auto")

    assert any("/again" in name for name in got.values())
    assert [got[each] for each in got.keys() - want.keys()] == []
    assert [want[each] for each in want.keys() - got.keys()] == []


def approximate():
    """`gelu` in its approximation takes the third power of its argument."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((WIDTH,))
    for _ in range(3):
        x = layers.Dense(WIDTH)(ops.gelu(layers.Dense(WIDTH)(x)))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return kmem.wrap(model)


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(1, 2),),
        (Segment(0, 5, inner=(Segment(1, 2),)),),
    ],
    ids=["at the power", "nested at the power"],
)
def test_a_power_is_multiplied_as_without_a_plan(segments):
    """Its gradient computes another one of the same number, and the two may
    be in two runs of a segment, or be given what is in neither."""
    x = NUMBERS
    want = expressions.of_training(approximate(), x, x)
    plan = kmem.plan(approximate(), (x, x))
    plan = dataclasses.replace(plan, segments=segments)

    got = expressions.of_training(approximate(), x, x, remat=plan)

    assert any("/again" in name for name in got.values())
    assert got.keys() == want.keys()


class Slope(layers.Layer):
    """How steep a network is, in two directions: both come into the gradient
    of its weights, with the gradients of its slope."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = self.network(x) + self.network(x[:, ::-1])
        return y + tape.gradient(y, x)


def steep():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    network = [layers.Dense(WIDTH, "tanh") for _ in range(3)]
    inputs = keras.Input((WIDTH,))
    outputs = Slope(keras.Sequential(network))(inputs)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return kmem.wrap(model)


def test_a_sum_of_sums_is_added_up_as_without_a_plan():
    x = NUMBERS
    want = expressions.of_training(steep(), x, x)

    got = expressions.of_training(steep(), x, x, remat="auto")

    assert got.keys() == want.keys()


class Levels(layers.Layer):
    """What it gives it has used itself, as a pyramid of features has."""

    def build(self, shape):
        self.first, self.second = layers.Dense(WIDTH), layers.Dense(WIDTH)
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        x = self.first(ops.tanh(x))
        return x, self.second(ops.relu(x))


def pyramid():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH,))
    heads = [layers.Dense(WIDTH, use_bias=False) for _ in range(2)]
    # Addends are sorted by name: its own comes before those of the heads.
    found = Levels(name="a_pyramid")(layers.Dense(WIDTH)(inputs))
    outputs = layers.Add()([head(x) for x in found for head in heads])
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return kmem.wrap(model)


def test_a_gradient_from_within_a_segment_and_around_it_is_one_sum():
    x = NUMBERS
    want = expressions.of_training(pyramid(), x, x)
    plan = kmem.plan(pyramid(), (x, x))
    plan = dataclasses.replace(plan, segments=(Segment(0, 2),))

    got = expressions.of_training(pyramid(), x, x, remat=plan)

    assert any("/again" in name for name in got.values())
    assert got.keys() == want.keys()
