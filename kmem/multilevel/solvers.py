"""How H u = v is solved, H being the Hessian of a level's loss: iterations.

Each takes products of H with vectors, one an iteration. Where H is positive
definite, as at a minimum, conjugate gradients need the fewest (Hestenes and
Stiefel, 1952); minimal residuals need it to be symmetric only (Paige and
Saunders, SIAM J. Numer. Anal. 1975); the series is a fixed-point iteration.
What this module does not do: precondition.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmem.base import checks
from kmem.graph.releasing import zeros_like
from kmem.multilevel.derivatives import Derivatives
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.loss import assign
from kmem.multilevel.loss import read
from kmem.multilevel.workers import num_replicas

Product = Callable[[Tensors], Tensors]


class Solver:
    """Solves H u = v, and takes the mixed product with u."""

    iterations: int
    damping: float
    warm_start: bool

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`."""

        def product(direction: Tensors) -> Tensors:
            own = level.variables
            found = level.directional_gradient(batch, direction, own)
            return (
                add(found, direction, self.damping) if self.damping else found
            )

        guess = level.local.guess if self.warm_start else []
        dot, norm = level.dot, level.norm(vector)
        right, start = list(vector), []
        with level.replayed(batch):
            if guess:
                start = read(guess)
                image = product(start)
                # As much of it as helps: none if it does not.
                share = tf.math.divide_no_nan(
                    dot(image, right), dot(image, image)
                )
                start = [share * s for s in start]
                right = add(right, image, -share)
            solution, residual = self._solve(product, dot, right, norm)
            if guess:
                solution = add(start, solution)
                assign(guess, solution)
            if self.iterations:
                left = tf.math.divide_no_nan(residual, norm)
                level.local.residuals.append(left)
            return mixed(solution, level, batch, wrt)

    def _solve(
        self, product: Product, dot: Callable, right: Tensors, norm: tf.Tensor
    ) -> tuple[Tensors, tf.Tensor]:
        """The solution, and the norm of its residual.

        `dot` is the inner product of two vectors, and `norm` that of v, of
        which the right side may be a rest.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Neumann(Solver):
    """H is inverted by a series: u = alpha * sum_k (I - alpha H)^k v.

    That is the fixed-point iteration u <- u - alpha (H u - v). The residual
    in the logs is the last term's, which is what it was before that term.

    Args:
        iterations: The most terms after the first.
        alpha: The step; the series needs less than 2 / the largest eigenvalue
            of H.
        tolerance: It ends when a term is smaller than this share of v.
        warm_start: Whether it starts from the solution of the step before.

    Raises:
        ValueError: If `iterations` or `tolerance` is negative, or `alpha` not
            positive.
    """

    iterations: int = 5
    alpha: float = 1.0
    tolerance: float = 0.0
    warm_start: bool = False
    damping = 0.0

    def __post_init__(self):
        checks.non_negative_int(self.iterations, "iterations")
        checks.positive(self.alpha, "alpha")
        checks.non_negative(self.tolerance, "tolerance")

    def _solve(self, product, dot, right, norm):
        def add_term(term, total):
            term = add(term, product(term), -self.alpha)
            return term, add(total, term)

        def goes_on(term, total):
            # Not a number is neither: there is nothing to wait for.
            return dot(term, term) > (self.tolerance * norm) ** 2

        term, total = _repeated(
            self.iterations, add_term, goes_on, (list(right), list(right))
        )
        return [self.alpha * t for t in total], tf.sqrt(dot(term, term))


@dataclasses.dataclass(frozen=True)
class _Krylov(Solver):
    """What solvers have that stay in the space of H's powers times v."""

    iterations: int = 5
    tolerance: float = 1e-10
    damping: float = 0.0
    warm_start: bool = False

    def __post_init__(self):
        iterations = checks.positive_int(self.iterations, "iterations")
        checks.set_fields(self, iterations=iterations)
        checks.positive(self.tolerance, "tolerance")
        checks.non_negative(self.damping, "damping")


@dataclasses.dataclass(frozen=True)
class ConjugateGradient(_Krylov):
    """H u = v is solved by conjugate gradients.

    It ends early where the residual is small, and where a direction of no
    positive curvature shows that H has no such solution: `MinimalResidual`
    goes on there, and `damping` makes the curvature positive.

    Args:
        iterations: The most steps.
        tolerance: It ends when the residual is smaller than this share of v.
        damping: It solves (H + damping I) u = v.
        warm_start: Whether it starts from the solution of the step before,
            for one product more.

    Raises:
        ValueError: If `iterations` or `tolerance` is not positive, or
            `damping` negative.
    """

    def _solve(self, product, dot, right, norm):
        enough = (self.tolerance * norm) ** 2

        def improve(solution, residual, direction, square, _):
            image = product(direction)
            curvature = dot(direction, image)
            is_positive = curvature > 0
            step = tf.math.divide_no_nan(square, curvature)
            step = tf.where(is_positive, step, tf.zeros_like(step))
            solution = add(solution, direction, step)
            residual = add(residual, image, -step)
            after = dot(residual, residual)
            share = tf.math.divide_no_nan(after, square)
            direction = add(residual, direction, share)
            return solution, residual, direction, after, is_positive

        def goes_on(solution, residual, direction, square, is_positive):
            return (square > enough) & is_positive

        start = dot(right, right), tf.constant(True)
        state = (zeros_like(right), right, right, *start)
        found = _repeated(self.iterations, improve, goes_on, state)
        return found[0], tf.sqrt(found[3])


@dataclasses.dataclass(frozen=True)
class MinimalResidual(_Krylov):
    """H u = v is solved by minimal residuals (MINRES).

    The residual falls with each step whatever the signs of H's eigenvalues
    are, and a singular H has the solution of least squares. Where H is
    positive definite, conjugate gradients come as far for less memory.

    Args:
        iterations: The most steps.
        tolerance: It ends when the residual is smaller than this share of v.
        damping: It solves (H + damping I) u = v.
        warm_start: Whether it starts from the solution of the step before,
            for one product more.

    Raises:
        ValueError: If `iterations` or `tolerance` is not positive, or
            `damping` negative.
    """

    def _solve(self, product, dot, right, norm):
        """In the names of Paige and Saunders: H in a Lanczos basis is
        tridiagonal, and rotations make it triangular."""
        divide: Any = tf.math.divide_no_nan
        zero = tf.zeros_like(norm)

        def improve(x, w1, w2, r1, r2, numbers):
            old_beta, beta, dbar, epsilon, phibar, cs, sn = numbers
            v = [divide(y, beta) for y in r2]
            y = add(product(v), r1, -divide(beta, old_beta))
            alpha = dot(v, y)
            y = add(y, r2, -divide(alpha, beta))
            new_beta = tf.sqrt(dot(y, y))
            delta = cs * dbar + sn * alpha
            gbar = sn * dbar - cs * alpha
            gamma = tf.sqrt(gbar**2 + new_beta**2)
            # The next rotation, of which `cs` and `sn` are the one before.
            next_cs, next_sn = divide(gbar, gamma), divide(new_beta, gamma)
            w = [
                divide(a - epsilon * b - delta * c, gamma)
                for a, b, c in zip(v, w1, w2, strict=True)
            ]
            x = add(x, w, next_cs * phibar)
            betas = beta, new_beta, -cs * new_beta, sn * new_beta
            numbers = *betas, next_sn * phibar, next_cs, next_sn
            return x, w2, w, r2, y, numbers

        def goes_on(x, w1, w2, r1, r2, numbers):
            return (numbers[4] > self.tolerance * norm) & (numbers[1] > 0)

        beta = tf.sqrt(dot(right, right))
        none = zeros_like(right)
        numbers = (zero, beta, zero, zero, beta, zero - 1, zero)
        state = (none, none, none, none, right, numbers)
        found = _repeated(self.iterations, improve, goes_on, state)
        return found[0], found[-1][4]


def mixed(vector: Tensors, level: Derivatives, batch, wrt: list) -> Tensors:
    """-d/dx <dL/dw, vector>, w being the level's variables, x `wrt`."""
    return [-p for p in level.directional_gradient(batch, vector, wrt)]


def _repeated(
    count: int, body: Callable, goes_on: Callable, state: tuple
) -> tuple:
    """`body` applied to `state` again and again, as long as that goes on.

    At least once, if at all: a dry run has to see what it needs.
    """
    if num_replicas() > 1:
        # Replicas cannot meet within a loop of a graph.
        for i in range(count):
            active = True if i == 0 else goes_on(*state)
            state = tf.nest.map_structure(
                lambda new, old, active=active: tf.where(active, new, old),
                body(*state),
                state,
            )
        return state
    _, *final = tf.while_loop(
        lambda i, *state: (i < count) & ((i < 1) | goes_on(*state)),
        lambda i, *state: (i + 1, *body(*state)),
        (0, *state),
        parallel_iterations=1,
    )
    return tuple(final)


def add(a: Tensors, b: Tensors, factor: Any = 1) -> Tensors:
    """a + factor * b."""
    return [x + factor * y for x, y in zip(a, b, strict=True)]
