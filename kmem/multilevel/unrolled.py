"""How a gradient passes through updates that a level made, step by step.

An update is w', m' = U(w, m, g(w, x)) with g = dL/dw, so that its adjoint is
that of U, and then, of what arrives at g, products with second derivatives of
L. U is what `keras.optimizers.SGD` does: clipping, weight decay, momentum and
constraints, written with tensors, since Keras assigns variables. What this
module does not do: other optimizers.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from kmem.base import private_keras
from kmem.multilevel.derivatives import Derivatives
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.loss import read
from kmem.step.parts import zeros


@dataclasses.dataclass
class Step:
    """An update of a level.

    Attributes:
        state: What the loss assigns, such as random seeds, before it.
        gradients: What the level gave to be applied, before it was clipped.
        values: The level's variables before it.
        velocities: Those of its optimizer before it.
        number: The updates that the optimizer had made before.
        made: Whether it was made: a scaled loss may overflow.
    """

    batch: Any
    state: Tensors
    gradients: Tensors
    values: Tensors
    velocities: Tensors
    learning_rate: tf.Tensor
    number: tf.Tensor
    made: Any = True


def noted(
    level: Derivatives, batch, state: Tensors, gradients: Tensors
) -> Step:
    """What is to be known of an update that is about to be made."""
    optimizer = level.optimizer
    values = level.values()
    velocities = read(optimizer.momentums if optimizer.momentum else [])
    return Step(
        batch,
        state,
        gradients,
        values,
        velocities or [zeros(value.shape, value.dtype) for value in values],
        tf.convert_to_tensor(optimizer.learning_rate),
        tf.convert_to_tensor(optimizer.iterations),
    )


def finish(level: Derivatives, step: Step) -> None:
    """Adds an update to the level's, now that it was made, or was not."""
    step.made = tf.convert_to_tensor(level.optimizer.iterations) != step.number
    level.steps.append(step)


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """Through the level's last `unroll_steps` updates by SGD, step by step.

    The adjoint of each update, with its clipping, momentum, weight decay and
    constraints, at the weights, batches and random numbers that it had. It
    keeps the weights of every step, and activations of one; in eager mode the
    steps' gradients and velocities, too.

    Example:

    ```python
    from kmem.multilevel import Unrolled

    hypergradient = Unrolled()
    ```
    """

    def __call__(
        self, vector: Tensors, level: Derivatives, batch: Any, wrt: list
    ) -> Tensors:
        """Takes a gradient through a level; see `Identity`.

        `batch` is not used: every step has its own.

        Raises:
            ValueError: If the level made no steps within the program's.
        """
        if not level.steps:
            raise ValueError(
                "`Unrolled` needs the steps of a level that was trained by a "
                f"`Program` just before. Received: level '{level.name}' "
                "without steps"
            )
        of_weights = vector
        of_velocity = [zeros(v.shape, v.dtype) for v in vector]
        of_others = [zeros(v.shape, v.dtype) for v in wrt]
        num_own = len(level.variables)
        for step in reversed(level.steps):
            of_gradient, weights, velocity = _through_update(
                level, step, of_weights, of_velocity
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
            of_weights = _if(step.made, weights, of_weights)
            of_velocity = _if(step.made, velocity, of_velocity)
            of_others = _if(step.made, others, of_others)
        return of_others

    @staticmethod
    def check(level: Derivatives) -> None:
        """Refuses updates whose adjoint this is not.

        Raises:
            ValueError: If the level's optimizer is not SGD, or does not make
                an update of every gradient, and of it alone.
        """
        optimizer = level.optimizer
        settings = [
            f"{name}={getattr(optimizer, name)}"
            for name in (
                "gradient_accumulation_steps",
                "ema_overwrite_frequency",
            )
            if getattr(optimizer, name, None)
        ]
        if type(optimizer) is not keras.optimizers.SGD or settings:
            raise ValueError(
                "`Unrolled` needs a level that is trained by "
                "`keras.optimizers.SGD`, without `ema_overwrite_frequency` or "
                "`gradient_accumulation_steps`, which the level itself has: "
                "use that, or `Identity`, `Neumann` or `ConjugateGradient`. "
                f"Received: level '{level.name}' with "
                f"{type(optimizer).__name__} {' '.join(settings)}".rstrip()
            )


def _through_update(
    level: Derivatives, step: Step, of_weights: Tensors, of_velocity: Tensors
) -> tuple[Tensors, Tensors, Tensors]:
    """The adjoint of an update: of its gradient, weights and velocity."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([step.gradients, step.values, step.velocities])
        clipped = _clipped(level, step.gradients)
        after = _updated(level, step, clipped)
    # TensorFlow's types know of no structures.
    gradient: Any = tape.gradient
    of_clipped, *rest = gradient(
        after,
        [clipped, step.values, step.velocities],
        output_gradients=(of_weights, of_velocity),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    of_gradient = gradient(clipped, step.gradients, output_gradients=of_clipped)
    # Norms have no derivative at zero, where clipping changes nothing.
    is_zero = tf.equal(tf.linalg.global_norm(step.gradients), 0)
    return _if(is_zero, of_clipped, of_gradient), *rest


def _clipped(level: Derivatives, gradients: Tensors) -> Tensors:
    """The gradients as they are applied."""
    clip = getattr(level.optimizer, private_keras.CLIP)
    clipped = clip(level.clipped(gradients))
    return list(map(tf.identity, clipped))


def _updated(
    level: Derivatives, step: Step, gradients: Tensors
) -> tuple[Tensors, Tensors]:
    """What `keras.optimizers.SGD` makes of the weights and velocities."""
    optimizer = level.optimizer
    decays = getattr(optimizer, private_keras.USE_WEIGHT_DECAY)
    weights, velocities = [], []
    for variable, w, m, g in zip(
        level.variables, step.values, step.velocities, gradients, strict=True
    ):
        # As Keras casts them: a number of Python's becomes float32 first.
        cast: Any = keras.ops.cast
        rate = cast(step.learning_rate, w.dtype)
        momentum = cast(optimizer.momentum, w.dtype)
        decay = cast(optimizer.weight_decay or 0.0, w.dtype)
        if decays(variable):
            w = w - w * decay * rate
        m = m * momentum - g * rate
        w = w + (m * momentum - g * rate if optimizer.nesterov else m)
        if variable.constraint is not None:
            w = variable.constraint(w)
        weights.append(w)
        velocities.append(m)
    return weights, velocities


def _if(condition, these: Tensors, those: Tensors) -> Tensors:
    return [
        tf.where(condition, a, b) for a, b in zip(these, those, strict=True)
    ]
