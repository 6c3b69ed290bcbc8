"""The same numbers as Betty's, from files that benchmarks/betty_golden.py made.

They are of Betty's commit cb6221f, and agree with direct solutions. Of the
package betty-ml 0.2.1, whose conjugate gradients make each direction of the
residual before, thirty of them are 24 % off.
"""

import functools
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from multilevel_cases import flat
from multilevel_cases import relative_error

from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Level
from kmem.multilevel import Neumann
from kmem.multilevel import Program

GOLDEN = pathlib.Path(__file__).with_name("golden") / "betty_reweighting.npz"
# As in benchmarks/betty_golden.py.
PENALTY = 0.25
OUTER_STEPS, INNER_STEPS = 20, 2


@functools.cache
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


def hypergradients():
    iterations = int(golden()["cg_iterations"])
    return [
        FiniteDifference(alpha=0.01),
        ConjugateGradient(iterations),
        Neumann(iterations=5, alpha=0.5),
    ]


def name_of(hypergradient):
    return type(hypergradient).__name__


class Reweighting:
    """The problem of the files: data reweighting with a small MLP."""

    def __init__(self, hypergradient, dtype="float64"):
        self.hypergradient, self.dtype = hypergradient, dtype
        self.classifier = self.net("classifier", 4, 8, 3)
        self.reweight = self.net("reweight", 1, 5, 1, "sigmoid")
        sgd = functools.partial(keras.optimizers.SGD, 0.125, momentum=0.5)
        self.lower = Level(
            self.classifier,
            self.weighted_loss,
            sgd(),
            unroll_steps=INNER_STEPS,
            hypergradient=hypergradient,
        )
        self.upper = Level(self.reweight, self.balanced_loss, sgd())

    def net(self, name, inputs, hidden, outputs, activation=None):
        dense = functools.partial(layers.Dense, dtype=self.dtype)
        model = keras.Sequential(
            [
                keras.Input((inputs,), dtype=self.dtype),
                dense(hidden, "tanh"),
                dense(outputs, activation),
            ],
            name=name,
        )
        model.set_weights([golden()[f"{name}_{i}"] for i in range(4)])
        return model

    def losses(self, x, y):
        logits = self.classifier(x, training=True)
        return ops.sparse_categorical_crossentropy(y, logits, from_logits=True)

    def weighted_loss(self, x, y):
        losses = self.losses(x, y)
        weights = self.reweight(ops.stop_gradient(losses)[:, None])[:, 0]
        weights_of_net = self.classifier.trainable_variables
        squares = sum(ops.sum(ops.square(w)) for w in weights_of_net)
        return ops.mean(weights * losses) + PENALTY * squares

    def balanced_loss(self, x, y):
        return ops.mean(self.losses(x, y))

    def batches(self, name):
        x = golden()[f"x_{name}"].astype(self.dtype)
        return tf.data.Dataset.from_tensor_slices((x, golden()[f"y_{name}"]))

    def first_batch(self, name):
        return next(iter(self.batches(name)))

    def vector(self):
        return self.upper.gradient(
            self.first_batch("upper"), self.classifier.trainable_variables
        )

    def found(self):
        return flat(
            self.hypergradient(
                self.vector(),
                self.lower,
                self.first_batch("lower"),
                self.reweight.trainable_variables,
            )
        )


def train(case):
    program = Program([case.lower, case.upper])
    program.fit(
        {
            "classifier": case.batches("lower"),
            "reweight": case.batches("upper"),
        },
        steps_per_epoch=OUTER_STEPS,
        verbose=0,
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-3)]
)
@pytest.mark.parametrize("hypergradient", hypergradients(), ids=name_of)
def test_a_hypergradient_is_that_of_betty(hypergradient, dtype, tolerance):
    found = Reweighting(hypergradient, dtype).found()
    want = golden()[f"{name_of(hypergradient)}_{dtype}"]
    assert relative_error(found, want) < tolerance


@pytest.mark.parametrize("hypergradient", hypergradients(), ids=name_of)
def test_a_program_trains_as_the_engine_of_betty_does(hypergradient):
    case = Reweighting(hypergradient)
    train(case)
    for model in (case.classifier, case.reweight):
        want = golden()[f"{name_of(hypergradient)}_{model.name}"]
        assert relative_error(flat(model.get_weights()), want) < 1e-10


class Direct:
    """Solves H u = v with H as an array, and -u with the mixed derivative."""

    def __call__(self, vector, level, batch, wrt):
        own, shapes = level.variables, [v.shape for v in level.variables]
        sizes = [shape.num_elements() for shape in shapes]

        def products(direction):
            parts = list(map(tf.reshape, tf.split(direction, sizes), shapes))
            found = level.directional_gradient(batch, parts, [*own, *wrt])
            return tf.concat([tf.reshape(t, [-1]) for t in found], 0)

        size = sum(sizes)
        rows = tf.map_fn(products, tf.eye(size, dtype=vector[0].dtype))
        right = tf.concat([tf.reshape(v, [-1]) for v in vector], 0)
        solved = tf.linalg.solve(rows[:, :size], right[:, None])
        mixed = -tf.matmul(rows[:, size:], solved, transpose_a=True)[:, 0]
        parts = tf.split(mixed, [w.shape.num_elements() for w in wrt])
        return [tf.reshape(p, w.shape) for p, w in zip(parts, wrt, strict=True)]


@pytest.mark.parametrize("method", ["hypergradient", "training"])
def test_thirty_conjugate_gradients_of_both_are_the_direct_solution(method):
    case = Reweighting(Direct())
    if method == "hypergradient":
        want = golden()["ConjugateGradient_float64"]
        assert relative_error(want, case.found()) < 1e-12
        return
    train(case)
    for model in (case.classifier, case.reweight):
        want = golden()[f"ConjugateGradient_{model.name}"]
        found = flat(model.get_weights())
        assert relative_error(found, want) < 1e-12
