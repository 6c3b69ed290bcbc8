"""How a gradient passes through a level: one object for each option.

A level's variables w minimise its loss L(w, x), where x are the variables of
another level. By the implicit function theorem, a gradient v with regard to w
becomes, with regard to x,

    -d/dx <dL/dw, u>,  where H u = v and H is the Hessian of L in w

(Lorraine, Vicol and Duvenaud, AISTATS 2020, arXiv:1911.02590). The objects
differ in u, but for `Unrolled`, which goes back through the updates that the
level made. All derivatives are exact, those of a batch in micro-batches
included, and none of them moves a weight. What this module does not do:
estimate gradients of losses that have none, as reinforcement learning does.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from kmem.base.checks import positive
from kmem.base.checks import positive_int
from kmem.base.sizes import format_size
from kmem.base.sizes import parse_size
from kmem.graph.releasing import zeros_like
from kmem.multilevel import rewinding
from kmem.multilevel import updates
from kmem.multilevel.derivatives import Derivatives
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.solvers import add
from kmem.multilevel.solvers import mixed

# Right to 0.2 % for five models, while ten times as much, or a thirtieth, is
# right to about 1 %: benchmarks/finite_difference.md.
_ALPHA = 0.003


@dataclasses.dataclass(frozen=True)
class Identity:
    """H is taken for the identity: u = v, and the mixed product is exact.

    The cost is that of a gradient and of its gradient.
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
        return mixed(vector, level, batch, wrt)


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
        norm = level.norm(vector)
        step = tf.math.divide_no_nan(tf.constant(alpha, norm.dtype), norm)
        moves = [v * tf.cast(step, v.dtype) for v in vector]
        values = level.values()

        def gradient(sign: int) -> Tensors:
            ends = add(values, moves, sign)
            at = dict(zip(map(id, level.variables), ends, strict=True))
            return level.gradient(batch, wrt, at)

        with level.replayed(batch), level.in_32_bits():
            forth = gradient(1)
            # One after the other: side by side they take twice the memory.
            with tf.control_dependencies(forth):
                back = gradient(-1)
        scale = norm / (2 * alpha)
        return [
            (b - f) * tf.cast(scale, f.dtype)
            for f, b in zip(forth, back, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class SAMA(FiniteDifference):
    """As `FiniteDifference`, for a level whose optimizer is adaptive.

    v becomes u = D v first, where D tells how the level's last update, per
    learning rate, depends on its gradient: an update of Adam's moves each
    weight by what it makes of a gradient, not by the gradient. With plain SGD
    D is the identity. As scalable as the difference: first derivatives only
    (Choe et al., NeurIPS 2023, arXiv:2310.05674).

    Args:
        alpha: The length of the step, as in `FiniteDifference`.

    Raises:
        ValueError: If `alpha` is not positive.
    """

    def kept_steps(self, unroll_steps: int) -> int:
        """Of a level's updates those that are to be known."""
        return 1

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`."""
        *_, step = updates.made_steps(level, "SAMA")
        none = zeros_like(step.slots)
        of_gradient, *_ = updates.adjoint(step, vector, none)
        # Without a step, or with one of no length, nothing passes.
        rate = tf.where(step.made, updates.learning_rate(step), 0.0)
        divide = tf.math.divide_no_nan
        adapted = [divide(-g, tf.cast(rate, g.dtype)) for g in of_gradient]
        return super().__call__(adapted, level, batch, wrt)


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Through the level's last updates, step by step.

    The adjoint of each update, with its clipping, the optimizer's momentum or
    whatever it keeps, weight decay and constraints, at the weights, batches and
    random numbers that it had. It keeps the state of every step that is
    passed, which is the weights and the optimizer's variables, and its
    gradient; and activations of one step. Within a `budget` it keeps the
    states of some steps, from which the others are made again, as seldom as
    can be.

    How: an update is w', s' = U(w, s, g(w, x)) with g = dL/dw, so that its
    adjoint is that of U (kmem/multilevel/updates.py), and then, of what arrives
    at g, products with second derivatives of L.

    Through a level with a `start` it goes on to the variables of that, which
    makes the gradient of MAML (Finn et al., ICML 2017).

    Args:
        steps: Through so many of the last steps only; those before are taken
            for constant. `None` is all `unroll_steps` of the level.
        budget: The bytes that states may take, such as `"200MB"`, that of
            the step that is passed included: two states at least. `None`:
            all are kept, and no step is made again.

    Raises:
        ValueError: If `steps` is not a positive integer, or `budget` is no
            size; in training, if two states do not fit.
    """

    steps: int | None = None
    budget: int | str | None = None

    def __post_init__(self):
        if self.steps is not None:
            positive_int(self.steps, "steps")
        if self.budget is not None:
            parse_size(self.budget, "budget")

    def kept_steps(self, unroll_steps: int) -> int:
        """Of a level's updates those that are to be known."""
        return min(self.steps or unroll_steps, unroll_steps)

    def num_waiting(self, level: Derivatives, num_steps: int) -> int | None:
        """The states that wait beside the one that is worked at; `None` if
        all states are kept, and gradients too."""
        if self.budget is None or num_steps == 1:
            return None
        budget = parse_size(self.budget, "budget")
        state, gradients = updates.num_bytes(level)
        if (state + gradients) * num_steps <= budget:
            return None
        if 2 * state > budget:
            raise ValueError(
                "`budget` of `Unrolled` must hold two states, which are the "
                "weights and what the optimizer keeps: that of the step that "
                "is passed, and one to start from. Received: "
                f"budget={self.budget!r} for level '{level.name}', of which a "
                f"state takes {format_size(state)}"
            )
        return min(budget // state, num_steps) - 1

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`.

        `batch` is not used: every step has its own.

        Raises:
            ValueError: If the level made no steps within the program's.
        """
        steps = updates.made_steps(level, "Unrolled")
        of_weights = list(vector)
        of_slots = zeros_like(steps[0].slots)
        of_others = zeros_like(wrt)
        num_waiting = self.num_waiting(level, len(steps))
        num_left = len(steps)
        for step in rewinding.rewound(steps, num_waiting, of_weights):
            num_left -= 1
            adjoint = updates.adjoint(step, of_weights, of_slots)
            of_gradient, weights, slots = adjoint
            # What the first step started from, only a `start` asks for.
            own = level.variables if num_left or level.start_variables else []
            values = updates.values_at(step)
            with level.replayed(step.batch, step.state):
                products = level.directional_gradient(
                    step.batch, of_gradient, [*own, *wrt], at=values
                )
            if own:
                weights = list(map(tf.add, weights, products[: len(own)]))
            others = list(map(tf.add, of_others, products[len(own) :]))
            of_weights[:] = updates.chosen(step.made, weights, of_weights)
            of_slots = updates.chosen(step.made, slots, of_slots)
            of_others = updates.chosen(step.made, others, of_others)
        return updates.with_start(level, of_others, of_weights, wrt)
