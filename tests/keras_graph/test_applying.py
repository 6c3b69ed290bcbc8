"""A model that follows a plan: the same numbers, less memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from peaks import least_peak_bytes

from kmem.keras_graph import applying
from kmem.keras_graph.profiling import record_batch
from kmem.planning.network import Segment

WIDTH = 16


def line():
    block = [
        layers.Dense(WIDTH, "tanh"),
        layers.Dropout(0.5),
        layers.Dense(WIDTH, "relu"),
        layers.BatchNormalization(),
        layers.Dense(WIDTH, "tanh", activity_regularizer="l2"),
        layers.Dense(WIDTH),
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *block])


def nested():
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(WIDTH, "tanh")(inputs)
    x = line()(x)
    return keras.Model(inputs, layers.Dense(WIDTH)(x))


def branches():
    inputs = keras.Input((WIDTH,))
    first = layers.Dense(WIDTH, "tanh")(inputs)
    second = layers.Dense(WIDTH, "tanh")(first)
    third = layers.Concatenate()([second, first])
    return keras.Model(inputs, layers.Dense(WIDTH)(third))


class Subclassed(keras.Model):
    def __init__(self, activation=None, num_calls=2):
        super().__init__()
        self.num_calls = num_calls
        self.shared = layers.Dense(WIDTH, activation)
        self.body = line()
        self.last = layers.Dense(WIDTH)

    def call(self, x, training=False):
        for _ in range(self.num_calls):
            x = tf.nn.relu(self.shared(x)) + x
        return self.last(self.body(x, training=training))


class Again(layers.Layer):
    """Runs a layer again for its gradient, whatever a plan says."""

    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(WIDTH, "tanh")
        self.run = keras.remat(lambda x: self.layer(x))

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.run(x)


def rerunning():
    block = [Again(), Again(), layers.Dense(WIDTH, "relu"), Again()]
    return keras.Sequential([keras.Input((WIDTH,)), *block])


PLANS = [
    (rerunning, (Segment(0, 4, (Segment(1, 3),)),)),
    (line, (Segment(0, 3), Segment(3, 5))),
    (line, (Segment(0, 5, (Segment(0, 2), Segment(2, 4))),)),
    (line, (Segment(0, 5, (Segment(1, 4, (Segment(1, 3),)),)),)),
    (nested, (Segment(1, 7),)),
    (nested, (Segment(0, 7, (Segment(1, 7, (Segment(2, 5),)),)),)),
    (nested, (Segment(2, 4), Segment(4, 6))),
    (branches, (Segment(0, 3),)),
    (branches, (Segment(1, 3),)),
    (Subclassed, (Segment(0, 1), Segment(2, 3))),
    (Subclassed, (Segment(4, 10),)),
    (Subclassed, (Segment(2, 3), Segment(4, 10, (Segment(5, 8),)))),
    (Subclassed, (Segment(5, 7), Segment(7, 9))),
]


def run(make, segments, eager=False):
    """A step's loss and gradients, and the state after it."""
    keras.utils.set_random_seed(0)
    model = make()
    x = np.random.default_rng(0).normal(size=(32, WIDTH)).astype("float32")
    model(x[:1])
    frame = record_batch(model, x).frame

    def step(x):
        with applying.applied(model, frame, segments):
            with tf.GradientTape() as tape:
                outputs = model(x, training=True)
                loss = tf.reduce_mean(outputs**2) + sum(model.losses)
        weights = [v.value for v in model.trainable_variables]
        return [loss, *tape.gradient(loss, weights)]

    step = step if eager else tf.function(step, autograph=False)
    results = [value.numpy() for value in step(tf.constant(x))]
    return results + [variable.numpy() for variable in model.variables]


@pytest.mark.parametrize("make, segments", PLANS)
def test_a_plan_leaves_every_number_as_it_is(make, segments):
    want = run(make, ())

    got = run(make, segments)

    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "activation, num_calls, segments",
    [
        ("tanh", 2, (Segment(0, 1),)),
        (None, 3, (Segment(0, 1), Segment(4, 5))),
    ],
)
def test_a_segment_around_a_shared_layer_changes_no_rounding(
    activation, num_calls, segments
):
    def make():
        return Subclassed(activation, num_calls)

    want = run(make, ())

    got = run(make, segments)

    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "make, segments", [PLANS[0], PLANS[3], PLANS[5], PLANS[11]]
)
def test_a_plan_leaves_every_number_as_it_is_in_eager_mode(make, segments):
    want = run(make, (), eager=True)

    got = run(make, segments, eager=True)

    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("make", [line, Subclassed])
def test_a_model_keeps_nothing_of_a_plan(make):
    model = make()
    x = np.zeros((1, WIDTH), "float32")
    model(x)
    frame = record_batch(model, x).frame
    before = [set(vars(layer)) for layer in [model, *model.layers]]

    with applying.applied(model, frame, (Segment(0, 1),)):
        model(x)

    assert [set(vars(layer)) for layer in [model, *model.layers]] == before


class Recurring(keras.Model):
    def __init__(self, depth, width):
        super().__init__()
        self.depth = depth
        self.block = keras.Sequential(
            [layers.Dense(width, "relu", name=f"d{i}") for i in range(4)]
        )

    def call(self, x):
        for _ in range(self.depth // 4):
            x = self.block(x)
        return x


def stack(depth, width):
    block = [layers.Dense(width, "relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((width,)), *block])


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("make", [stack, Recurring])
def test_segments_keep_their_inputs_and_one_of_them_what_is_inside(make):
    """In outputs of one of 16 layers: 4 inputs, 3 more within, a gradient."""
    width, rows, depth = 32, 8192, 16
    value = rows * width * 4
    model = make(depth, width)
    x = tf.random.normal((rows, width))
    model(x[:1])
    frame = record_batch(model, x).frame
    segments = tuple(Segment(i, i + 4) for i in range(0, depth, 4))

    def peak(segments):
        def step(x):
            with applying.applied(model, frame, segments):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(x, training=True))
            weights = [v.value for v in model.trainable_variables]
            gradients = tape.gradient(loss, weights)
            return [tf.reduce_sum(gradient) for gradient in gradients]

        function = tf.function(step, autograph=False)
        return least_peak_bytes(function, x) / value

    assert peak(()) >= depth
    assert peak(segments) <= 4 + 4 + 3
