"""Programs of several levels train as closed forms, and each mode, say."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from multilevel_cases import MODES
from multilevel_cases import Ridge
from multilevel_cases import Vector
from multilevel_cases import relative_error
from multilevel_cases import train
from multilevel_cases import two_levels

from kmem.multilevel import SAMA
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Neumann
from kmem.multilevel import Program
from kmem.multilevel import Unrolled

ONES = tf.data.Dataset.from_tensors(tf.ones([1], tf.float64))


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that is half as large at each step."""

    def __call__(self, step):
        return 0.4 * 0.5 ** tf.cast(step, "float32")


class Chain:
    """Each level follows the one before it: w1 = A w3, w2 = B w1.

    The top level wants w2 = c, so its gradient is A'B'(w2 - c).
    """

    def __init__(self, edges="infer", **options):
        random = np.random.default_rng(0)
        self.a, self.b = random.normal(size=(2, 3, 3))
        w1, w2, w3, self.c = random.normal(size=(4, 3))
        self.first, self.second, self.top = (
            Vector(w1, "first"),
            Vector(w2, "second"),
            Vector(w3, "top"),
        )

        def follows(model, matrix, other):
            def loss(x):
                error = model.entries - ops.matmul(matrix, other.entries)
                return ops.mean(x) * ops.sum(error**2) / 2

            return loss

        def distance(x):
            return (
                ops.mean(x) * ops.sum((self.second.entries - self.c) ** 2) / 2
            )

        # Where they are, so that the weights' change is the gradient.
        still = lambda: keras.optimizers.SGD(0.0)  # noqa: E731
        self.program = Program(
            [
                Level(
                    self.first,
                    follows(self.first, self.a, self.top),
                    still(),
                    **options,
                ),
                Level(
                    self.second,
                    follows(self.second, self.b, self.first),
                    still(),
                    **options,
                ),
                Level(self.top, distance, keras.optimizers.SGD(1.0)),
            ],
            edges=edges,
        )

    def fit(self, **options):
        data = dict.fromkeys(("first", "second", "top"), ONES)
        return self.program.fit(data, verbose=0, **options)


@pytest.mark.parametrize(
    "hypergradient",
    [Identity(), FiniteDifference(), Neumann(0), ConjugateGradient(2)],
    ids=lambda h: type(h).__name__,
)
def test_a_chain_of_three_levels_has_the_gradient_of_the_closed_form(
    hypergradient,
):
    chain = Chain(hypergradient=hypergradient)
    before = chain.top.entries.numpy()
    error = chain.second.entries.numpy() - chain.c
    expected = chain.a.T @ chain.b.T @ error

    chain.fit()

    found = before - chain.top.entries.numpy()
    assert relative_error(found, expected) < 1e-10


class Nested:
    """A middle level that is paid by how the lowest one answers it.

    The lowest wants w = 2 v + x, the middle v = 3 x and w = 0, and the top
    v = 1, of which `blind` takes nothing.
    """

    def __init__(self, blind=False, **options):
        low, middle, top = (Vector([0.5], name) for name in "wvx")

        def lowest(c):
            error = low.entries - 2 * middle.entries - top.entries
            return ops.mean(c) * ops.sum(error**2) / 2

        def between(c):
            squares = (middle.entries - 3 * top.entries) ** 2 + low.entries**2
            return ops.mean(c) * ops.sum(squares) / 2

        def highest(c):
            wanted = top.entries if blind else middle.entries
            return ops.mean(c) * ops.sum((wanted - 1.0) ** 2) / 2

        levels = [
            Level(model, loss, keras.optimizers.SGD(rate))
            for model, loss, rate in zip(
                (low, middle, top),
                (lowest, between, highest),
                (0.0, 0.0, 1.0),
                strict=True,
            )
        ]
        self.program = Program(levels, **options)

    def gradients(self):
        low, middle, top = self.program.levels
        middle.optimizer.learning_rate = 1.0
        before = [v.numpy()[0] for v in self.program.variables]
        self.program.fit(dict.fromkeys("wvx", ONES), verbose=0)
        after = [v.numpy()[0] for v in self.program.variables]
        return dict(zip("wvx", np.subtract(before, after), strict=True))


def test_a_level_whose_response_takes_third_derivatives_is_refused():
    # Through the middle's own loss the top's gradient would be 3 (v - 1),
    # while v = x / 5 makes it (v - 1) / 5.
    case = Nested()
    with pytest.raises(ValueError, match="'x' through level 'v'.*v -> w -> v"):
        case.gradients()


def test_such_a_level_is_trained_where_no_gradient_passes_through_it():
    found = Nested(blind=True).gradients()

    # Of the middle: v - 3 x + 2 w, with w = 0.5 where it is.
    assert found["v"] == pytest.approx(0.5 - 1.5 + 1.0)
    assert found["x"] == pytest.approx(-0.5)


def test_without_its_edge_a_level_takes_those_below_for_constant():
    edges = [("x", "v"), ("v", "x"), ("w", "v"), ("w", "x")]

    found = Nested(edges=edges).gradients()

    # The middle has moved to v = 1.5 when the top's gradient is taken.
    assert found["v"] == pytest.approx(0.5 - 1.5)
    assert found["x"] == pytest.approx(3 * (1.5 - 1.0))


def assert_close(got, want, tolerance):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


@pytest.mark.parametrize(
    "mode, steps", [("graph", 1), ("graph", 2), ("xla", 2)]
)
def test_every_mode_trains_alike(mode, steps):
    weights, history = train(mode, steps_per_execution=steps)
    expected, logs = train("eager")

    assert_close(weights, expected, 1e-10)
    assert history.keys() == {"loss", "classifier_loss", "reweight_loss"}
    for key, values in history.items():
        np.testing.assert_allclose(values, logs[key], 1e-6)


def test_many_steps_of_a_level_train_alike_in_a_loop():
    def case():
        lower = {"gradient_accumulation_steps": 2}
        return two_levels(unroll_steps=5, lower=lower, stopped=False)

    weights, history = train("graph", 1, case=case(), steps_per_epoch=1)
    expected, logs = train("eager", 1, case=case(), steps_per_epoch=1)

    assert_close(weights, expected, 1e-10)
    for key, values in history.items():
        np.testing.assert_allclose(values, logs[key], 1e-6)


def test_loops_within_loops_take_the_batches_in_turn():
    def train_chain(mode):
        chain = Chain(unroll_steps=4)
        for level in chain.program.levels:
            level.optimizer.learning_rate = 0.1
        chain.program.compile(**MODES[mode])
        rows = tf.data.Dataset.range(1, 17, output_type=tf.float64)
        rows = rows.batch(1, drop_remainder=True)
        data = dict.fromkeys(("first", "second", "top"), rows)
        chain.program.fit(data, steps_per_epoch=1, verbose=0)
        return [v.numpy() for v in chain.program.variables]

    assert_close(train_chain("graph"), train_chain("eager"), 1e-12)


def test_a_step_is_no_larger_for_more_steps_of_a_level():
    def num_operations(unroll_steps):
        case = two_levels(unroll_steps)
        case.program.prepare(case.data)
        stacked = tf.data.Dataset.zip(
            {
                "classifier": case.data["classifier"].batch(unroll_steps),
                "reweight": case.data["reweight"],
            }
        )
        step = tf.function(case.program.train_step, autograph=False)
        graph = step.get_concrete_function(stacked.element_spec).graph
        return len(graph.get_operations())

    assert num_operations(50) == num_operations(5)


@pytest.mark.parametrize(
    "hypergradient, options",
    [
        (Identity(), {"microbatches": 4}),
        (FiniteDifference(), {"gradient_accumulation_steps": 4}),
        (Unrolled(), {"gradient_accumulation_steps": 2, "microbatches": 2}),
    ],
    ids=str,
)
def test_micro_batches_and_groups_of_batches_train_as_the_whole(
    options, hypergradient
):
    lower = {"hypergradient": hypergradient}
    expected, _ = train(case=two_levels(lower=lower))
    case = two_levels(lower={**lower, **options}, upper=options)

    assert_close(train(case=case)[0], expected, 1e-10)


class Scalars:
    """A follower w of b * x, for batches b, and a leader x that wants w = c.

    With SGD's rate 1 the follower arrives at once, so that the leader's
    gradient is b (b x - c).
    """

    c = 3.0

    def __init__(self, lower=(), rate=1.0, **upper):
        self.follower = Vector([0.7], "follower")
        self.leader = Vector([0.5], "leader")

        def follow(b):
            difference = self.follower.entries - b * self.leader.entries
            return ops.mean(difference**2) / 2

        def lead(b):
            return ops.mean((self.follower.entries - self.c) ** 2) / 2

        self.program = Program(
            [
                Level(
                    self.follower,
                    follow,
                    keras.optimizers.SGD(rate),
                    **dict(lower),
                ),
                Level(self.leader, lead, keras.optimizers.SGD(0.1), **upper),
            ]
        )

    def fit(self, *targets, **options):
        rows = tf.data.Dataset.from_tensor_slices(
            np.asarray(targets, "float64")
        )
        data = {
            "follower": rows.batch(1, drop_remainder=True),
            "leader": ONES.repeat().batch(1).map(lambda x: x[0]),
        }
        self.program.fit(data, verbose=0, **options)
        return float(self.follower.entries[0]), float(self.leader.entries[0])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_tasks_give_one_update_with_the_mean_of_their_gradients(mode):
    case = Scalars(tasks_per_update=3)
    case.program.compile(**MODES[mode])
    tasks = [1.0, 2.0, -1.0]

    follower, leader = case.fit(*tasks)

    mean = np.mean([b * (b * 0.5 - case.c) for b in tasks])
    assert leader == pytest.approx(0.5 - 0.1 * mean, rel=1e-7)
    assert follower == pytest.approx(-0.5)


def test_a_level_that_rolls_back_makes_its_step_again_with_the_new_leader():
    case = Scalars(lower={"roll_back": True, "unroll_steps": 2}, rate=0.5)

    follower, leader = case.fit(1.0, 2.0)

    first = 0.7 - 0.5 * (0.7 - 0.5)
    second = first - 0.5 * (first - 1.0)
    expected = 0.5 - 0.1 * 2.0 * (second - case.c)
    assert leader == pytest.approx(expected, rel=1e-7)
    assert follower == pytest.approx(0.7 - 0.5 * (0.7 - 2.0 * leader))
    assert int(case.program.levels[0].optimizer.iterations) == 1


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_unrolled_steps_are_differentiated_one_by_one(momentum):
    case = two_levels(
        unroll_steps=3, lower={"hypergradient": Unrolled()}, stopped=False
    )
    case.program.levels[0].optimizer.momentum = momentum
    case.program.levels[1].optimizer = keras.optimizers.SGD(1.0)
    before = [v.numpy() for v in case.reweight.trainable_variables]
    expected = by_hand(case, 3, momentum)

    train(case=case, epochs=1, steps_per_epoch=1)

    after = [v.numpy() for v in case.reweight.trainable_variables]
    for start, end, gradient in zip(before, after, expected, strict=True):
        np.testing.assert_allclose(start - end, gradient, 1e-7, 1e-12)


class Unrolling:
    """Penalties of a ridge regression, learned through three steps."""

    def __init__(
        self, optimizer, constraint=None, steps=None, start=False, **options
    ):
        ridge = Ridge()
        self.weights, self.penalties = ridge.weights, ridge.penalties
        self.weights.entries.constraint = constraint
        data = tf.data.Dataset.from_tensor_slices((ridge.x, ridge.y))
        data = data.batch(8, drop_remainder=True)
        self.first = np.array([0.5, -1.0, 2.0, 0.1, -0.2, 0.3])
        self.upper = Vector(self.first, "start") if start else self.penalties
        if start:
            options["start"] = self.upper
        self.data = {"weights": data, self.upper.name: data}

        def errors(x, y):
            found = ops.matmul(x, self.weights.entries)
            return ops.mean(ops.square(found - y))

        self.program = Program(
            [
                Level(
                    self.weights,
                    ridge.loss,
                    optimizer,
                    unroll_steps=3,
                    hypergradient=Unrolled(steps),
                    **options,
                ),
                Level(self.upper, errors, keras.optimizers.SGD(0.0)),
            ]
        )
        self.begin = self.upper.entries.numpy()

    def trained(self, entries, rate=0.0):
        """The upper loss after one round, and the upper level's entries."""
        self.weights.entries.assign(self.first)
        self.upper.entries.assign(entries)
        below, top = self.program.optimizers
        if not hasattr(self, "fresh"):
            below.build([self.weights.entries])
            self.fresh = [v.numpy() for v in below.variables]
        for variable, value in zip(below.variables, self.fresh, strict=True):
            variable.assign(value)
        top.learning_rate.assign(rate)
        self.program.fit(self.data, verbose=0)
        x, y = next(iter(self.data["weights"]))
        errors = x.numpy() @ self.weights.entries.numpy() - y.numpy()
        return np.mean(errors**2), self.upper.entries.numpy()

    def found_and_expected(self):
        """The gradient in a direction: kmem's, and by differences."""
        way = np.random.default_rng(3).normal(size=self.begin.shape)
        _, after = self.trained(self.begin, rate=1.0)
        step = 1e-5
        ahead, _ = self.trained(self.begin + step * way)
        behind, _ = self.trained(self.begin - step * way)
        return (self.begin - after) @ way, (ahead - behind) / (2 * step)


@pytest.mark.parametrize(
    "optimizer, options",
    [
        ({}, {"clipnorm": 0.05}),
        ({}, {"clipnorm": 1e5}),
        ({"momentum": 0.5}, {"clipnorm": 0.05}),
        ({"clipnorm": 0.05}, {}),
        ({"global_clipnorm": 0.05}, {"clipnorm": 0.07}),
        ({"clipvalue": 0.4, "momentum": 0.5}, {}),
        ({"momentum": 0.5, "nesterov": True}, {}),
        ({"weight_decay": 0.3, "momentum": 0.5}, {}),
        ({"use_ema": True, "ema_momentum": 0.0}, {}),
        ({"momentum": 0.5}, {"constraint": keras.constraints.MaxNorm(2.0)}),
        ({"learning_rate": Halving()}, {}),
    ],
    ids=lambda arguments: " ".join(arguments) or "plain",
)
def test_an_unrolled_step_is_the_update_that_was_made(optimizer, options):
    optimizer = keras.optimizers.SGD(**{"learning_rate": 0.2} | optimizer)

    found, expected = Unrolling(optimizer, **options).found_and_expected()

    assert abs(expected) > 1e-5
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.2, amsgrad=True),
        lambda: keras.optimizers.AdamW(0.2, weight_decay=0.3, clipnorm=0.5),
        lambda: keras.optimizers.Adagrad(0.2),
        lambda: keras.optimizers.Adadelta(0.2),
        lambda: keras.optimizers.Adamax(0.2),
        lambda: keras.optimizers.RMSprop(0.2, momentum=0.5, centered=True),
        lambda: keras.optimizers.Ftrl(0.2),
        lambda: keras.optimizers.Lamb(0.2),
    ],
)
def test_steps_of_adaptive_optimizers_are_unrolled(make):
    found, expected = Unrolling(make()).found_and_expected()

    assert abs(expected) > 1e-7
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.2),
        lambda: keras.optimizers.SGD(0.2, momentum=0.5),
    ],
)
def test_what_the_steps_start_from_gets_the_gradient_of_maml(make):
    case = Unrolling(make(), start=True)
    found, expected = case.found_and_expected()

    assert found == pytest.approx(expected, rel=1e-3)
    # In the next round they start there again, with a new optimizer.
    once, _ = case.trained(case.begin)
    case.weights.entries.assign(case.first + 1.0)
    case.program.fit(case.data, verbose=0)
    x, y = next(iter(case.data["weights"]))
    errors = x.numpy() @ case.weights.entries.numpy() - y.numpy()
    assert np.mean(errors**2) == once


def test_unrolled_steps_are_truncated_in_a_loop_as_without_one():
    def change(mode, steps, unroll_steps=6):
        case = two_levels(
            unroll_steps, lower={"hypergradient": Unrolled(steps)}
        )
        case.program.levels[1].optimizer = keras.optimizers.SGD(1.0)
        before = case.reweight.get_weights()
        train(mode, 1, case=case, steps_per_epoch=1)
        after = case.reweight.get_weights()
        return np.concatenate(
            [np.ravel(a - b) for a, b in zip(after, before, strict=True)]
        )

    truncated = change("graph", 2)
    assert relative_error(truncated, change("eager", 2)) < 1e-10
    assert relative_error(truncated, change("graph", 6)) > 0.05


def test_a_weight_without_a_gradient_leaves_others_theirs():
    weights, other = Vector([1.0, 2.0], "weights"), Vector([0.5], "other")

    def loss(x):
        # The second entry is never used: what Adam keeps for it stays zero.
        return ops.mean(x) * (weights.entries[0] - other.entries[0]) ** 2

    def outer(x):
        return ops.mean(x) * ops.sum(weights.entries)

    program = Program(
        [
            Level(
                weights,
                loss,
                keras.optimizers.Adam(0.1),
                unroll_steps=2,
                hypergradient=Unrolled(),
            ),
            Level(other, outer, keras.optimizers.SGD(1.0)),
        ]
    )
    ones = tf.data.Dataset.from_tensors(tf.ones([1], tf.float64)).repeat(2)

    program.fit({"weights": ones, "other": ones}, verbose=0)

    assert np.isfinite(other.entries.numpy()).all()
    assert other.entries.numpy() != 0.5


def test_sama_is_the_difference_after_the_derivative_of_the_update():
    """Adam's first update of g is g / (|g| + e'): D = e' / (|g| + e')^2."""
    epsilon = 0.05
    weights, other = Vector([1.0, -0.7], "weights"), Vector([0.1, 0.2], "other")

    def loss(x):
        squares = (weights.entries - other.entries) ** 2
        return ops.mean(x) * ops.sum(squares) / 2

    def outer(x):
        return ops.mean(x) * ops.sum(weights.entries * np.array([2.0, -3.0]))

    gradient = weights.entries.numpy() - other.entries.numpy()
    program = Program(
        [
            Level(
                weights,
                loss,
                keras.optimizers.Adam(1e-3, epsilon=epsilon),
                hypergradient=SAMA(),
            ),
            Level(other, outer, keras.optimizers.SGD(1.0)),
        ]
    )

    program.fit({"weights": ONES, "other": ONES}, verbose=0)

    scaled = epsilon / np.sqrt(1 - 0.999)
    adapted = np.array([2.0, -3.0]) * scaled / (np.abs(gradient) + scaled) ** 2
    moved = np.array([0.1, 0.2]) - other.entries.numpy()
    np.testing.assert_allclose(moved, adapted, 1e-5)


@pytest.mark.parametrize(
    "hypergradient, replayed", [(Unrolled(), [1, 0]), (Identity(), [1])]
)
def test_steps_are_run_again_with_the_random_numbers_they_had(
    hypergradient, replayed
):
    drawn = []

    class Noting(layers.Dropout):
        def call(self, inputs, training=False):
            drawn.append(self.seed_generator.state.value[1])
            return super().call(inputs, training=training)

    case = two_levels(
        lower={"hypergradient": hypergradient},
        block=[Noting(0.2, dtype="float64", seed=1)],
    )
    case.program.levels[0].optimizer.momentum = 0.0
    case.program.prepare(case.data)
    drawn.clear()

    train("eager", case=case, epochs=1, steps_per_epoch=1)

    # Two steps, the upper loss, and what takes its gradient further.
    assert [int(number) for number in drawn] == [0, 1, 2, *replayed]


def by_hand(case, num_steps, momentum):
    """The gradient of the balanced loss through SGD, on one tape."""
    reweight = [v.value for v in case.reweight.trainable_variables]
    weights = [v.numpy() for v in case.classifier.trainable_variables]
    velocity = [np.zeros_like(w) for w in weights]
    rate = float(np.float32(0.1))

    def losses_at(weights, x, y):
        hidden = tf.tanh(x @ weights[0] + weights[1])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            y, hidden @ weights[2] + weights[3]
        )

    with tf.GradientTape() as outer:
        outer.watch(reweight)
        weights = list(map(tf.constant, weights))
        for x, y in case.data["classifier"].take(num_steps):
            with tf.GradientTape() as inner:
                inner.watch(weights)
                losses = losses_at(weights, x, y)
                share = case.reweight(losses[:, None])[:, 0]
                loss = tf.reduce_mean(share * losses)
            gradients = inner.gradient(loss, weights)
            velocity = [
                momentum * v - rate * g
                for v, g in zip(velocity, gradients, strict=True)
            ]
            weights = list(map(tf.add, weights, velocity))
        loss = tf.reduce_mean(
            losses_at(weights, *next(iter(case.data["reweight"])))
        )
    return outer.gradient(loss, reweight)


def test_a_penalty_is_learned_where_betty_learns_it():
    """Logistic regression with a penalty for each coefficient."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 20))
    true = random.normal(size=20) * (np.arange(20) < 10)
    y = (x @ true + random.normal(size=200) > 0).astype("float64")
    weights = Vector(np.zeros(20), "weights")
    penalties = Vector(np.ones(20), "penalties")

    def cross_entropy(x, y):
        logits = ops.matmul(x, weights.entries)
        return ops.mean(
            tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits)
        )

    def penalized(x, y):
        penalty = ops.mean(ops.square(weights.entries) * penalties.entries)
        return cross_entropy(x, y) + penalty / 2

    program = Program(
        [
            Level(
                weights, penalized, keras.optimizers.SGD(1.0), unroll_steps=20
            ),
            Level(penalties, cross_entropy, keras.optimizers.SGD(1.0)),
        ]
    )
    data = {
        "weights": tf.data.Dataset.from_tensors((x[:100], y[:100])),
        "penalties": tf.data.Dataset.from_tensors((x[100:], y[100:])),
    }

    history = program.fit(data, steps_per_epoch=10, epochs=5, verbose=0)

    assert history.history["penalties_loss"][-1] < 0.48
