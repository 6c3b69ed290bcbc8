"""A `train_step` of one's own is planned by what it calls, whatever that is."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem

pytestmark = pytest.mark.usefixtures("native_library")

WIDTH, DEPTH, ROWS = 32, 6, 1024
LAYER_BYTES = 4 * WIDTH * ROWS
# In plain Keras threads decide what runs first, and what a step needs: one of
# so many needs much.
EPOCHS = 8


def block():
    hidden = [layers.Dense(WIDTH, "tanh") for _ in range(DEPTH)]
    inputs = keras.Input((WIDTH,))
    return keras.Sequential([inputs, *hidden, layers.Dropout(0.2, seed=1)])


class TwoModels(keras.Model):
    """It has no `call`: its step calls the two models inside."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = block(), block()

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def loss_of(self, x):
        code = 2 * self.encoder(x, training=True) + 1
        return tf.reduce_mean(tf.square(self.decoder(code, training=True) - x))


class OneTwice(TwoModels):
    """It calls one of them twice, and has a `call` that it does not use."""

    def call(self, x):
        return self.encoder(x)

    def loss_of(self, x):
        near = self.encoder(x, training=True)
        far = self.encoder(tf.reverse(x, [1]), training=True)
        code = (near + far) / 2
        return tf.reduce_mean(tf.square(self.decoder(code, training=True) - x))


class PenalizedGradient(TwoModels):
    """It makes two updates, by optimizers of its own, and differentiates a
    gradient."""

    def compile(self, optimizer):
        super().compile()
        self.first, self.other = optimizer, keras.optimizers.SGD(1e-3)

    def train_step(self, x):
        critic = self.decoder
        with tf.GradientTape() as tape:
            made = (self.encoder(x, training=True) + x) / 2
            with tf.GradientTape() as inner:
                inner.watch(made)
                score = tf.reduce_sum(critic(made, training=True), 1)
            slope = tf.norm(inner.gradient(score, made) + 1e-3, axis=1)
            loss = tf.reduce_mean((slope - 1) ** 2 + score)
        weights = critic.trainable_variables
        self.first.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(self.encoder(x, training=True)))
        weights = self.encoder.trainable_variables
        self.other.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def trained(kind, **options):
    """A model that was trained, and what a step needed."""
    keras.utils.set_random_seed(0)
    model = kmem.wrap(kind())
    model.compile(keras.optimizers.SGD(1e-3))
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    fit = {"batch_size": ROWS, "verbose": 0, **options}
    model.fit(x, **fit)
    with kmem.memory.track("CPU") as usage:
        model.fit(x, epochs=EPOCHS, **fit)
    used = usage.peak_bytes - usage.start_bytes
    return model, used


def assert_close(model, plain):
    pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
    for some, others in pairs:
        np.testing.assert_allclose(some, others, rtol=0, atol=2e-7)


@pytest.mark.parametrize("kind", [TwoModels, OneTwice, PenalizedGradient])
def test_a_step_of_several_calls_is_recomputed_with_the_same_numbers(kind):
    plain, plain_bytes = trained(kind)
    model, needed_bytes = trained(kind, remat=kmem.Remat(solver="sqrt"))

    assert_close(model, plain)
    # What the step does not use has no variables.
    assert model.optimizer.built == plain.optimizer.built
    # Of a dozen layers and more only some are kept.
    assert needed_bytes < plain_bytes - DEPTH / 2 * LAYER_BYTES


def test_a_budget_is_kept_by_a_model_without_a_call():
    plain, plain_bytes = trained(TwoModels)
    keras.utils.set_random_seed(0)
    model = kmem.wrap(TwoModels())
    model.compile(keras.optimizers.SGD(1e-3))
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    budget = kmem.memory.current("CPU") + int(0.8 * plain_bytes)

    fit = {"batch_size": ROWS, "verbose": 0, "memory_budget": budget}
    model.fit(x, **fit)
    model.fit(x, epochs=EPOCHS, **fit)

    chosen = model.memory_report.chosen
    assert chosen.plan.segments and chosen.options.num_parts == 1
    assert chosen.measured_peak_bytes <= budget
    assert_close(model, plain)


def test_the_plan_names_what_the_step_calls():
    model = TwoModels()
    model.compile("sgd")

    plan = kmem.plan(model, tf.TensorSpec((ROWS, WIDTH)), costs="flops")

    stages = [stage.name.split("_")[0] for stage in plan.network.stages]
    half = ["dense"] * DEPTH + ["dropout"]
    between, loss = stages[DEPTH + 1], stages[-1]
    assert stages == [*half, between, *half, loss]
    assert between.startswith("before seq") and loss == "before loss"


class Classifier(keras.Model):
    """Its loss looks for the softmax that made its predictions."""

    def train_step(self, x):
        y = keras.ops.one_hot(tf.argmax(x, 1), WIDTH)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_what_a_loss_reads_is_not_recomputed():
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")

    def model():
        keras.utils.set_random_seed(0)
        outputs = inputs = keras.Input((WIDTH,))
        for activation in ("tanh", "tanh", "relu", "softmax"):
            outputs = layers.Dense(WIDTH, activation)(100 * outputs)
        made = kmem.wrap(Classifier(inputs, outputs))
        made.compile("sgd", "categorical_crossentropy")
        return made

    def weights(**options):
        trained = model()
        trained.fit(x, batch_size=ROWS, epochs=2, verbose=0, **options)
        return trained.get_weights()

    plan = kmem.plan(model(), x, costs="flops", solver="sqrt")
    *_, dense, loss = plan.network.stages
    assert not (dense.recomputable or loss.recomputable)
    pairs = zip(weights(remat=plan), weights(), strict=True)
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("see", [kmem.plan, kmem.profile, kmem.estimate])
def test_what_is_inside_has_to_be_built_to_be_looked_at(see):
    model = TwoModels()
    model.decoder = keras.Sequential([layers.Dense(WIDTH)])
    model.compile("sgd")

    with pytest.raises(ValueError, match="must be built"):
        see(model, tf.TensorSpec((ROWS, WIDTH)))

    assert not model.decoder.built


def test_a_step_without_a_loss_is_planned_as_far_as_it_calls_layers():
    class Counts(TwoModels):
        def train_step(self, x):
            return {"sum": tf.reduce_sum(self.encoder(x))}

    model = kmem.wrap(Counts())
    model.compile("sgd")

    logs = model.fit(np.ones((4, WIDTH)), verbose=0, remat="auto").history
    assert logs.keys() == {"sum"}


class Student(keras.Model):
    """It trains one of its parts; what only `test_step` calls is not built."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = block(), block()
        self.noise = keras.Sequential([layers.Dense(WIDTH)])

    def train_step(self, x):
        wanted = self.teacher(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.student(x) - wanted) ** 2)
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def student_state(**options):
    keras.utils.set_random_seed(0)
    model = Student()
    model.compile("adam")
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")
    kmem.wrap(model).fit(x, batch_size=8, epochs=2, verbose=0, **options)
    return [v.numpy() for v in model.optimizer.variables]


plain_state = functools.cache(student_state)


@pytest.mark.parametrize(
    "options",
    [{"remat": "auto"}, {"memory_budget": "1GB"}, {"microbatches": 2}],
    ids=lambda options: next(iter(options)),
)
def test_an_optimizer_has_what_the_step_updates(options):
    got, expected = student_state(**options), plain_state()

    assert len(got) == len(expected)
    for value, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-7)
