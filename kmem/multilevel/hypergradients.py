"""How a gradient passes through a level: one object for each option.

A level's variables w minimise its loss L(w, x), where x are the variables of
another level. By the implicit function theorem, a gradient v with regard to w
becomes, with regard to x,

    -d/dx <dL/dw, u>,  where H u = v and H is the Hessian of L in w

(Lorraine, Vicol and Duvenaud, AISTATS 2020, arXiv:1911.02590). The objects
differ in u. All derivatives are exact, those of a batch in micro-batches
included, and none of them moves a weight. What this module does not do:
estimate gradients of losses that have none, as reinforcement learning does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmem.base.checks import non_negative_int
from kmem.base.checks import positive
from kmem.base.checks import positive_int
from kmem.base.checks import set_fields
from kmem.multilevel.derivatives import Derivatives
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.workers import num_replicas
from kmem.step.parts import zeros

# Right to 0.2 % for five models, while ten times as much, or a thirtieth, is
# right to about 1 %: benchmarks/finite_difference.md.
_ALPHA = 0.003


@dataclasses.dataclass(frozen=True)
class Identity:
    """H is taken for the identity: u = v, and the mixed product is exact.

    The cost is that of a gradient and of its gradient.

    Example:

    ```python
    from kmem.multilevel import Identity

    hypergradient = Identity()
    ```
    """

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level.

        Args:
            vector: A gradient with regard to the level's variables.
            level: The level.
            batch: What its loss is computed of.
            wrt: The variables to which the gradient is taken.

        Returns:
            The gradient with regard to `wrt`, a list of tensors.
        """
        return _mixed(vector, level, batch, wrt)


@dataclasses.dataclass(frozen=True)
class FiniteDifference:
    """The mixed product as a difference of two gradients, where u = v.

    -(g(w + e v) - g(w - e v)) / 2e with g = dL/dx and e = alpha / |v|: it
    needs first derivatives only, hence the least memory. It is an estimate,
    and another quantity where the loss has a stopped gradient: that makes the
    mixed derivative unsymmetric. Where a level computes in 16 bits, both
    gradients are in float32 all the same: 16 bits do not tell w + e v from w.

    Args:
        alpha: The length of the step; `None` is 0.003.

    Raises:
        ValueError: If `alpha` is not positive.

    Example:

    ```python
    from kmem.multilevel import FiniteDifference

    hypergradient = FiniteDifference(alpha=0.02)
    ```
    """

    alpha: float | None = None

    def __post_init__(self):
        if self.alpha is not None:
            positive(self.alpha, "alpha")

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`."""
        alpha = self.alpha or _ALPHA
        norm = tf.linalg.global_norm(vector)
        step = tf.math.divide_no_nan(tf.constant(alpha, norm.dtype), norm)
        moves = [v * tf.cast(step, v.dtype) for v in vector]
        with level.replayed(batch), level.in_32_bits():
            values = level.values()
            forth = level.gradient(batch, wrt, at=_add(values, moves))
            # One after the other: side by side they take twice the memory.
            with tf.control_dependencies(_in_graph(forth)):
                opposite = [-move for move in moves]
                back = level.gradient(batch, wrt, at=_add(values, opposite))
        scale = norm / (2 * alpha)
        return [
            (b - f) * tf.cast(scale, f.dtype)
            for f, b in zip(forth, back, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Neumann:
    """H is inverted by a series: u = alpha * sum_k (I - alpha H)^k v.

    Args:
        iterations: The terms after the first.
        alpha: The step; the series needs less than 2 / the largest eigenvalue
            of H.

    Raises:
        ValueError: If `iterations` is negative, or `alpha` not positive.

    Example:

    ```python
    from kmem.multilevel import Neumann

    hypergradient = Neumann(iterations=10, alpha=0.5)
    ```
    """

    iterations: int = 5
    alpha: float = 1.0

    def __post_init__(self):
        non_negative_int(self.iterations, "iterations")
        positive(self.alpha, "alpha")

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`."""

        def add_term(term, total):
            product = level.directional_gradient(batch, term, level.variables)
            term = [
                t - self.alpha * p for t, p in zip(term, product, strict=True)
            ]
            return term, _add(total, term)

        with level.replayed(batch):
            _, total = _repeated(
                self.iterations, add_term, (list(vector), list(vector))
            )
            total = [self.alpha * t for t in total]
            return _mixed(total, level, batch, wrt)


@dataclasses.dataclass(frozen=True)
class ConjugateGradient:
    """H u = v is solved by conjugate gradients, from u = 0.

    It ends early where the residual is small, and where a direction of no
    positive curvature shows that H has no such solution.

    Args:
        iterations: The most steps.
        tolerance: It ends when the residual is smaller than this share of v.

    Raises:
        ValueError: If `iterations` or `tolerance` is not positive.

    Example:

    ```python
    from kmem.multilevel import ConjugateGradient

    hypergradient = ConjugateGradient(iterations=10)
    ```
    """

    iterations: int = 5
    tolerance: float = 1e-10

    def __post_init__(self):
        iterations = positive_int(self.iterations, "iterations")
        set_fields(self, iterations=iterations)
        positive(self.tolerance, "tolerance")

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`."""
        start = _dot(vector, vector)
        enough = start * self.tolerance**2

        def improve(solution, residual, direction, square):
            product = level.directional_gradient(
                batch, direction, level.variables
            )
            curvature = _dot(direction, product)
            active = (square > enough) & (curvature > 0)
            step = _where(active, tf.math.divide_no_nan(square, curvature))
            solution = _add(solution, direction, step)
            residual = _add(residual, product, -step)
            after = _dot(residual, residual)
            share = tf.math.divide_no_nan(after, square)
            turned = _add(residual, direction, share)
            # The same direction again is the end of all that follows, too.
            direction = [
                tf.where(active, new, old)
                for new, old in zip(turned, direction, strict=True)
            ]
            return solution, residual, direction, after

        state = (_zeros(vector), vector, vector, start)
        with level.replayed(batch):
            solution, *_ = _repeated(self.iterations, improve, state)
            return _mixed(solution, level, batch, wrt)


def _mixed(vector: Tensors, level: Derivatives, batch, wrt: list) -> Tensors:
    return [-p for p in level.directional_gradient(batch, vector, wrt)]


def _repeated(count: int, body: Callable, state: tuple) -> tuple:
    """`body` applied to `state` again and again."""
    if tf.executing_eagerly() or num_replicas() > 1:
        # Replicas cannot meet within a loop of a graph.
        for _ in range(count):
            state = body(*state)
        return state
    _, *final = tf.while_loop(
        lambda i, *state: i < count,
        lambda i, *state: (i + 1, *body(*state)),
        (0, *state),
        parallel_iterations=1,
    )
    return tuple(final)


def _in_graph(tensors: Tensors) -> Tensors:
    return [] if tf.executing_eagerly() else tensors


def _dot(a: Tensors, b: Tensors) -> tf.Tensor:
    """The inner product of two lists of tensors."""
    return tf.add_n([tf.reduce_sum(x * y) for x, y in zip(a, b, strict=True)])


def _zeros(tensors: Tensors) -> Tensors:
    return [zeros(tensor.shape, tensor.dtype) for tensor in tensors]


def _add(a: Tensors, b: Tensors, factor: Any = 1) -> Tensors:
    """a + factor * b."""
    return [x + factor * y for x, y in zip(a, b, strict=True)]


def _where(condition: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return tf.where(condition, value, tf.zeros_like(value))
