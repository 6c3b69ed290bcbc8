"""The same numbers as Betty's, from files that benchmarks/betty_golden.py made.

The package betty-ml 0.2.1, of which they are, goes on from a residual of the
iteration before in conjugate gradients: its numbers are those after one.
Later ones are compared with a direct solution.
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
    program = Program([case.lower, case.upper])
    program.fit(
        {
            "classifier": case.batches("lower"),
            "reweight": case.batches("upper"),
        },
        steps_per_epoch=OUTER_STEPS,
        verbose=0,
    )
    for model in (case.classifier, case.reweight):
        want = golden()[f"{name_of(hypergradient)}_{model.name}"]
        assert relative_error(flat(model.get_weights()), want) < 1e-10


def test_many_conjugate_gradients_are_the_direct_solution():
    case = Reweighting(ConjugateGradient(iterations=80))
    variables = case.classifier.trainable_variables
    shapes = [variable.shape for variable in variables]
    batch = case.first_batch("lower")

    @tf.function(autograph=False)
    def products(direction):
        parts = tf.split(direction, [s.num_elements() for s in shapes])
        direction = list(map(tf.reshape, parts, shapes))
        wrt = [*variables, *case.reweight.trainable_variables]
        return case.lower.directional_gradient(batch, direction, wrt)

    vector = flat(case.vector())
    hessian = [flat(products(row)[:4]) for row in np.eye(len(vector))]
    solution = np.linalg.solve(hessian, vector)
    mixed = flat(products(solution)[4:])
    assert relative_error(case.found(), -mixed) < 1e-8
