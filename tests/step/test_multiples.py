"""A `train_step` of one's own is right in parts, or refused."""

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem.step import capture

GENERATOR = tf.random.Generator.from_seed(1)


def by_global_norm(model, x, gradients):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def by_norm(model, x, gradients):
    return [tf.clip_by_norm(g, 0.05) for g in gradients]


def sign(model, x, gradients):
    return [tf.sign(g) for g in gradients]


def noise(model, x, gradients):
    return [g + tf.random.normal(g.shape) for g in gradients]


def drawn_factor(model, x, gradients):
    return [g * tf.random.uniform([]) for g in gradients]


def factor_of_a_generator(model, x, gradients):
    return [g * GENERATOR.normal([]) for g in gradients]


def decay(model, x, gradients):
    pairs = zip(gradients, model.trainable_variables, strict=True)
    return [g + 0.01 * v.value for g, v in pairs]


def divided_by_examples(model, x, gradients):
    return [g / tf.cast(tf.shape(x)[0], g.dtype) for g in gradients]


def squared(model, x, gradients):
    return [g * g for g in gradients]


def as_they_are(model, x, gradients):
    return gradients


def times_a_number(model, x, gradients):
    return [-(0.5 * g) / -2.0 for g in gradients]


def times_a_variable(model, x, gradients):
    rate = model.optimizer.learning_rate
    return [tf.identity(g * rate.value) for g in gradients]


def checked_sums(model, x, gradients):
    return [tf.debugging.check_numerics(g + g, "") for g in gradients]


class Changing(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            if self.scales:
                loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        # Keras's clipping takes the rows of an embedding one by one.
        if self.change is not as_they_are:
            gradients = [tf.convert_to_tensor(g) for g in gradients]
        gradients = self.change(self, x, gradients)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def data(rows=8):
    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (rows, 3)), rng.normal(size=(rows, 2))


def made(change, scales=False, **compile_with):
    keras.utils.set_random_seed(0)
    ids = keras.Input((3,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(ids))
    model = Changing(ids, keras.layers.Dense(2)(x))
    model.change, model.scales = change, scales
    model.compile(keras.optimizers.SGD(0.5), "mse", **compile_with)
    return model


def weights(change, options=None, scales=False, **compile_with):
    model = made(change, scales, **compile_with)
    if options:
        kmem.wrap(model)
    model.fit(*data(), batch_size=4, shuffle=False, verbose=0, **options or {})
    return model.get_weights()


# What Keras alone makes of it.
plain_weights = functools.cache(weights)


@pytest.mark.parametrize(
    "change",
    [by_global_norm, by_norm, sign, noise, drawn_factor]
    + [factor_of_a_generator, decay, divided_by_examples, squared],
)
def test_what_a_sum_does_not_allow_is_refused_before_training(change):
    model = kmem.wrap(made(change))
    before = model.get_weights()

    with pytest.raises(ValueError, match="a norm of a part is not that of the"):
        model.fit(*data(), batch_size=4, verbose=0, microbatches=2)

    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "options",
    [{"gradient_accumulation_steps": 2}, {"mixed_precision": "float16"}],
)
def test_groups_of_batches_and_a_scaled_loss_refuse_it_too(options):
    with pytest.raises(ValueError, match="Clip in the optimizer"):
        weights(by_global_norm, options, scales=True)


@pytest.mark.parametrize(
    "change", [as_they_are, times_a_number, times_a_variable, checked_sums]
)
@pytest.mark.parametrize("scales", [False, True])
def test_multiples_are_those_of_the_batch(change, scales):
    got = weights(change, {"microbatches": 2}, scales)
    want = plain_weights(change, scales=scales)

    for some, others in zip(got, want, strict=True):
        np.testing.assert_allclose(some, others, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("option", ["full", "gradients", "optimizer"])
@pytest.mark.parametrize("change", [times_a_number, by_norm])
def test_a_process_that_is_alone_changes_its_gradients_as_it_likes(
    option, change
):
    got = weights(change, {"sharding": option})

    for some, others in zip(got, plain_weights(change), strict=True):
        np.testing.assert_allclose(some, others, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{"microbatches": 1}, {"remat": "auto"}])
def test_a_batch_that_is_whole_is_as_in_keras(options):
    got = weights(by_global_norm, options)

    want = plain_weights(by_global_norm)
    for some, others in zip(got, want, strict=True):
        np.testing.assert_array_equal(some, others)


def test_an_eager_step_hands_its_gradients_on_as_they_are():
    options = {"microbatches": 2}
    want = plain_weights(as_they_are)
    for some, others in zip(
        weights(as_they_are, options, run_eagerly=True), want, strict=True
    ):
        np.testing.assert_allclose(some, others, rtol=2e-6, atol=1e-7)

    with pytest.raises(capture.CannotSplit, match="in eager mode as they are"):
        weights(times_a_number, options, run_eagerly=True)


def test_a_loss_that_is_not_scaled_is_refused_in_float16():
    options = {"mixed_precision": "float16"}
    got = weights(as_they_are, options, scales=True)
    for some, others in zip(got, plain_weights(as_they_are), strict=True):
        np.testing.assert_allclose(some, others, rtol=0, atol=2e-3)

    with pytest.raises(ValueError, match=r"optimizer\.scale_loss\(loss\)"):
        weights(as_they_are, options)


def deep(loss, change=None, depth=6):
    keras.utils.set_random_seed(0)
    x = keras.Input((8,))
    y = x
    for _ in range(depth):
        y = keras.layers.Dense(64, "tanh")(y)
    model = kmem.wrap((Changing if change else keras.Model)(x, y))
    model.change, model.scales = change, True
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def trained(model, budget_bytes, rows=1024):
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("float32")
    options = {"memory_budget": budget_bytes} if budget_bytes else {}
    model.fit(x, x[:, :1], batch_size=rows, epochs=2, verbose=0, **options)
    return model.get_weights()


def trained_plainly(model, rows=1024):
    """The weights, and what a step takes beside what is held."""
    gc.collect()
    with kmem.memory.track("CPU") as usage:
        weights = trained(model, None, rows)
    return weights, usage.peak_bytes - usage.start_bytes


def budget_of(num_bytes):
    """One for so much beside what is held."""
    gc.collect()
    return kmem.memory.current("CPU") + int(num_bytes)


def test_a_step_that_clips_is_recomputed_and_not_split():
    def make():
        return deep("mse", by_global_norm)

    want, needed = trained_plainly(make())
    model = make()
    got = trained(model, budget_of(0.75 * needed))

    assert model.memory_report.chosen.options.num_parts == 1
    for some, others in zip(got, want, strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="`memory_budget` must be at least"):
        trained(make(), budget_of(0.1 * needed))


def contrastive(y, outputs):
    scores = keras.ops.matmul(outputs, keras.ops.transpose(outputs))
    places = keras.ops.arange(keras.ops.shape(outputs)[0])
    rows = keras.losses.sparse_categorical_crossentropy(places, scores, True)
    return keras.ops.mean(rows)


def test_a_loss_that_may_compare_examples_is_split_last_and_then_said():
    def make():
        # Its layers take most, not its scores: so recomputation saves a lot.
        return deep(contrastive, depth=16)

    want, needed = trained_plainly(make(), rows=512)
    model = make()
    got = trained(model, budget_of(0.8 * needed), rows=512)

    assert model.memory_report.chosen.options.num_parts == 1
    for some, others in zip(got, want, strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-5, atol=1e-6)
    model = make()
    with pytest.warns(UserWarning, match="One that compares the examples"):
        trained(model, budget_of(0.33 * needed), rows=512)
    assert model.memory_report.chosen.options.num_parts > 1


class Teacher(Changing):
    """Averages its weights, as a mean teacher and a target network do."""

    def train_step(self, data):
        logs = super().train_step(data)
        weight = self.trainable_variables[0]
        self.average.assign(0.9 * self.average + 0.1 * weight)
        return logs


class Reporting(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        weight = self.trainable_variables[0]
        return logs | {"norm": keras.ops.sum(weight**2)}


def trained_teacher(kind, run_eagerly=False, **options):
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    model = kind(x, keras.layers.Dense(2)(x))
    model.change, model.scales = as_they_are, True
    model.average = model.add_weight((4, 2), "zeros", trainable=False)
    optimizer = keras.optimizers.SGD(0.5)
    kmem.wrap(model).compile(optimizer, "mse", run_eagerly=run_eagerly)
    x = np.random.default_rng(0).normal(size=(8, 4))
    history = model.fit(
        *(x, x[:, :2]), batch_size=4, shuffle=False, verbose=0, **options
    )
    return [*model.get_weights(), *np.array([*history.history.values()])]


plain_teacher = functools.cache(trained_teacher)


@pytest.mark.parametrize("kind", [Teacher, Reporting])
@pytest.mark.parametrize(
    "options",
    [{"microbatches": 1}, {"microbatches": 2}, {"sharding": "full"}]
    + [{"gradient_accumulation_steps": 2}, {"mixed_precision": "float16"}],
    ids=str,
)
def test_weights_that_a_step_reads_after_its_update_are_refused(kind, options):
    with pytest.raises(ValueError, match="must not read weights after"):
        trained_teacher(kind, **options)


@pytest.mark.parametrize("kind", [Teacher, Reporting])
@pytest.mark.parametrize("options", [{"remat": "auto"}, {"memory_budget": 1.0}])
def test_a_step_that_is_left_whole_reads_its_new_weights(kind, options):
    want, got = plain_teacher(kind), trained_teacher(kind, **options)

    for some, others in zip(got, want, strict=True):
        np.testing.assert_array_equal(some, others)


class Sharpness(Changing):
    """Takes the gradient where the loss is higher (SAM, arXiv 2010.01412)."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        steps = tape.gradient(loss, weights)
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_add(0.1 * step)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        for weight, step in zip(weights, steps, strict=True):
            weight.assign_sub(0.1 * step)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_step_that_differentiates_its_weights_twice_is_refused(run_eagerly):
    want = trained_teacher(Sharpness, run_eagerly=run_eagerly)
    got = trained_teacher(Sharpness, run_eagerly=run_eagerly, remat="auto")
    for some, others in zip(got, want, strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-6)

    with pytest.raises(
        ValueError, match="asks its `tf.GradientTape` for gradients once"
    ):
        trained_teacher(Sharpness, run_eagerly=run_eagerly, microbatches=2)
