"""Runs a `train_step` without its update, and takes what it would apply.

`optimizer.apply` is where the default `train_step` and nearly every custom
one end, so that is where the gradients are taken. Everything here is a
context manager over instance attributes: on leaving, also by an exception,
the model, its optimizer and its metrics are as they were.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base.private_keras import all_layers
from kmem.base.private_keras import tf_variable
from kmem.step import patching

_RESTORE_ATTEMPTS = 3


class LossReached(BaseException):
    """Ends a step early, once its loss is known; see `capturing`."""


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers directly inside a layer, or a model."""
    inside = all_layers(layer)[1:]
    deeper = {id(x) for each in inside for x in all_layers(each)[1:]}
    return [each for each in inside if id(each) not in deeper]


def variables(model, optimizer) -> list:
    """What a model's step may change.

    Args:
        model: The model.
        optimizer: What the step sees as `model.optimizer`.
    """
    found = [model, optimizer, *optimizers(model), *model.metrics]
    known = {id(v): v for each in found for v in each.variables}
    # Some are not among `variables`, such as the states of recurrent layers.
    for layer in all_layers(model):
        for value in vars(layer).values():
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, keras.Variable | tf.Variable):
                    known[id(each)] = each
    return list(known.values())


def has_default_step(model) -> bool:
    """Whether the model's `train_step` is Keras's own."""
    step = getattr(model.train_step, "__func__", None)
    return step is keras.Model.train_step


class DiscardedState(keras.StatelessScope):
    """A scope in which every assignment to a Keras variable is lost.

    Unlike its base, it lets a read see the variable itself, so that gradients
    reach it and regularizers find a value.
    """

    def __init__(self):
        super().__init__(collect_losses=True)

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return tf_variable(variable) if value is None else value


class Update:
    """What a step handed to its optimizer.

    Attributes:
        gradients: A list of tensors, `IndexedSlices` or `None`; itself `None`
            if the step made no update.
        variables: The variables they belong to.
        sums_rows: Whether the loss was one value a row: differentiating that
            means summing it.
        loss: What they are the gradients of, if the step scales its loss.
    """

    def __init__(self):
        self.gradients: list | None = None
        self.variables: list = []
        self.sums_rows = False
        self.loss: Any = None


@contextlib.contextmanager
def capturing(model, optimizer, until_loss: bool = False) -> Iterator[Update]:
    """Collects the one update that a step makes, instead of making it.

    Args:
        model: The model whose step runs within.
        optimizer: What the step sees as `model.optimizer`.
        until_loss: Raise `LossReached` once the step scales its loss, or at
            the latest when it applies its gradients.

    Raises:
        ValueError: If the step makes a second update. Its gradients would
            depend on the first, which has not been made.
    """
    update = Update()

    def apply(grads, trainable_variables=None):
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

    def scaling(scale_loss):
        def scale(loss):
            if until_loss:
                raise LossReached
            # A loss function may give a Python number.
            update.sums_rows = len(getattr(loss, "shape", ())) > 0
            scaled = scale_loss(loss)
            update.loss = scaled if tf.is_tensor(scaled) else None
            return scaled

        return scale

    def refuse(*args, **kwargs):
        _refuse_second_update(model)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patching.attribute(model, "optimizer", optimizer))
        for name, replacement in (
            ("apply", lambda _: apply),
            ("scale_loss", scaling),
        ):
            stack.enter_context(patching.method(optimizer, name, replacement))
        inner = getattr(optimizer, "inner_optimizer", None)
        for other in optimizers(model):
            if other is not optimizer and other is not inner:
                change = patching.method(other, "apply", lambda _: refuse)
                stack.enter_context(change)
        yield update


class Reader:
    """Reads variables again and again, all of them in one call.

    Args:
        variables: The variables.
    """

    def __init__(self, variables: list):
        self.variables = variables
        self._read = tf.function(
            lambda: [tf.convert_to_tensor(v) for v in variables],
            autograph=False,
        )
        self._arrays: list[np.ndarray] = []

    def reads(self, variables: list) -> bool:
        """Whether it reads these."""
        return [*map(id, self.variables)] == [*map(id, variables)]

    def read(self) -> list[np.ndarray]:
        """Their values, outside of the device, until they are read again.

        In the same arrays: new memory would take longer than to copy.
        """
        tensors = self._read()
        if not self._arrays:
            # Of a number `numpy` gives no array.
            self._arrays = [np.array(tensor.numpy()) for tensor in tensors]
            return self._arrays
        for array, tensor in zip(self._arrays, tensors, strict=True):
            plain = array.dtype.isbuiltin == 1 and not array.dtype.hasobject
            if plain and array.size:
                # Without a copy in between.
                source = np.frombuffer(memoryview(tensor), array.dtype)
                array.reshape(-1)[:] = source
            else:
                array[...] = tensor.numpy()
        return self._arrays


class State:
    """What steps change, as it is now, kept outside of the device.

    Args:
        variables: What they may change, or what reads that.
        metrics: Those that may make variables of their own.
    """

    def __init__(self, variables: list | Reader, metrics: list):
        if isinstance(variables, Reader):
            values = zip(variables.variables, variables.read(), strict=True)
        else:
            values = ((v, v.numpy()) for v in variables)
        self._values = list(values)
        self._metrics = metrics

    def restore(self) -> None:
        """Gives it back.

        That takes memory as well, which may be short for a moment.
        """
        for _ in range(_RESTORE_ATTEMPTS - 1):
            try:
                return self._restore()
            except tf.errors.ResourceExhaustedError:
                gc.collect()
        self._restore()

    def _restore(self) -> None:
        known = {id(variable) for variable, _ in self._values}
        for variable, value in self._values:
            # Not the array itself: a variable may take over its memory, which
            # is not the device's.
            variable.assign(tf.raw_ops.DeepCopy(x=value))
        for metric in self._metrics:
            # Those that the step has made.
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()


@contextlib.contextmanager
def unchanged(variables: list, metrics: list) -> Iterator[None]:
    """Gives back what steps change in a block of code; see `State`."""
    state = State(variables, metrics)
    try:
        yield
    finally:
        state.restore()


@contextlib.contextmanager
def metrics_of_part(model, share) -> Iterator[dict[int | str, tuple]]:
    """Lets the model's metrics count one part of a batch.

    A mean of scalars that is updated without a weight counts `share`, so that
    the parts of a batch count as one update together.

    Args:
        model: The model whose metrics are updated within.
        share: The part's rows over the batch's rows, a scalar.

    Yields:
        A dictionary that maps every result that a metric gives, by its `id`
        and by its name, to a pair: the result, and a function that computes
        it anew.
    """
    results: dict[int | str, tuple] = {}

    def recording_result(metric, compute):
        def result():
            value = compute()
            leaves = keras.tree.flatten(value)
            names = sorted(value) if isinstance(value, dict) else [metric.name]
            for position, leaf in enumerate(leaves):
                anew = functools.partial(_nth_leaf, compute, position)
                results[id(leaf)] = (leaf, anew)
                if position < len(names):
                    results[names[position]] = (leaf, anew)
            return value

        return result

    def weighted_update(metric, update_state):
        def update(values, sample_weight=None):
            values = tf.convert_to_tensor(values)
            if sample_weight is None and values.shape.rank == 0:
                sample_weight = tf.cast(share, metric.dtype)
            return update_state(values, sample_weight=sample_weight)

        return update

    def replaced(metric, name, replacement):
        return patching.method(
            metric, name, functools.partial(replacement, metric)
        )

    with contextlib.ExitStack() as stack:
        for metric in model.metrics:
            stack.enter_context(replaced(metric, "result", recording_result))
            if type(metric).update_state is keras.metrics.Mean.update_state:
                change = replaced(metric, "update_state", weighted_update)
                stack.enter_context(change)
        yield results


def _nth_leaf(function, position: int):
    return keras.tree.flatten(function())[position]


def optimizers(model) -> Iterator[keras.optimizers.Optimizer]:
    for value in vars(model).values():
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list | tuple):
            value = [value]
        for item in value:
            if isinstance(item, keras.optimizers.Optimizer):
                yield item


def _refuse_second_update(model):
    raise ValueError(
        "Accumulating gradients needs a `train_step` that makes one update, "
        "of `self.optimizer`: a second update would have to see the first "
        "one's weights. Compute all gradients first and apply them together, "
        "or train without `microbatches`, `gradient_accumulation_steps` and "
        f'"float16". Received: model={model.name}'
    )
