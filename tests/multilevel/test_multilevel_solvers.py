"""Solvers find the direct solution, say what they leave, and start from it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from multilevel_cases import MODES
from multilevel_cases import Ridge
from multilevel_cases import Vector
from multilevel_cases import relative_error

from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Level
from kmem.multilevel import MinimalResidual
from kmem.multilevel import Neumann
from kmem.multilevel import Program

SIZE = 6


class Quadratic:
    """A loss w'H w / 2 - w'x, through which v passes as H^-1 v."""

    def __init__(self, eigenvalues):
        random = np.random.default_rng(0)
        basis, _ = np.linalg.qr(random.normal(size=(SIZE, SIZE)))
        self.hessian = basis @ np.diag(eigenvalues) @ basis.T
        self.vector = random.normal(size=SIZE)
        self.weights = Vector(random.normal(size=SIZE), "weights")
        self.target = Vector(np.zeros(SIZE), "target")
        self.level = Level(self.weights, self.loss, "sgd")
        self.batch = tf.ones([3], tf.float64)
        self.level.look(self.batch)

    def loss(self, x):
        w = self.weights.entries
        curved = ops.sum(w * ops.matmul(self.hessian, w)) / 2
        return ops.mean(x) * (curved - ops.sum(w * self.target.entries))

    def found(self, hypergradient, mode="eager"):
        """The solution, and the residual that is reported."""

        def run():
            self.level.local.residuals.clear()
            wrt = self.target.trainable_variables
            vector = [tf.constant(self.vector)]
            found = hypergradient(vector, self.level, self.batch, wrt)
            return found[0], self.level.local.residuals[0]

        if mode != "eager":
            run = tf.function(run, jit_compile=mode == "xla", autograph=False)
        return [np.asarray(t) for t in run()]

    def left(self, solution):
        rest = self.hessian @ solution - self.vector
        return np.linalg.norm(rest) / np.linalg.norm(self.vector)


INDEFINITE = [3.0, 2.0, 1.0, 0.5, -0.5, -2.0]


@pytest.mark.parametrize("mode", MODES)
def test_minimal_residuals_solve_what_has_eigenvalues_of_both_signs(mode):
    case = Quadratic(INDEFINITE)
    lefts = []
    for count in (1, 3, SIZE) if mode == "eager" else (SIZE + 3,):
        found, reported = case.found(MinimalResidual(count), mode)
        lefts.append(case.left(found))
        assert reported == pytest.approx(lefts[-1], abs=1e-10)

    assert lefts == sorted(lefts, reverse=True)
    assert lefts[-1] < 1e-10


def test_a_singular_hessian_has_the_solution_of_least_squares():
    case = Quadratic([3.0, 2.0, 1.0, 0.5, -0.5, 0.0])
    case.vector = case.hessian @ case.vector

    found, _ = case.found(MinimalResidual(20, tolerance=1e-8))

    expected = np.linalg.lstsq(case.hessian, case.vector, rcond=1e-12)[0]
    assert relative_error(found, expected) < 1e-7


def test_conjugate_gradients_say_that_they_ended_at_a_negative_curvature():
    case = Quadratic(INDEFINITE)

    found, reported = case.found(ConjugateGradient(20))

    assert reported == pytest.approx(case.left(found))
    assert reported > 0.01


@pytest.mark.parametrize("solver", [ConjugateGradient, MinimalResidual])
def test_damping_is_added_to_the_hessian(solver):
    ridge = Ridge()
    damped = ridge.hessian + 0.3 * np.eye(Ridge.size)
    expected = -ridge.solution * np.linalg.solve(damped, ridge.vector)

    found = ridge.found(solver(Ridge.size, damping=0.3))

    assert relative_error(found, expected) < 1e-10


@pytest.mark.parametrize(
    "solver, least, most",
    [
        (ConjugateGradient(SIZE, tolerance=0.2), 2, 4),
        (MinimalResidual(SIZE, tolerance=0.2), 2, 4),
        (Neumann(500, alpha=0.5, tolerance=0.2), 2, 40),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_tolerance_ends_the_iterations(solver, least, most):
    case = Quadratic([3.0, 2.0, 1.5, 1.0, 0.5, 0.2])
    taken = []
    product = case.level.directional_gradient

    def counted(*arguments):
        taken.append(arguments)
        return product(*arguments)

    case.level.directional_gradient = counted
    found, reported = case.found(solver)

    # The last one is the mixed product.
    assert least <= len(taken) - 1 <= most
    assert case.left(found) <= reported + 1e-12 <= 0.2 + 1e-12


class Still:
    """A ridge regression whose penalties are not moved either."""

    def __init__(self, hypergradient):
        self.ridge = Ridge()
        x, y = self.ridge.x, self.ridge.y
        v = self.ridge.vector

        def linear(x, y):
            w = self.ridge.weights.entries
            return ops.sum(w * v) * ops.mean(ops.ones_like(y))

        self.program = Program(
            [
                Level(
                    self.ridge.weights,
                    self.ridge.loss,
                    keras.optimizers.SGD(0.0),
                    hypergradient=hypergradient,
                ),
                Level(self.ridge.penalties, linear, keras.optimizers.SGD(0.0)),
            ]
        )
        data = tf.data.Dataset.from_tensors((x, y)).repeat(4)
        self.data = {"weights": data, "penalties": data}

    def residuals(self, epochs=1, steps=1):
        history = self.program.fit(
            self.data, epochs=epochs, steps_per_epoch=steps, verbose=0
        )
        return history.history["weights_residual"]


@pytest.mark.parametrize(
    "solver",
    [
        ConjugateGradient(2, warm_start=True),
        MinimalResidual(2, warm_start=True),
        Neumann(3, 0.5, warm_start=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_warm_start_goes_on_from_the_step_before(solver, tmp_path):
    case = Still(solver)
    residuals = case.residuals(epochs=8)
    path = tmp_path / "program.weights.h5"
    case.program.save_weights(path)
    more = case.residuals()

    assert residuals == sorted(residuals, reverse=True)
    assert residuals[-1] < 0.05 * residuals[0]
    # What is kept is saved: a program that is resumed does not start anew.
    resumed = Still(solver)
    resumed.program.prepare(resumed.data)
    resumed.program.load_weights(path)
    assert resumed.residuals() == more


def test_a_cold_start_leaves_the_same_in_each_step():
    first, second = Still(ConjugateGradient(2)).residuals(epochs=2)

    assert first == second > 1e-3


@pytest.mark.parametrize(
    "solver", [Neumann(8, alpha=5.0), Neumann(3000, alpha=50.0)], ids=str
)
def test_a_solver_that_does_not_converge_is_named(solver):
    with pytest.warns(UserWarning, match="level 'weights' did not converge"):
        Still(solver).residuals()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ConjugateGradient(damping=-1.0), "`damping` must be a non-"),
        (lambda: MinimalResidual(0), "`iterations` must be a positive"),
        (lambda: Neumann(tolerance=-0.1), "`tolerance` must be a non-neg"),
        (lambda: FiniteDifference(-1), "`alpha` must be a positive"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
