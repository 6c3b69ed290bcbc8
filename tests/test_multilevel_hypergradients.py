"""Gradients through a level are those of closed forms and of plain autodiff."""

import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from multilevel_cases import Reweighting
from multilevel_cases import Ridge
from multilevel_cases import Vector
from multilevel_cases import flat
from multilevel_cases import relative_error

from kmem import remat
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Neumann
from kmem.multilevel import Unrolled

ALL = (Identity(), FiniteDifference(), Neumann(3, 0.5), ConjugateGradient(3))
EXACT = tuple(h for h in ALL if not isinstance(h, FiniteDifference))
# What float64 allows where a difference of gradients is divided by its step.
SMALL_STEP = FiniteDifference(alpha=1e-3)


def name_of(value):
    return type(value).__name__


@pytest.mark.parametrize(
    "hypergradient",
    [ConjugateGradient(Ridge.size), Neumann(100, 0.5)],
    ids=name_of,
)
def test_ridge_penalties_get_the_gradient_of_the_closed_form(hypergradient):
    ridge = Ridge()

    assert relative_error(ridge.found(hypergradient), ridge.exact) < 1e-10


def test_the_error_of_the_series_falls_with_each_term():
    ridge = Ridge()
    errors = [
        relative_error(ridge.found(Neumann(count, 0.5)), ridge.exact)
        for count in (0, 1, 3, 5, 10, 20)
    ]

    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.05


@pytest.mark.parametrize(
    "hypergradient", [Identity(), FiniteDifference()], ids=name_of
)
def test_a_hessian_taken_for_the_identity_leaves_the_mixed_product(
    hypergradient,
):
    ridge = Ridge()
    found = ridge.found(hypergradient)

    assert relative_error(found, ridge.with_identity) < 1e-8


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_conjugate_gradients_end_where_the_residual_is_zero(mode):
    weights, shift = Vector([1.0, -2.0]), Vector([0.5, 0.25])

    def loss(x):
        # The Hessian is the identity, the mixed derivative is minus it.
        difference = weights.entries - shift.entries
        return tf.reduce_mean(x) * tf.reduce_sum(difference**2) / 2

    level = Level(weights, loss, "sgd")
    batch = tf.ones([3], tf.float64)
    vector = [tf.constant([3.0, 4.0], tf.float64)]
    level.look(batch)

    def run():
        return ConjugateGradient(5)(vector, level, batch, shift.variables)

    if mode != "eager":
        run = tf.function(run, jit_compile=mode == "xla", autograph=False)

    np.testing.assert_allclose(run()[0], vector[0], rtol=1e-12)


def test_conjugate_gradients_end_where_the_curvature_is_negative():
    weights, shift = Vector([1.0, -2.0]), Vector([0.5, 0.25])

    def loss(x):
        squares = (weights.entries - shift.entries) ** 2
        return tf.reduce_mean(x) * (squares[0] - squares[1] / 2)

    level = Level(weights, loss, "sgd")
    batch = tf.ones([3], tf.float64)
    vector = [tf.constant([1.0, 1.0], tf.float64)]

    for iterations in (1, 2, 5):
        found = ConjugateGradient(iterations)(
            vector, level, batch, shift.variables
        )
        # H is diag(2, -1), and minus the mixed derivative: u is (2, 2).
        np.testing.assert_allclose(found[0], [4.0, -2.0], rtol=1e-12)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_mixed_product_is_the_gradient_through_one_small_step(stopped):
    case = Reweighting(stopped)
    found = case.found(Identity())

    rate = 1e-6
    classifier = case.classifier.trainable_variables
    reweight = [v.value for v in case.reweight.trainable_variables]
    before = [v.numpy() for v in classifier]
    with tf.GradientTape() as outer:
        outer.watch(reweight)
        with tf.GradientTape() as inner:
            loss = case.weighted_loss(*case.batches[0])
        gradients = inner.gradient(loss, [v.value for v in classifier])
        moved = [
            v.value - rate * g
            for v, g in zip(classifier, gradients, strict=True)
        ]
        (x, y) = case.batches[1]
        hidden = tf.tanh(x @ moved[0] + moved[1])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            y, hidden @ moved[2] + moved[3]
        )
        loss = tf.reduce_mean(losses)
    expected = flat(outer.gradient(loss, reweight)) / rate

    assert relative_error(found, expected) < 1e-4
    for variable, value in zip(classifier, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_the_difference_is_the_mixed_product_without_a_stopped_gradient():
    case = Reweighting(stopped=False)

    error = relative_error(case.found(SMALL_STEP), case.found(Identity()))

    assert error < 1e-4


def test_the_difference_is_something_else_with_a_stopped_gradient():
    case = Reweighting(stopped=True)

    error = relative_error(case.found(SMALL_STEP), case.found(Identity()))

    assert error > 0.01


@pytest.mark.parametrize("hypergradient", ALL, ids=name_of)
@pytest.mark.parametrize(
    "microbatches, mode", [(2, "graph"), (4, "eager"), (5, "graph")]
)
def test_parts_of_a_batch_make_its_hypergradient(
    hypergradient, microbatches, mode
):
    whole, parts = Reweighting(), Reweighting(microbatches=microbatches)
    vector = whole.vector()

    def run():
        return parts.found(hypergradient, vector)

    if mode == "graph":
        parts.lower.look(parts.batches[0])
        run = traced(parts, hypergradient, vector)

    assert relative_error(run(), whole.found(hypergradient, vector)) < 1e-10


def traced(case, hypergradient, vector, jit_compile=False):
    """`case.found`, as a graph."""

    @tf.function(autograph=False, jit_compile=jit_compile)
    def run(vector, batch):
        wrt = case.reweight.trainable_variables
        return hypergradient(vector, case.lower, batch, wrt)

    return lambda: flat(run(vector, case.batches[0]))


@pytest.mark.parametrize(
    "hypergradient", [Identity(), ConjugateGradient(2)], ids=name_of
)
def test_xla_computes_the_same_in_parts(hypergradient):
    case = Reweighting(microbatches=5)
    vector = case.vector()
    expected = case.found(hypergradient, vector)
    compiled = traced(case, hypergradient, vector, jit_compile=True)

    assert relative_error(compiled(), expected) < 1e-9


def noisy():
    """Layers that draw random numbers, and keep statistics."""
    return [
        layers.BatchNormalization(dtype="float64"),
        layers.Dropout(0.3, dtype="float64"),
    ]


@pytest.mark.parametrize(
    "hypergradient, microbatches",
    [(Identity(), 1), (FiniteDifference(), 3), (ConjugateGradient(2), 3)],
)
def test_a_hypergradient_leaves_no_trace(hypergradient, microbatches):
    case = Reweighting(block=noisy(), microbatches=microbatches)
    vector = case.vector()
    before = [v.numpy() for v in case.classifier.variables]

    for run in (
        lambda: case.found(hypergradient, vector),
        traced(case, hypergradient, vector),
    ):
        run()
        for variable, value in zip(
            case.classifier.variables, before, strict=True
        ):
            np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_both_gradients_of_the_difference_draw_the_same_mask(microbatches):
    dropout = [layers.Dropout(0.3, dtype="float64", seed=3)]
    case = Reweighting(False, dropout, microbatches=microbatches)
    vector = case.vector()
    expected = case.found(Identity(), vector)

    assert relative_error(case.found(SMALL_STEP, vector), expected) < 1e-3


@pytest.mark.parametrize("hypergradient", EXACT, ids=name_of)
def test_a_model_that_recomputes_has_the_same_hypergradient(hypergradient):
    class Recomputed(layers.Layer):
        def __init__(self):
            super().__init__(dtype="float64")
            self.dense = layers.Dense(8, "tanh", dtype="float64")
            self.run = self.dense

        def call(self, x):
            return self.run(x)

    plain = Reweighting(block=[Recomputed()])
    again = Reweighting(block=[block := Recomputed()])
    block.run = remat.recompute(block.dense)
    vector = plain.vector()

    error = relative_error(
        again.found(hypergradient, vector), plain.found(hypergradient, vector)
    )

    assert error < 1e-5


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FiniteDifference(0.0), "`alpha` must be a positive number"),
        (lambda: Neumann(-1), "`iterations` must be a non-negative"),
        (lambda: Neumann(alpha=float("nan")), "`alpha` must be a positive"),
        (lambda: ConjugateGradient(0), "`iterations` must be a positive"),
        (lambda: ConjugateGradient(tolerance=-1), "`tolerance` must be a"),
        (
            lambda: Reweighting(hypergradient=Unrolled(), clipnorm=0),
            "`clipnorm` must be a positive number",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_steps_that_are_not_sgd_cannot_be_unrolled():
    with pytest.raises(ValueError, match="level 'entries' with Adam"):
        Level(Vector([1.0], "entries"), print, "adam", hypergradient=Unrolled())


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_operator_without_a_second_derivative_names_its_level(mode):
    weights, shift = Vector([[[[1.0], [2.0]]]], "entries"), Vector([0.5])

    def loss(x):
        z = x * weights.entries * shift.entries
        patches = tf.raw_ops.MaxPoolWithArgmax(
            input=z, ksize=[1, 1, 2, 1], strides=[1, 1, 2, 1], padding="VALID"
        )
        return tf.reduce_mean(patches.output**2)

    level = Level(weights, loss, "sgd")
    batch = tf.ones([3, 1, 2, 1], tf.float64)
    level.look(batch)

    def run():
        return Identity()(level.values(), level, batch, shift.variables)

    if mode == "graph":
        run = tf.function(run, autograph=False)
    with pytest.raises(ValueError, match="level 'entries' must have second"):
        run()
