"""A loss that compares the examples of a batch is told of, or refused."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem.step import comparing


def mean(y, outputs):
    return keras.ops.mean(keras.ops.square(y - outputs))


def means_of_examples(y, outputs):
    return keras.ops.mean(keras.ops.square(y - outputs), axis=-1)


def total(y, outputs):
    return keras.ops.sum(keras.ops.square(y - outputs))


def contrastive(y, outputs):
    scores = keras.ops.matmul(outputs, keras.ops.transpose(outputs))
    return keras.ops.mean(keras.ops.logsumexp(scores, axis=1))


def trained(loss, y=None, **options):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(4, "sigmoid")(inputs)
    model = kmem.wrap(keras.Model(inputs, outputs))
    model.compile(keras.optimizers.SGD(0.5), loss)
    y = np.abs(np.tanh(x)) if y is None else y
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **options)
    return model.get_weights()


def of_marked(is_marked):
    """A mean over the labels that a mark tells of, or does not."""

    def loss(y, outputs):
        counts = keras.ops.cast(is_marked(y), "float32")
        errors = keras.ops.where(is_marked(y), keras.ops.abs(y - outputs), 0.0)
        return keras.ops.sum(errors) / keras.ops.sum(counts)

    return loss


def of_the_hardest(y, outputs):
    errors = keras.ops.mean(keras.ops.square(y - outputs), axis=-1)
    count = keras.ops.shape(errors)[0] // 2
    return keras.ops.mean(keras.ops.top_k(errors, count)[0])


def pairs(y, outputs):
    return keras.ops.matmul(outputs, keras.ops.transpose(outputs))


LABELS = np.array([[0], [1]] * 4)
ONE_HOT = np.eye(4, dtype="float32")[[0, 1, 0, 3, 0, 0, 2, 0]]
LOSSES = {
    "dice": (keras.losses.Dice(), None, True),
    "dice of each": (keras.losses.Dice(axis=(1,)), None, False),
    "circle": (keras.losses.Circle(), LABELS, True),
    "sparse": ("sparse_categorical_crossentropy", LABELS, False),
    "sum": (keras.losses.MeanSquaredError(reduction="sum"), None, False),
    "mean": (mean, None, False),
    "means": (means_of_examples, None, False),
    "total": (total, None, True),
    "contrastive": (contrastive, None, True),
    "pairs": (pairs, None, True),
    "but void": (of_marked(lambda y: y != 255), None, True),
    "but absent": (of_marked(lambda y: ~keras.ops.isnan(y)), None, True),
    "of found": (of_marked(lambda y: y[:, :1] == 1), ONE_HOT, True),
    "hardest": (of_the_hardest, None, True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_compares_examples_is_named(name):
    loss, y, compares = LOSSES[name]
    says = contextlib.nullcontext()
    if compares:
        says = pytest.warns(UserWarning, match="Losses that compare the exam")
    with says:
        got = trained(loss, y, microbatches=2)
    if not compares:
        for some, others in zip(got, trained(loss, y), strict=True):
            np.testing.assert_allclose(some, others, rtol=1e-5, atol=1e-6)


class OwnCall(keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        y_pred = y_pred / keras.ops.max(keras.ops.abs(y_pred))
        return super().__call__(y_true, y_pred, sample_weight)


def of_one_name(function):
    return lambda y, outputs: function(y, outputs)


@pytest.mark.parametrize(
    "losses",
    [
        ["mse", OwnCall(name="own")],
        [of_one_name(contrastive), of_one_name(means_of_examples)],
    ],
    ids=["that replaces __call__", "of the same name"],
)
def test_a_loss_that_compares_is_found_beside_another(losses):
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(4)(inputs) for _ in losses]
    model = kmem.wrap(keras.Model(inputs, outputs))
    model.compile("sgd", losses)
    with pytest.warns(UserWarning, match="Losses that compare the examples"):
        model.fit(x, [x, x], batch_size=8, verbose=0, microbatches=2)


def test_a_mean_that_is_multiplied_by_weights_is_named():
    # By all of them: it does not say whose it is.
    weights = np.linspace(0.5, 2, 8)
    with pytest.warns(UserWarning, match="Received: mean"):
        trained(mean, microbatches=2, sample_weight=weights)


def test_groups_of_batches_name_it_too():
    with pytest.warns(UserWarning, match="Received: dice"):
        trained(keras.losses.Dice(), gradient_accumulation_steps=2)


def test_a_mask_that_depends_on_predictions_is_refused_by_shards():
    with pytest.raises(ValueError, match="masks do not depend on predictions"):
        trained(keras.losses.Circle(), LABELS, sharding="full")

    got = trained(keras.losses.Circle(), LABELS, sharding="optimizer")
    want = trained(keras.losses.Circle(), LABELS)
    for some, others in zip(got, want, strict=True):
        np.testing.assert_allclose(some, others, rtol=1e-5)


def test_a_loss_of_large_arrays_is_tried_on_small_ones():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with comparing.looking() as found, kmem.memory.track("CPU") as usage:
        tf.function(lambda y, outputs: loss(y, outputs)).get_concrete_function(
            tf.TensorSpec((None, 4096), "int32"),
            tf.TensorSpec((None, 4096, 50_000)),
        )
    assert found == {loss.name: False}
    assert usage.peak_bytes - usage.start_bytes < 2**16


def test_what_predictions_do_not_know_of_their_shape_labels_tell():
    loss = keras.losses.CategoricalCrossentropy()
    with comparing.looking() as found:
        tf.function(lambda y, outputs: loss(y, outputs)).get_concrete_function(
            tf.TensorSpec((None, 18, 25)), tf.TensorSpec((None, None, 25))
        )
    assert found == {loss.name: False}


def test_a_loss_that_takes_no_random_numbers_is_not_known():
    class Picky(keras.losses.Loss):
        def call(self, y_true, y_pred):
            tf.debugging.assert_greater(y_pred, 1.0)
            return keras.ops.mean(y_pred, axis=-1)

    loss = Picky(name="picky")
    with comparing.looking() as found:
        loss(tf.ones((6, 9)), 2 * tf.ones((6, 9)))
    assert found == {"picky": None}
