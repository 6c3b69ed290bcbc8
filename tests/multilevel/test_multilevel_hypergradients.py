"""Gradients through a level are those of closed forms and of plain autodiff."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from multilevel_cases import Reweighting
from multilevel_cases import Ridge
from multilevel_cases import Vector
from multilevel_cases import flat
from multilevel_cases import relative_error
from tensorflow.python.eager import record

import kmem
from kmem import remat
from kmem.multilevel import SAMA
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Neumann
from kmem.multilevel import Program
from kmem.multilevel import Unrolled
from kmem.multilevel import updates

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
def test_micro_batches_make_the_hypergradient_of_a_batch(
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
def test_xla_computes_the_same_in_micro_batches(hypergradient):
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


@pytest.mark.parametrize("hypergradient", [Unrolled(), SAMA()])
def test_steps_around_those_of_single_variables_are_refused(hypergradient):
    with pytest.raises(ValueError, match="level 'entries' with Nadam"):
        Level(
            Vector([1.0], "entries"),
            print,
            "nadam",
            hypergradient=hypergradient,
        )


@pytest.mark.parametrize(
    "option",
    [{"gradient_accumulation_steps": 2}, {"ema_overwrite_frequency": 3}],
)
def test_updates_of_several_gradients_cannot_be_unrolled(option):
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, **option)

    with pytest.raises(ValueError, match=f"'entries' with SGD {[*option][0]}="):
        Level(
            Vector([1.0], "entries"), print, optimizer, hypergradient=Unrolled()
        )


@pytest.mark.parametrize("hypergradient", [Unrolled(), SAMA()])
def test_moments_in_8_bits_pass_no_gradient_and_are_refused(hypergradient):
    def program(size, optimizer):
        level = Level(
            Vector(np.ones(size), "entries"),
            lambda x: ops.mean(x) * ops.sum(level.model.entries),
            optimizer,
            hypergradient=hypergradient,
        )
        return Program([level])

    batch = {"entries": tf.ones([2], "float64")}
    # Those of a few weights are not in 8 bits.
    program(8, kmem.optimizers.AdamW8bit()).prepare(batch)
    program(4096, "adafactor").prepare(batch)

    with pytest.raises(
        ValueError,
        match=r"keeps no integers.*level 'entries' with AdamW8bit momentum_code"
        r"s: uint8 velocity_codes: uint8$",
    ):
        program(4096, kmem.optimizers.AdamW8bit()).prepare(batch)


def through_a_step(hypergradient, optimizer, gradient, made=False):
    """What a hypergradient finds where a level has just made a step, or not."""
    case = Ridge()
    case.level.optimizer = optimizer
    optimizer.build(case.level.variables)
    batch = tf.constant(case.x), tf.constant(case.y)
    gradients = [tf.fill([Ridge.size], np.float64(gradient))]

    step = updates.noted(case.level, batch, [], None, gradients, (True, True))
    optimizer.iterations.assign_add(int(made))
    updates.finish(step)
    return case.found(hypergradient)


@pytest.mark.parametrize("hypergradient", [Unrolled(), SAMA()])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_step_that_an_overflow_prevents_passes_no_gradient(
    hypergradient, name
):
    optimizer = keras.optimizers.get(name)

    found = through_a_step(hypergradient, optimizer, "inf")

    np.testing.assert_array_equal(found, np.zeros(Ridge.size))


@pytest.mark.parametrize("hypergradient", [Unrolled(), SAMA()])
def test_a_learning_rate_of_zero_passes_no_gradient(hypergradient):
    optimizer = keras.optimizers.Adam(0.0)

    found = through_a_step(hypergradient, optimizer, 1.0, made=True)

    np.testing.assert_array_equal(found, np.zeros(Ridge.size))


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


def again(function):
    """Runs a function again for its gradient, which has a gradient too."""

    @tf.custom_gradient
    def run(*arguments):
        def gradient(known, variables):
            with tf.GradientTape() as tape:
                tape.watch([arguments, variables])
                value = function(*arguments)
            of_arguments, of_variables = tape.gradient(
                value, [list(arguments), variables], output_gradients=known
            )
            return tuple(of_arguments), of_variables

        with record.stop_recording():
            return function(*arguments), gradient

    return run


class Rerun(layers.Layer):
    """Runs a layer again for its gradient, with a loop inside it."""

    def __init__(self, layer, **options):
        super().__init__(**options)
        self.layer = layer
        self.run = keras.remat(lambda x: layer(x))

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return self.run(x)


def squared_gradient(case):
    """A loss with a tape of its own, whose gradient is 2 H (H w - X'y / n)."""

    def loss(x, y):
        with tf.GradientTape() as tape:
            value = Ridge.loss(case, x, y)
        gradient = tape.gradient(value, case.weights.entries)
        return ops.sum(ops.square(gradient))

    return loss


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "wrapped", [keras.remat, tf.recompute_grad, again, remat.recompute]
)
def test_a_loss_that_runs_again_has_the_gradients_of_the_closed_form(
    wrapped, microbatches, mode
):
    case = Ridge(microbatches=microbatches)
    w = np.array([0.5, -1.0, 2.0, 0.1, -0.2, 0.3])
    case.weights.entries.assign(w)
    case.level.loss = wrapped(case.loss)
    batch = tf.constant(case.x), tf.constant(case.y)

    def run():
        wrt = [case.weights.entries, case.penalties.entries]
        vector = [tf.constant(case.vector)]
        return [
            *case.level.gradient(batch, wrt),
            *FiniteDifference()(vector, case.level, batch, wrt[1:]),
        ]

    case.level.look(batch)
    run = tf.function(run, autograph=False) if mode == "graph" else run
    of_weights, of_penalties, through = run()

    moment = case.x.T @ case.y / case.rows
    np.testing.assert_allclose(of_weights, case.hessian @ w - moment, 1e-12)
    np.testing.assert_allclose(of_penalties, w**2 / 2, 1e-12)
    np.testing.assert_allclose(through, -w * case.vector, 1e-9)


@pytest.mark.parametrize("wrapped", [again, remat.recompute])
def test_what_runs_again_has_second_derivatives(wrapped):
    case = Ridge()
    case.level.loss = wrapped(case.loss)

    found = case.found(ConjugateGradient(Ridge.size))

    np.testing.assert_allclose(found, case.exact, 1e-9)


def test_a_loss_may_have_a_tape_of_its_own():
    case = Ridge()
    w = np.array([0.5, -1.0, 2.0, 0.1, -0.2, 0.3])
    case.weights.entries.assign(w)
    case.level.loss = squared_gradient(case)

    (found,) = case.level.gradient((tf.constant(case.x), tf.constant(case.y)))

    moment = case.x.T @ case.y / case.rows
    expected = 2 * case.hessian @ (case.hessian @ w - moment)
    np.testing.assert_allclose(found, expected, 1e-10)


def scoped(make):
    with keras.RematScope():
        return make()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "plainly, repeatedly",
    [
        (
            lambda: layers.Dense(8, "tanh", dtype="float64"),
            lambda: scoped(lambda: layers.Dense(8, "tanh", dtype="float64")),
        ),
        (
            lambda: layers.LSTM(8, dtype="float64"),
            lambda: Rerun(layers.LSTM(8, dtype="float64"), dtype="float64"),
        ),
    ],
    ids=["scope", "loop"],
)
def test_layers_that_keras_runs_again_have_the_same_gradients(
    plainly, repeatedly, mode
):
    found = []
    for make in (plainly, repeatedly):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5, 4), dtype="float64"), make()])
        weigh = Vector([0.5], "weigh")

        def loss(x, model=model, weigh=weigh):
            return ops.mean(ops.square(model(x) - weigh.entries))

        level = Level(model, loss, "sgd")
        x = tf.random.stateless_normal((3, 5, 4), (1, 2), dtype="float64")
        level.look(x)

        def run(x, level=level, weigh=weigh):
            vector = [v / 3 for v in level.values()]
            through = SMALL_STEP(vector, level, x, weigh.trainable_variables)
            return [*level.gradient(x), *through]

        run = tf.function(run, autograph=False) if mode == "graph" else run
        found.append(flat(run(x)))

    plain, repeated = found
    assert np.linalg.norm(plain) > 0.01
    np.testing.assert_allclose(repeated, plain, 1e-9, 1e-12)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("wrapped", [keras.remat, tf.recompute_grad])
def test_what_has_no_second_derivative_when_it_runs_again_is_refused(
    wrapped, mode
):
    case = Ridge()
    case.level.loss = wrapped(case.loss)
    found = case.found
    if mode == "graph":
        found = tf.function(found, autograph=False)

    with pytest.raises(ValueError, match="`kmem.remat.recompute` has"):
        found(Identity())
