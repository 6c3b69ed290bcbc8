"""An optimizer's update as a function of tensors, and its adjoint.

Keras's optimizers assign variables. Here they assign them within a
`keras.StatelessScope`, so that an update is w', s' = U(w, s, g) with weights w,
the optimizer's own variables s and a gradient g, and a tape gives its adjoint.
U is all of it: clipping, weight decay, the optimizer's step and constraints.
What this module does not do: optimizers that step around their
`update_step`, as Nadam does.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.multilevel.derivatives import Derivatives
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.derivatives import Values
from kmem.multilevel.loss import read
from kmem.step import batches

# A square root has no derivative at zero, where weights have had no gradient.
# It changes no update: what is added to the root is larger than its root.
_TINY = 1e-36


@dataclasses.dataclass
class Step:
    """An update of a level.

    Attributes:
        level: The level.
        state: What the loss assigns, such as random seeds, before it.
        below: What the level reads of others that step between its steps.
        scale: What the loss was multiplied by, if it was.
        settings: The updates that the optimizer had made before, and its
            learning rate if that is a variable.
        gradients: What the level gave to be applied, before it was clipped;
            empty, like the two below, if it is to be made again.
        values: The level's variables before it.
        slots: Those of its optimizer before it.
        made: Whether it was made: a scaled loss may overflow.
    """

    level: Derivatives
    batch: Any
    state: Tensors
    below: Tensors
    scale: tf.Tensor | None
    settings: Tensors
    gradients: Tensors
    values: Tensors
    slots: Tensors
    made: Any = True


def noted(
    level: Derivatives,
    batch: Any,
    state: Tensors,
    scale: tf.Tensor | None,
    gradients: Tensors,
    keeps: tuple[bool, bool],
) -> Step:
    """What is to be known of an update that is about to be made; `keeps` says
    whether its state is kept, and whether its gradients are."""
    slots, settings = _own(level.optimizer)
    keeps_state, keeps_gradients = keeps
    return Step(
        level,
        batch,
        state,
        read(level.below),
        scale,
        read(settings),
        gradients if keeps_gradients else [],
        level.values() if keeps_state else [],
        read(slots) if keeps_state else [],
    )


def num_bytes(level: Derivatives) -> tuple[int, int]:
    """The bytes of the state before an update, and of its gradients."""
    of_weights = batches.num_bytes(level.variables)
    slots, _ = _own(level.optimizer)
    return of_weights + batches.num_bytes(slots), of_weights


def finish(step: Step) -> None:
    """Adds an update to the level's last ones, now that it was made or not."""
    number = step.settings[0]
    step.made = tf.convert_to_tensor(step.level.optimizer.iterations) != number
    step.level.local.steps.append(step)


def made_steps(level: Derivatives, name: str) -> list[Step]:
    """The steps that a level has just made; an error if there are none."""
    if not level.local.steps:
        raise ValueError(
            f"`{name}` needs the steps of a level that was trained by a "
            f"`Program` just before. Received: level '{level.name}' "
            "without steps"
        )
    return level.local.steps


def learning_rate(step: Step) -> tf.Tensor:
    """That of a step, by the optimizer's schedule if it has one."""
    _, settings = _own(step.level.optimizer)
    mapping = zip(settings, step.settings, strict=True)
    with keras.StatelessScope(state_mapping=list(mapping)):
        return tf.convert_to_tensor(step.level.optimizer.learning_rate)


def with_start(
    level: Derivatives, gradients: Tensors, of_start: Tensors, wrt: list
) -> Tensors:
    """Adds the gradient of what a level's steps have started from."""
    if not level.start_variables:
        return gradients
    keys = map(id, level.start_variables)
    start = dict(zip(keys, of_start, strict=True))
    level.local.reached.update(start.keys() & set(map(id, wrt)))
    return [
        gradient + start[id(v)] if id(v) in start else gradient
        for gradient, v in zip(gradients, wrt, strict=True)
    ]


def check(level: Derivatives, name: str) -> None:
    """Refuses updates whose adjoint this is not, as far as they are built.

    Raises:
        ValueError: If the level's optimizer does not make an update of every
            gradient, and of it alone, or not by its `update_step`, or keeps
            integers, which have no gradient, for its weights.
    """
    optimizer = level.optimizer
    options = "gradient_accumulation_steps", "ema_overwrite_frequency"
    settings = [
        f"{option}={getattr(optimizer, option)}"
        for option in options
        if getattr(optimizer, option, None)
    ]
    # Adafactor's integers are scalars, in the place of what is not there.
    slots = {v.name: v.dtype for v in _own(optimizer)[0] if v.shape.rank}
    settings += [f"{n}: {d}" for n, d in slots.items() if "int" in d]
    whole = private_keras.ALL_STEPS
    is_plain = getattr(type(optimizer), whole) is getattr(
        keras.optimizers.Optimizer, whole
    ) and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if settings or not is_plain:
        raise ValueError(
            f"`{name}` needs a level whose optimizer makes an update of each "
            "gradient by its `update_step`, such as `keras.optimizers.SGD` or "
            "`Adam`, and keeps no integers, without `ema_overwrite_frequency` "
            "or `gradient_accumulation_steps`, which the level itself has: use "
            "that, or `Identity`, `Neumann` or `ConjugateGradient`. "
            f"Received: level '{level.name}' with "
            f"{type(optimizer).__name__} {' '.join(settings)}".rstrip()
        )


def values_at(step: Step) -> Values:
    """By `id`, the values that variables had in a step and may not have now."""
    variables = [*step.level.variables, *step.level.below]
    values = [*step.values, *step.below]
    return dict(zip(map(id, variables), values, strict=True))


def remade(step: Step, values: Tensors, slots: Tensors) -> Step:
    """A step from the state that it had, with its gradients again."""
    step = dataclasses.replace(step, values=values, slots=slots)
    level, batch = step.level, step.batch
    with level.replayed(batch, step.state), level.scaled(step.scale):
        gradients = level.gradient(batch, at=values_at(step))
    return dataclasses.replace(step, gradients=gradients)


def after(step: Step) -> tuple[Tensors, Tensors]:
    """The weights and the slots that a step leaves."""
    clipped = _clipped(step)
    values, slots = _updated(step, clipped, step.slots)
    return (
        chosen(step.made, values, step.values),
        chosen(step.made, slots, step.slots),
    )


def adjoint(
    step: Step, of_weights: Tensors, of_slots: Tensors
) -> tuple[Tensors, Tensors, Tensors]:
    """The adjoint of an update: of its gradient, weights and slots."""
    slots = [
        tf.where(tf.equal(s, 0), tf.cast(_TINY, s.dtype), s) for s in step.slots
    ]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([step.gradients, step.values, slots])
        clipped = list(map(tf.identity, _clipped(step)))
        left = _updated(step, clipped, slots)
    # TensorFlow's types know of no structures.
    gradient: Any = tape.gradient
    of_clipped, *rest = gradient(
        left,
        [clipped, step.values, slots],
        output_gradients=(of_weights, of_slots),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    of_gradient = gradient(clipped, step.gradients, output_gradients=of_clipped)
    # Norms have no derivative at zero, where clipping changes nothing.
    is_zero = tf.equal(tf.linalg.global_norm(step.gradients), 0)
    return chosen(is_zero, of_clipped, of_gradient), *rest


def chosen(condition, these: Tensors, those: Tensors) -> Tensors:
    """One of two lists of tensors."""
    return [
        tf.where(condition, a, b) for a, b in zip(these, those, strict=True)
    ]


def _clipped(step: Step) -> Tensors:
    clip = getattr(step.level.optimizer, private_keras.CLIP)
    return clip(step.level.clipped(step.gradients))


def _own(optimizer) -> tuple[list, list]:
    """An optimizer's variables: those of each weight, and the others."""
    settings = [
        v
        for v in optimizer.variables
        if v is optimizer.iterations or v.name == "learning_rate"
    ]
    others = set(map(id, settings))
    return [v for v in optimizer.variables if id(v) not in others], settings


def _updated(
    step: Step, gradients: Tensors, slots: Tensors
) -> tuple[Tensors, Tensors]:
    """What the optimizer makes of weights and slots."""
    optimizer, variables = step.level.optimizer, step.level.variables
    own, settings = _own(optimizer)
    index = getattr(optimizer, private_keras.INDEX)
    numbers = {id(variable): index(variable) for variable in variables}
    decays = getattr(optimizer, private_keras.USE_WEIGHT_DECAY)
    is_decayed = [
        optimizer.weight_decay is not None and decays(v) for v in variables
    ]
    mapping = [
        *zip(variables, step.values, strict=True),
        *zip(own, slots, strict=True),
        *zip(settings, step.settings, strict=True),
    ]
    # TensorFlow's own assign what stands behind a Keras variable.
    replaced = {
        private_keras.INDEX: lambda variable: numbers[id(variable)],
        "assign": lambda variable, value: variable.assign(value),
        "assign_add": lambda variable, value: variable.assign(variable + value),
        "assign_sub": lambda variable, value: variable.assign(variable - value),
    }
    with (
        patching.together(
            patching.attribute(optimizer, name, function)
            for name, function in replaced.items()
        ),
        keras.StatelessScope(state_mapping=mapping) as scope,
    ):
        rate = optimizer.learning_rate
        cast: Any = keras.ops.cast
        for variable, decayed in zip(variables, is_decayed, strict=True):
            if decayed:
                share = cast(optimizer.weight_decay, variable.dtype)
                share *= cast(rate, variable.dtype)
                variable.assign(variable - variable * share)
        for gradient, variable in zip(gradients, variables, strict=True):
            optimizer.update_step(gradient, variable, rate)
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
    value: Any = scope.get_current_value
    return list(map(value, variables)), list(map(value, own))
