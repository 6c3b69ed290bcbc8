"""How a gradient passes through updates that a level made, step by step.

An update is w', s' = U(w, s, g(w, x)) with g = dL/dw, so that its adjoint is
that of U (kmem/multilevel/updates.py), and then, of what arrives at g, products
with second derivatives of L. What this module does not do: keep activations of
more than one step.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from kmem.base.checks import positive_int
from kmem.multilevel import updates
from kmem.multilevel.derivatives import Derivatives
from kmem.multilevel.derivatives import Tensors
from kmem.step.parts import zeros


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Through the level's last updates, step by step.

    The adjoint of each update, with its clipping, the optimizer's momentum or
    whatever it keeps, weight decay and constraints, at the weights, batches and
    random numbers that it had. It keeps the weights and the optimizer's
    variables of every step that is passed, and activations of one; in eager
    mode the steps' gradients, too.

    Through a level with a `start` it goes on to the variables of that, which
    makes the gradient of MAML (Finn et al., ICML 2017).

    Args:
        steps: Through so many of the last steps only; those before are taken
            for constant. `None` is all `unroll_steps` of the level.

    Raises:
        ValueError: If `steps` is not a positive integer.

    Example:

    ```python
    from kmem.multilevel import Unrolled

    hypergradient = Unrolled(steps=5)
    ```
    """

    steps: int | None = None

    def __post_init__(self):
        if self.steps is not None:
            positive_int(self.steps, "steps")

    def kept_steps(self, unroll_steps: int) -> int:
        """Of a level's updates those that are to be known."""
        return min(self.steps or unroll_steps, unroll_steps)

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`.

        `batch` is not used: every step has its own.

        Raises:
            ValueError: If the level made no steps within the program's.
        """
        steps = updates.made_steps(level, "Unrolled")
        of_weights = vector
        of_slots = [zeros(s.shape, s.dtype) for s in steps[0].slots]
        of_others = [zeros(v.shape, v.dtype) for v in wrt]
        num_own = len(level.variables)
        for step in reversed(steps):
            of_gradient, weights, slots = updates.adjoint(
                level, step, of_weights, of_slots
            )
            with level.replayed(step.batch, step.state):
                products = level.directional_gradient(
                    step.batch,
                    of_gradient,
                    [*level.variables, *wrt],
                    at=step.values,
                )
            weights = list(map(tf.add, weights, products[:num_own]))
            others = list(map(tf.add, of_others, products[num_own:]))
            of_weights = updates.chosen(step.made, weights, of_weights)
            of_slots = updates.chosen(step.made, slots, of_slots)
            of_others = updates.chosen(step.made, others, of_others)
        return updates.with_start(level, of_others, of_weights, wrt)
