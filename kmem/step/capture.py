"""What a `train_step` would apply, taken without its update, and may change.

`optimizer.apply` is where the default `train_step` and nearly every custom
one end, so that is where the gradients are taken. Everything here is a
context manager over instance attributes: on leaving, also by an exception,
the model and its optimizer are as they were.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.step.multiples import Given


class LossReached(BaseException):
    """Ends a step early, once its loss is known; see `capturing`."""


# What Python says, in a trace, of a tensor that has no value there.
NO_VALUE = AttributeError, NotImplementedError, TypeError


class CannotSplit(ValueError):
    """A step's gradients cannot be put together of those of parts."""


class DiscardedState(keras.StatelessScope):
    """A scope in which every assignment to a Keras variable is lost.

    Unlike its base, it lets a read see the variable itself, so that gradients
    reach it and regularizers find a value.
    """

    def __init__(self):
        super().__init__(collect_losses=True)
        tape = tf.GradientTape
        self._tapes = patching.method(tape, "gradient", self._gradient)

    def __enter__(self):
        self._tapes.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._tapes.__exit__(*error)

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return private_keras.tf_variable(variable) if value is None else value

    def _gradient(self, gradient, tape, loss, sources, *args, **kwargs):
        # A weight that was assigned is a tensor here, which has no handle.
        sources = tf.nest.map_structure(
            lambda x: self.state_mapping.get(id(x), x), sources
        )
        return gradient(tape, loss, sources, *args, **kwargs)


class Update:
    """What a step handed to its optimizer.

    Attributes:
        gradients: A list of tensors, `IndexedSlices` or `None`; itself `None`
            if the step made no update.
        variables: The variables they belong to.
        sums_rows: Whether the loss was one value a row: differentiating that
            means summing it.
        loss: What they are the gradients of, if the step scales its loss, or
            ends there.
        is_scaled: Whether the step scaled its loss.
    """

    def __init__(self):
        self.gradients: list | None = None
        self.variables: list = []
        self.sums_rows = False
        self.loss: Any = None
        self.is_scaled = False


@contextlib.contextmanager
def capturing(
    model,
    optimizer,
    adds_up: bool = False,
    until_loss: bool = False,
    rows: int | None = None,
) -> Iterator[Update]:
    """Collects the one update that a step makes, instead of making it.

    Args:
        optimizer: What the step sees as `model.optimizer`.
        adds_up: Whether its gradients are added to others.
        until_loss: Raise `LossReached` once the step scales its loss, asks
            for gradients of variables, or applies them.
        rows: How many examples the step is given, if it is known.

    Raises:
        CannotSplit: If the step makes a second update, whose gradients would
            depend on the first, which has not been made; if it reads weights
            after its update; or if it changes its gradients otherwise than
            sums allow, see `Given`.
        ValueError: If it does not scale a loss that has to be.
    """
    update, afterwards = Update(), tf.GradientTape()

    def refuse_changes():
        if update.gradients is not None:
            _refuse_second_update(model)
        _refuse_changed_gradients(model)

    def see(loss):
        # A loss function may give a Python number, or one with axes of 1.
        shapes = (getattr(x, "shape", ()) for x in tf.nest.flatten(loss))
        update.sums_rows = all(
            shape.rank and (rows == 1 or shape.num_elements() != 1)
            for shape in map(tf.TensorShape, shapes)
        )
        if until_loss:
            update.loss = loss
            raise LossReached

    given = Given(refuse_changes, see)
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    # Keras's own hands its gradients on as they are, and reads no more.
    is_default = has_default_step(model)
    is_sum = (adds_up or is_scaled) and not is_default

    def apply(_, grads, trainable_variables=None):
        if is_sum and not all(map(given.include, grads)):
            refuse_changes()
        if is_scaled and not (is_default or update.is_scaled):
            _refuse_unscaled_loss(model)
        if until_loss:
            raise LossReached
        if update.gradients is not None:
            _refuse_second_update(model)
        update.gradients = list(grads)
        # Without them, Keras means those that the optimizer was built with.
        update.variables = list(
            model.trainable_variables
            if trainable_variables is None
            else trainable_variables
        )
        if not is_default:
            stack.enter_context(afterwards)

    def scale(scale_loss, loss):
        see(loss)
        update.is_scaled = True
        scaled = scale_loss(loss)
        update.loss = scaled if tf.is_tensor(scaled) else None
        return scaled

    def refuse(*args, **kwargs):
        _refuse_second_update(model)

    def changes():
        if is_sum:
            yield given.recording()
        yield patching.attribute(model, "optimizer", optimizer)
        yield patching.method(optimizer, "apply", apply)
        yield patching.method(optimizer, "scale_loss", scale)
        # Any other, wherever it is kept.
        yield patching.method(keras.optimizers.Optimizer, "apply", refuse)

    with patching.together(changes()), contextlib.ExitStack() as stack:
        yield update
    if afterwards.watched_variables():
        _refuse_late_reads(model)


def _refuse_changed_gradients(model):
    how = "as they are, or times a number"
    if tf.executing_eagerly():
        how = "in eager mode as they are"
    raise CannotSplit(
        "Accumulating gradients needs a `train_step` that makes one update: "
        "it asks its `tf.GradientTape` for gradients once, and hands them to "
        f"`self.optimizer` {how}, as a norm of a part is not that of the "
        "batch. Clip in the optimizer (`clipnorm`, `global_clipnorm`, "
        "`clipvalue`), or train without `microbatches`, "
        '`gradient_accumulation_steps`, `sharding` and "float16". Received: '
        f"model={model.name}"
    )


def _refuse_late_reads(model):
    raise CannotSplit(
        "A `train_step` must not read weights after its update, which is made "
        "when the step has ended. Average weights with the optimizer's "
        "`use_ema`, or do what comes after an update in a callback's "
        "`on_train_batch_end`; or train without `microbatches`, "
        '`gradient_accumulation_steps`, `sharding` and "float16". Received: '
        f"model={model.name}"
    )


def _refuse_unscaled_loss(model):
    raise ValueError(
        '`mixed_precision="float16"` needs a `train_step` that scales its '
        "loss, as its gradients are divided by the scale: call `loss = "
        "self.optimizer.scale_loss(loss)` before they are computed, or train "
        f'with "bfloat16", which has no scale. Received: model={model.name}'
    )


def _refuse_second_update(model):
    raise CannotSplit(
        "Accumulating gradients needs a `train_step` that makes one update, "
        "of `self.optimizer`: a second update would have to see the first "
        "one's weights. Compute all gradients first and apply them together, "
        "or train without `microbatches`, `gradient_accumulation_steps` and "
        f'"float16". Received: model={model.name}'
    )


def changed_variables(model, optimizer) -> list:
    """What a model's step may change.

    Args:
        optimizer: What the step sees as `model.optimizer`.
    """
    metrics = [*model.metrics, *private_keras.given_metrics(model)]
    owners = [model, optimizer, *optimizers(model), *metrics]
    variables = {id(v): v for each in owners for v in each.variables}
    # Some are not among `variables`, such as the states of recurrent layers.
    for each in [*_held(model), *private_keras.global_seeds()]:
        if isinstance(each, tf.random.Generator | keras.random.SeedGenerator):
            each = each.state
        if isinstance(each, keras.Variable | tf.Variable):
            variables[id(each)] = each
    return list(variables.values())


def has_default_step(model, *others: str) -> bool:
    """Whether the model's `train_step`, `compute_metrics`, which it calls after
    its update, and other methods are Keras's own."""
    return all(
        getattr(getattr(model, name), "__func__", None)
        is getattr(keras.Model, name)
        for name in ("train_step", "compute_metrics", *others)
    )


def has_own_step(model) -> bool:
    """Whether the model trains by a step that Keras does not know."""
    return model.compiled and not has_default_step(model)


def has_variables(model) -> bool:
    """Whether a model has those that it trains with; a step of its own that
    was traced has made them, and may not call all of the model."""
    was_traced = has_own_step(model) and any(x.built for x in optimizers(model))
    return was_traced or private_keras.is_built(model)


def optimizers(model) -> Iterator[keras.optimizers.Optimizer]:
    """Those that the model, or a layer that trains by itself, holds."""
    for each in _held(model):
        if isinstance(each, keras.optimizers.Optimizer):
            yield each


def optimizer_config(optimizer) -> dict[str, Any]:
    """What another optimizer like this one is made from. A schedule stays: one
    of a user's own may have no configuration."""
    held: Any = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(held, private_keras.LEARNING_RATE)
    if isinstance(rate, keras.Variable):
        return optimizer.get_config()
    with patching.attribute(held, private_keras.LEARNING_RATE, None):
        config = optimizer.get_config()
    own = config if held is optimizer else config["inner_optimizer"]["config"]
    own["learning_rate"] = rate
    return config


def scales_later(model) -> bool:
    """Whether an optimizer scales losses otherwise once it has its variables:
    a step that makes them is to be traced again, as in Keras."""
    kind = keras.optimizers.LossScaleOptimizer
    return any(
        isinstance(each, kind) and not each.built for each in optimizers(model)
    )


def _held(model) -> Iterator[Any]:
    """What a model and its layers have as attributes, or in lists of theirs."""
    for layer in private_keras.all_layers(model):
        for value in vars(layer).values():
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, list | tuple):
                yield from value
            else:
                yield value
