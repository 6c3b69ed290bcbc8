"""Small multilevel problems, in float64, whose answers are known."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops

from kmem.multilevel import Level
from kmem.multilevel import Program

MODES = {
    "eager": {"run_eagerly": True},
    "graph": {},
    "xla": {"jit_compile": True},
}


class Vector(keras.Model):
    """Some numbers to learn."""

    def __init__(self, start, name=None, dtype="float64"):
        super().__init__(name=name, dtype=dtype)
        start = np.asarray(start, dtype)
        self.entries = self.add_weight(shape=start.shape, name="entries")
        self.entries.assign(start)
        self.built = True


class Ridge:
    """Ridge regression with a penalty for each coefficient.

    At the minimum w* the gradient v of an outer loss with regard to w becomes
    -w* H^-1 v with regard to the penalties.
    """

    rows, size = 40, 6

    def __init__(self, **options):
        random = np.random.default_rng(0)
        self.x = random.normal(size=(self.rows, self.size))
        self.y = self.x @ random.normal(size=self.size) + random.normal(
            size=self.rows
        )
        penalties = random.uniform(0.1, 0.6, self.size)
        self.hessian = self.x.T @ self.x / self.rows + np.diag(penalties)
        self.solution = np.linalg.solve(
            self.hessian, self.x.T @ self.y / self.rows
        )
        self.vector = random.normal(size=self.size)
        self.weights = Vector(self.solution, "weights")
        self.penalties = Vector(penalties, "penalties")
        self.level = Level(self.weights, self.loss, "sgd", **options)

    def loss(self, x, y):
        w = self.weights.entries
        errors = ops.square(ops.matmul(x, w) - y)
        penalty = ops.sum(self.penalties.entries * ops.square(w))
        return 0.5 * (ops.mean(errors) + penalty)

    def found(self, hypergradient):
        (gradient,) = hypergradient(
            [tf.constant(self.vector)],
            self.level,
            (tf.constant(self.x), tf.constant(self.y)),
            self.penalties.trainable_variables,
        )
        return np.asarray(gradient)

    @property
    def exact(self):
        return -self.solution * np.linalg.solve(self.hessian, self.vector)

    @property
    def with_identity(self):
        return -self.solution * self.vector


class Reweighting:
    """A classifier, a net that weights its losses, and balanced data.

    Betty's data reweighting in small: the weights are made of losses through
    which no gradient flows, if `stopped`.
    """

    def __init__(
        self,
        stopped=True,
        block=(),
        dtype="float64",
        stopped_shares=False,
        **options,
    ):
        keras.utils.set_random_seed(0)
        policy = dict(dtype=dtype)
        self.classifier = keras.Sequential(
            [
                keras.Input((4,), dtype=dtype),
                layers.Dense(8, "tanh", **policy),
                *block,
                layers.Dense(3, **policy),
            ],
            name="classifier",
        )
        self.reweight = keras.Sequential(
            [
                keras.Input((1,), dtype=dtype),
                layers.Dense(5, "tanh", **policy),
                layers.Dense(1, "sigmoid", **policy),
            ],
            name="reweight",
        )
        self.stopped = stopped
        self.stopped_shares = stopped_shares
        self.dtype = dtype
        random = np.random.default_rng(1)
        # Of a size at which third derivatives do not matter.
        for variable in self.classifier.trainable_variables:
            variable.assign(0.3 * random.normal(size=variable.shape))
        self.batches = [self._batch(random, 12) for _ in range(2)]
        self.lower = Level(
            self.classifier, self.weighted_loss, "sgd", **options
        )
        self.upper = Level(self.reweight, self.balanced_loss, "adam", **options)

    def _batch(self, random, rows):
        x = tf.constant(random.normal(size=(rows, 4)), self.dtype)
        return x, tf.constant(random.integers(0, 3, rows))

    def losses(self, x, y):
        logits = self.classifier(x, training=True)
        return ops.sparse_categorical_crossentropy(y, logits, from_logits=True)

    def weighted_loss(self, x, y):
        losses = self.losses(x, y)
        seen = ops.stop_gradient(losses) if self.stopped else losses
        shares = self.reweight(seen[:, None])[:, 0]
        if self.stopped_shares:
            shares = ops.stop_gradient(shares)
        return ops.mean(shares * losses)

    def balanced_loss(self, x, y):
        return ops.mean(self.losses(x, y))

    def vector(self):
        """The upper loss's gradient with regard to the classifier."""
        return self.upper.gradient(
            self.batches[1], self.classifier.trainable_variables
        )

    def found(self, hypergradient, vector=None):
        """The gradient through the classifier."""
        return flat(
            hypergradient(
                self.vector() if vector is None else vector,
                self.lower,
                self.batches[0],
                self.reweight.trainable_variables,
            )
        )


def train(mode="graph", epochs=2, steps_per_execution=1, case=None, **options):
    """Trains a case's program; the weights, and the history."""
    case = case or two_levels()
    case.program.compile(steps_per_execution=steps_per_execution, **MODES[mode])
    history = case.program.fit(case.data, epochs=epochs, verbose=0, **options)
    return [v.numpy() for v in case.program.variables], history.history


def two_levels(unroll_steps=2, batch=8, lower=(), upper=(), **options):
    """A small data reweighting as a program, with its data."""
    case = Reweighting(**options)
    case.program = Program(
        [
            Level(
                case.classifier,
                case.weighted_loss,
                keras.optimizers.SGD(0.1, momentum=0.5),
                unroll_steps=unroll_steps,
                **dict(lower),
            ),
            Level(
                case.reweight,
                case.balanced_loss,
                keras.optimizers.Adam(0.01),
                **dict(upper),
            ),
        ]
    )
    random = np.random.default_rng(2)

    def data(rows, batch):
        x, y = case._batch(random, rows)
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        return dataset.batch(batch, drop_remainder=True)

    accumulated = [level.num_batches for level in case.program.levels]
    case.data = {
        "classifier": data(8 * 8, batch // accumulated[0]),
        "reweight": data(8 * 4, batch // accumulated[1]),
    }
    return case


def flat(tensors):
    return np.concatenate([np.ravel(t).astype("float64") for t in tensors])


def relative_error(got, want):
    got, want = np.ravel(got), np.ravel(want)
    return np.linalg.norm(got - want) / np.linalg.norm(want)
