"""What is run before training, to plan or to choose, changes nothing."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem import precision

pytestmark = pytest.mark.usefixtures("native_library")

X = np.random.default_rng(0).normal(size=(8, 3, 4)).astype("float32")
ROWS = 4


def stateful():
    inputs = keras.Input(batch_shape=(ROWS, 3, 4))
    outputs = layers.LSTM(2, stateful=True)(inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


class CountingCalls(keras.Model):
    def __init__(self):
        super().__init__()
        self.calls = self.add_variable((), "zeros", trainable=False)
        self.dense = layers.Dense(2)

    def call(self, x):
        self.calls.assign(self.calls + 1)
        return self.dense(x[:, 0])


def counting():
    model = CountingCalls()
    model.compile("sgd", "mse")
    return model


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(3), layers.Dense(2)
        self.other = keras.optimizers.Adam()

    def call(self, x):
        return self.last(self.first(x[:, 0]))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        for optimizer, layer in (
            (self.optimizer, self.first),
            (self.other, self.last),
        ):
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def two_optimizers():
    model = TwoOptimizers()
    model.compile("adam")
    return model


class LossOfInputs(CountingCalls):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y_pred - y - x[:, 0, :2]) ** 2)


def of_inputs():
    model = LossOfInputs()
    model.compile("sgd")
    return model


class Lasting(keras.metrics.MeanSquaredError):
    """Its owner resets it, and nobody else."""

    def reset_state(self):
        pass


def lasting():
    hidden = layers.Dense(8), layers.Dense(8, "tanh"), layers.Dense(2)
    model = keras.Sequential([keras.Input((3, 4)), layers.Flatten(), *hidden])
    model.compile("sgd", "mse", metrics=[Lasting()])
    return model


class Aside:
    """What holds variables that Keras does not look for."""

    def __init__(self):
        self.noise = tf.random.Generator.from_seed(3)
        self.steps = tf.Variable(0)
        self.average = tf.train.ExponentialMovingAverage(0.5)
        self.optimizer = keras.optimizers.Adam(0.1)


class StepAside(keras.Model):
    """Reads and changes variables that the model does not name."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.aside = Aside()

    def call(self, x):
        return self.dense(x[:, 0])

    def train_step(self, data):
        x, y = data
        x += self.aside.noise.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.aside.optimizer.apply(gradients, weights)
        self.aside.steps.assign_add(1)
        kernel = self.dense.kernel.value
        self.aside.average.apply([kernel])
        average = tf.reduce_sum(self.aside.average.average(kernel))
        return {"loss": loss, "average": average, "n": self.aside.steps}


def step_aside():
    model = StepAside()
    model.compile("sgd")
    return model


class Noise(layers.Layer):
    def __init__(self):
        super().__init__()
        self.aside = Aside()

    def call(self, x, training=None):
        self.aside.steps.assign_add(1)
        noise = self.aside.noise.normal(tf.shape(x)) if training else 0.0
        return x + noise * tf.cast(self.aside.steps, x.dtype)


def layer_aside():
    hidden = layers.Dense(4, "tanh"), Noise(), layers.Dense(4, "tanh"), Noise()
    model = keras.Sequential(
        [keras.Input((3, 4)), layers.Flatten(), *hidden, layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    return model


class LayerThatTrains(layers.Layer):
    """Has an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.optimizer = keras.optimizers.Adam(0.1)

    def call(self, x):
        return self.dense(x[:, 0])

    def train(self, x, y):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x) - y) ** 2)
            weights = self.dense.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss


class TrainsByLayers(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = LayerThatTrains()

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        return {"loss": self.inner.train(*data)}


def by_layers():
    model = TrainsByLayers()
    model.compile("sgd")
    return model


def eager_generator():
    model = layer_aside()
    for layer in model.layers:
        if isinstance(layer, Noise):
            layer.noise, layer.steps = layer.aside.noise, layer.aside.steps
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def trained(make, **options):
    keras.utils.set_random_seed(0)
    model = kmem.wrap(make())
    y = X[:, 0, :2]
    history = model.fit(
        *(X, y, ROWS), epochs=2, shuffle=False, verbose=0, **options
    )
    states = [s for each in model.layers for s in getattr(each, "states", [])]
    other = getattr(model, "other", model.optimizer)
    states += model.metrics_variables
    values = *model.weights, *states, *other.variables
    return [np.asarray(v) for v in (*values, *history.history.values())]


MODELS = (
    *(counting, two_optimizers, of_inputs, lasting),
    *(step_aside, layer_aside, by_layers, eager_generator),
)
PLAN, BUDGET = {"remat": "auto"}, {"memory_budget": "8GB"}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (stateful, PLAN),
        *((make, PLAN) for make in MODELS),
        *((make, BUDGET) for make in MODELS),
    ],
)
def test_training_starts_where_keras_would(make, options):
    for got, want in zip(trained(make, **options), trained(make), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "options", [{"remat": "auto"}, {"memory_budget": "1GB"}], ids=str
)
def test_a_scale_of_the_loss_begins_where_it_would_without(options):
    """The random numbers of a dry run overflow, and small ones do not."""

    def trained(**others):
        keras.utils.set_random_seed(0)
        wide = keras.initializers.RandomNormal(stddev=0.6)
        blocks = [
            layers.Dense(64, "relu", kernel_initializer=wide.clone())
            for _ in range(6)
        ]
        model = keras.Sequential([keras.Input((16,)), *blocks, layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(2048, 16)) * 1e-6
        data = {"batch_size": 512, "shuffle": False, "verbose": 0}
        kmem.wrap(model).fit(
            x, x[:, :1], **data, mixed_precision="float16", **others
        )
        scale = precision.scale_of(model.optimizer)
        return scale, model.get_weights()

    scale, weights = trained(**options)
    expected = trained()
    assert scale == expected[0]
    assert scale[1] < scale[0]
    for value, other in zip(weights, expected[1], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-3, atol=1e-6)


def test_an_evaluation_counts_what_keras_would():
    def steps(**options):
        keras.utils.set_random_seed(0)
        model = kmem.wrap(layer_aside())
        model.evaluate(X, X[:, 0, :2], ROWS, verbose=0, **options)
        noise = [each for each in model.layers if isinstance(each, Noise)]
        return [int(each.aside.steps.numpy()) for each in noise]

    assert steps(memory_budget="8GB") == steps() == [2, 2]
