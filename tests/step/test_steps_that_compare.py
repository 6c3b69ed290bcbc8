"""A step whose loss is made by hand is tried: on a batch, and on halves."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops

import kmem

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
NAMED = pytest.warns(UserWarning, match="Received: the loss of ")


class Autoencoder(keras.Model):
    """A variational one, with a loss that its own step computes."""

    def __init__(self, loss, draw=None):
        super().__init__()
        self.moments = layers.Dense(6, activation="tanh")
        self.decoder = layers.Dense(6)
        self.draw = draw
        self.loss_of = loss

    def call(self, x):
        mean, log_variance = ops.split(self.moments(x), 2, axis=1)
        noise = self.draw(ops.shape(mean)) if self.draw else 0.0
        code = mean + ops.exp(0.5 * log_variance) * noise
        terms = ops.exp(log_variance) + ops.square(mean) - log_variance - 1
        return self.decoder(code), 0.5 * ops.sum(terms, axis=1)

    def train_step(self, x):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            outputs, divergence = self(x, training=True)
            errors = ops.sum(ops.square(outputs - x), axis=1)
            loss = self.loss_of(errors, divergence)
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": ops.mean(loss)}


def mean(errors, divergence):
    return ops.mean(errors) + ops.mean(divergence)


def with_sum(errors, divergence):
    return ops.mean(errors) + ops.sum(divergence)


def each(errors, divergence):
    return errors + divergence


def mean_with_an_axis(errors, divergence):
    return ops.mean(errors + divergence, keepdims=True)


def ratio(errors, divergence):
    return ops.sum(errors) / ops.sum(divergence)


class Contrastive(Autoencoder):
    def train_step(self, x):
        with tf.GradientTape() as tape:
            codes, _ = self(x)
            scores = ops.matmul(codes, ops.transpose(codes))
            pairs = ops.arange(ops.shape(x)[0])
            losses = keras.losses.sparse_categorical_crossentropy(
                pairs, scores, from_logits=True
            )
            loss = ops.mean(losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


class GradientPenalty(Autoencoder):
    def train_step(self, x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs, _ = self(x)
            slopes = inner.gradient(outputs, x)
            norms = tf.norm(slopes, axis=1)
            loss = ops.mean(ops.square(norms - 1)) - ops.mean(outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


def trained(model, *targets, **options):
    keras.utils.set_random_seed(0)
    model = kmem.wrap(model)
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.05), "mse" if targets else None)
    options = options or {"microbatches": 2}
    model.fit(*(X, *targets), batch_size=4, shuffle=False, verbose=0, **options)
    return model.get_weights()


def assert_named(model, data, compares, loss="mse"):
    """Whether its loss is named if it compares examples, and else is not."""
    model = kmem.wrap(model)
    model.compile("sgd", loss)
    with NAMED if compares else contextlib.nullcontext():
        model.fit(data, shuffle=False, verbose=0, microbatches=2)


DRAWS = {
    "nothing": None,
    "by TensorFlow": lambda shape: tf.random.normal(shape),
    "by Keras": keras.random.normal,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("loss", [mean, each])
def test_a_mean_over_examples_is_not_named(loss, draw):
    keras.utils.set_random_seed(0)
    trained(Autoencoder(loss, draw))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("loss", [with_sum, ratio])
def test_what_is_no_mean_over_examples_is_named(loss, draw):
    with NAMED:
        trained(Autoencoder(loss, draw))


def test_groups_of_batches_are_tried_too():
    with NAMED:
        trained(Autoencoder(with_sum), gradient_accumulation_steps=2)
    trained(Autoencoder(mean), gradient_accumulation_steps=2)


def test_a_step_that_compares_pairs_is_named():
    with NAMED:
        trained(Contrastive(mean))


def test_a_step_with_a_gradient_in_its_loss_is_tried():
    trained(GradientPenalty(mean))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("loss", [mean, mean_with_an_axis, each])
def test_what_is_not_named_has_the_gradient_of_the_whole_batch(loss, eager):
    def weights(**options):
        keras.utils.set_random_seed(0)
        model = kmem.wrap(Autoencoder(loss))
        model(X[:1])
        model.compile(keras.optimizers.SGD(0.05), run_eagerly=eager)
        # Parts of three rows, three and two.
        model.fit(X, batch_size=8, shuffle=False, verbose=0, **options)
        return model.get_weights()

    expected = weights()
    for found in (
        weights(microbatches=3),
        weights(microbatches=2, gradient_accumulation_steps=1),
    ):
        for some, others in zip(found, expected, strict=True):
            np.testing.assert_allclose(some, others, rtol=1e-5, atol=1e-6)


class Penalized(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(self.reduce(ops.square(x)))
        return x


class Centred(layers.Layer):
    """Mixes examples, but not their number."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Chooses(layers.Layer):
    """Draws, in training alone."""

    def call(self, x, training=False):
        return x * keras.random.uniform(ops.shape(x)) if training else x


class Balanced(layers.Layer):
    """Adds a loss in training, as the routers of mixtures of experts do."""

    def call(self, x, training=False):
        if training:
            share = ops.mean(ops.softmax(x), axis=0)
            self.add_loss(ops.sum(ops.square(share)))
        return x


SEEN = tf.Variable(0)


class Besides(layers.Layer):
    """Does what may be seen in training, and mixes examples."""

    def __init__(self, does):
        super().__init__()
        self.does = does

    def call(self, x, training=False):
        with tf.control_dependencies([self.does()] if training else []):
            return x - ops.mean(x, 0)


LAYERS = {
    "beside a number of its own": (
        lambda: Besides(
            lambda: tf.raw_ops.RandomUniform(shape=[1], dtype=tf.float32)
        ),
        True,
    ),
    "beside a count": (lambda: Besides(lambda: SEEN.assign_add(1)), True),
    "a loss of training": (Balanced, True),
    "a loss of training beside dropout": (
        lambda: keras.Sequential([layers.Dropout(0.5), Balanced()]),
        True,
    ),
    "a mean that is added": (lambda: Penalized(ops.mean), False),
    "a sum that is added": (lambda: Penalized(ops.sum), True),
    "of one's own": (Centred, True),
    "of a function": (
        lambda: layers.Lambda(lambda x: x - ops.mean(x, 0)),
        True,
    ),
    "an operation": (lambda: lambda x: ops.softmax(x, axis=0), True),
    "an operation on examples": (lambda: ops.softmax, False),
    "batch normalization": (layers.BatchNormalization, False),
    "dropout": (lambda: layers.Dropout(0.5), False),
    "noise": (lambda: layers.GaussianNoise(0.5), False),
    "that draws": (Chooses, False),
    "recurrent dropout": (
        lambda: keras.Sequential(
            [layers.Reshape((3, 2)), layers.LSTM(6, dropout=0.5)]
        ),
        False,
    ),
    "that scales": (
        lambda: keras.Sequential(
            [layers.Rescaling(1e-6), Centred(), layers.Rescaling(1, 1)]
        ),
        True,
    ),
}


@pytest.mark.filterwarnings("ignore:Layers whose state can depend")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_mixes_examples_is_found(name):
    make, mixes = LAYERS[name]
    inputs = keras.Input((6,))
    x = make()(layers.Dense(6)(inputs))
    # That of one's own is what asks for the trial, and does nothing else.
    outputs = layers.Lambda(lambda x: x)(layers.Dense(6)(x))
    with NAMED if mixes else contextlib.nullcontext():
        trained(keras.Model(inputs, outputs), X)


BY_WHAT_IT_IS_GIVEN = {
    "activation": lambda: layers.Dense(6, lambda x: x - ops.mean(x, 0)),
    "axis": lambda: layers.UnitNormalization(axis=0),
    "axis from the end": lambda: layers.UnitNormalization(axis=-2),
    "axes": lambda: layers.UnitNormalization(axis=(0, 1)),
}


@pytest.mark.parametrize("name", BY_WHAT_IT_IS_GIVEN)
def test_a_layer_of_keras_mixes_examples_by_what_it_is_given(name):
    inputs = keras.Input((6,))
    x = BY_WHAT_IT_IS_GIVEN[name]()(layers.Dense(6)(inputs))
    with NAMED:
        trained(keras.Model(inputs, layers.Dense(6)(x)), X)


class Found(keras.Model):
    """Embeds what it looks up, less the mean of all if it compares."""

    def __init__(self, look_up, compares):
        super().__init__()
        self.look_up = look_up
        self.embedding = layers.Embedding(8, 6, "normal")
        self.dense = layers.Dense(6)
        self.compares = compares

    def call(self, x):
        x = self.embedding(self.look_up(x))
        x = ops.sum(x, axis=1) if len(x.shape) > 2 else x
        return self.dense(x - ops.mean(x, axis=0) if self.compares else x)


WORDS = np.array(["a", "b", "c", "d"])
LOOK_UPS = {
    "words": (lambda: layers.StringLookup(vocabulary=WORDS), WORDS),
    "text": (
        lambda: layers.TextVectorization(
            vocabulary=WORDS, output_sequence_length=2
        ),
        WORDS[:, None],
    ),
    "hashes": (lambda: layers.Hashing(8), WORDS),
    "integers": (
        lambda: layers.IntegerLookup(vocabulary=[10, 20, 30, 40]),
        np.array([10, 20, 30, 40]),
    ),
    "rows": (
        lambda: lambda rows: rows[:, :1].to_tensor(),
        tf.ragged.constant([[1], [2, 3, 4], [5], [6, 7]]),
    ),
}


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("name", LOOK_UPS)
def test_what_looks_up_its_inputs_is_tried_on_what_it_knows(name, compares):
    make, x = LOOK_UPS[name]
    data = tf.data.Dataset.from_tensor_slices((x, X[:4])).batch(4)
    assert_named(Found(make(), compares), data, compares)


def test_a_mean_over_a_padded_length_is_named():
    """Each part is padded to its own longest row."""

    class Mean(Found):
        def call(self, x):
            return self.dense(ops.mean(self.embedding(x.to_tensor()), axis=1))

    rows = tf.ragged.constant([[1], [2, 3, 4], [5], [6, 7]])
    data = tf.data.Dataset.from_tensor_slices((rows, X[:4])).batch(4)
    assert_named(Mean(None, False), data, True)


def test_what_is_no_vocabulary_is_let_be():
    class Translated(layers.Lambda):
        def get_vocabulary(self, language):
            return language

    look_up, ids = Translated(lambda x: x), np.array([1, 2, 3, 4])
    data = tf.data.Dataset.from_tensors((ids, X[:4]))
    for compares in (True, False):
        assert_named(Found(look_up, compares), data, compares)


class Coding(keras.Model):
    """Has a layer for what its methods make of it."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)


@pytest.mark.parametrize("compares", [True, False])
def test_a_step_that_is_given_a_number_is_tried(compares):
    class Weighted(Coding):
        def train_step(self, data):
            x, y, weight = data
            with tf.GradientTape() as tape:
                codes = self.dense(x)
                codes -= ops.mean(codes, axis=0) if compares else 0.0
                loss = weight * ops.mean(ops.square(codes - y))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    data = tf.data.Dataset.from_tensors((X, X, np.float32(0.5)))
    assert_named(Weighted(), data, compares, loss=None)


@pytest.mark.parametrize("compares", [True, False])
def test_sparse_batches_are_tried(compares):
    class Centred(Coding):
        def call(self, x):
            x = self.dense(x)
            return x - ops.mean(x, axis=0) if compares else x

    data = tf.data.Dataset.from_tensors((tf.sparse.from_dense(X), X))
    assert_named(Centred(), data, compares)


@pytest.mark.parametrize("reduce", [ops.mean, ops.sum])
def test_in_16_bits_rounding_is_not_named(reduce):
    class Squares(keras.Model):
        def compute_loss(self, x, y, y_pred, *args, **kwargs):
            return reduce(ops.square(ops.cast(y_pred, "float32") - y))

    inputs = keras.Input((6,))
    x = layers.Dense(32, activation="tanh")(inputs)
    model = Squares(inputs, layers.Dense(6)(x))
    with NAMED if reduce is ops.sum else contextlib.nullcontext():
        trained(model, X, microbatches=2, mixed_precision="bfloat16")


def test_a_step_that_fails_on_random_numbers_may_compare():
    class Picky(Autoencoder):
        def train_step(self, x):
            with tf.control_dependencies([tf.debugging.assert_less(x, 0.0)]):
                return super().train_step(tf.identity(x))

    model = kmem.wrap(Picky(with_sum))
    model(X[:1])
    model.compile("sgd")
    message = "Received: perhaps the loss of picky, which could not be tried"
    with pytest.warns(UserWarning, match=message):
        model.fit(-abs(X) - 1, batch_size=4, verbose=0, microbatches=2)


COUNTER = tf.Variable(0)
GENERATOR = tf.random.Generator.from_seed(1)
KEPT = []


def counts(errors, divergence):
    with tf.control_dependencies([COUNTER.assign_add(1)]):
        return tf.reduce_sum(errors)


def drawn(errors, divergence):
    return ops.sum(errors) * GENERATOR.normal([])


def calls_python(errors, divergence):
    tf.py_function(lambda: KEPT.append(1), [], [])
    return ops.sum(errors)


def kept(errors, divergence):
    KEPT.append(ops.sum(errors))
    return KEPT[-1]


def test_what_a_step_changes_besides_is_changed_by_itself_alone():
    """It is not tried then, as it may be seen: nobody knows."""
    before = tf.random.Generator.from_seed(1)
    for loss in (counts, calls_python, drawn):
        with pytest.warns(UserWarning, match="perhaps the loss of"):
            trained(Autoencoder(loss))

    # Two batches, each in two parts.
    assert int(COUNTER) == len(KEPT) == 4
    for _ in range(4):
        before.normal([])
    assert np.array_equal(GENERATOR.state, before.state)


def test_a_step_that_is_made_to_run_eagerly_is_not_traced():
    KEPT.clear()
    model = kmem.wrap(Autoencoder(kept))
    model(X[:1])
    model.compile("sgd", run_eagerly=True)
    model.fit(X, batch_size=8, verbose=0, microbatches=2)
    assert not any(map(tf.is_symbolic_tensor, KEPT))


def test_trying_a_step_changes_nothing():
    seed = keras.random.SeedGenerator(1)
    model = Autoencoder(
        mean, lambda shape: keras.random.normal(shape, seed=seed)
    )
    model.seed = seed
    rounding = tf.config.experimental.tensor_float_32_execution_enabled
    before = rounding()
    trained(model)
    # The model was built with a draw; then come two batches of two parts.
    assert np.array(seed.state).tolist() == [1, 5]
    assert int(model.optimizer.iterations) == 2
    assert rounding() == before
