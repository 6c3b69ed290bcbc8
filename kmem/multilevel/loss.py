"""A level's loss, a function of the user's, and what it sees of variables.

Keras divides a mean by the number of replicas, so that a sum over them is the
mean; here it is the mean over a replica's examples that counts, however it was
made. `Looking` tells which variables a loss reads and assigns. `Substituted`
lets it run at given values, so that a gradient is taken with regard to
tensors: no weight is moved and moved back, and frozen ones are not watched.
What this module does not do: see a `tf.function` of the user's, which keeps
what it first saw.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.graph import names
from kmem.remat import state
from kmem.step import batches
from kmem.step import capture


def values(loss: Callable, arguments: tuple, name: str) -> dict[str, Any]:
    """What the loss of a level is, by the name "loss", which is the first one,
    and its metrics by theirs, in 32 bits at least."""
    scale, as_it_is = "scale_loss_for_distribution", lambda _, value: value
    with patching.method(private_keras.loss, scale, as_it_is):
        result = loss(*arguments)
    metrics: Any = {}
    if isinstance(result, tuple) and len(result) == 2:
        result, metrics = result
    if not isinstance(metrics, dict) or "loss" in metrics:
        raise ValueError(
            "What a level's loss returns beside a scalar must be a dictionary "
            'of scalars for the logs, without the name "loss". '
            f"Received: level '{name}' with {metrics!r}"
        )
    scalars = {"loss": result} | metrics
    return {key: _scalar(each, key, name) for key, each in scalars.items()}


def _scalar(value: Any, key: str, name: str) -> tf.Tensor:
    is_number = isinstance(value, int | float) or keras.ops.is_tensor(value)
    shape = tf.convert_to_tensor(value).shape if is_number else None
    if shape is None or shape.rank != 0:
        what = type(value).__name__ if shape is None else f"shape {shape}"
        raise ValueError(
            "A level's loss must return a scalar, the mean over the batch's "
            "examples: add up several losses, and end with `keras.ops.mean`. "
            "It may return a pair, with a dictionary of scalars for the logs. "
            f"Received: level '{name}' with a {key} of {what}"
        )
    tensor = _in_32_bits(tf.convert_to_tensor(value))
    return tensor if key == "loss" else tf.cast(tensor, tf.float32)


def giving_32_bits(models: list) -> patching.Context:
    """Lets models that compute in 16 bits give float32, which a loss mixes."""

    def cast(model, call, /, *args, **kwargs):
        return keras.tree.map_structure(_in_32_bits, call(*args, **kwargs))

    return _calls_replaced(models, cast)


def in_32_bits(model: keras.Model) -> patching.Context:
    """Lets a model whose own layers compute in 16 bits compute in float32."""
    policy = keras.DTypePolicy("float32")
    return patching.together(
        patching.attribute(layer, private_keras.DTYPE_POLICY, policy)
        for layer in private_keras.all_layers(model)
        if layer.compute_dtype in ("float16", "bfloat16")
        and layer.variable_dtype == "float32"
    )


def noting_calls(models: list, calls: list[tuple]) -> patching.Context:
    """Puts pairs into `calls`: a model that is called, its inputs' types."""

    def noted(model, call, /, inputs, *args, **kwargs):
        if all(other is not model for other, _ in calls):
            calls.append((model, batches.specs_of(inputs)))
        return call(inputs, *args, **kwargs)

    return _calls_replaced(models, noted)


class _Guarded(keras.StatelessScope):
    """A scope within which no `tf.function` of the user's reads variables."""

    def __enter__(self):
        self._graph = names.current_graph()
        return super().__enter__()

    def _check_read(self, variable) -> None:
        # A recomputation within has looked at its own functions.
        if private_keras.stateless_scope() is not self:
            return
        graph: Any = names.function_within(self._graph)
        if graph is not None:
            raise ValueError(
                "A level's loss must not call a `tf.function` that reads "
                "variables: it would keep the values of its first call. Take "
                f"the decorator off. Received: '{variable.path}' read in "
                f"'{graph.name}'"
            )


class Looking(_Guarded, capture.DiscardedState):
    """Changes nothing, and notes by their `id` which variables are `read` and
    `assigned`."""

    def __init__(self):
        super().__init__()
        self.read: dict[int, keras.Variable] = {}
        self.assigned: dict[int, keras.Variable] = {}

    def get_current_value(self, variable):
        self._check_read(variable)
        self.read[id(variable)] = variable
        return super().get_current_value(variable)

    def add_update(self, update):
        variable, _ = update
        self.assigned[id(variable)] = variable
        super().add_update(update)


class Substituted(_Guarded, state.Substituted):
    """Gives variables other values."""

    def get_current_value(self, variable):
        if id(variable) in self.state_mapping:
            self._check_read(variable)
        return super().get_current_value(variable)


def read(variables: list) -> list[tf.Tensor]:
    """The variables' values, whatever scope is open."""
    own: Any = map(private_keras.tf_variable, variables)
    return [tf.convert_to_tensor(variable) for variable in own]


def assign(variables: list, values: list) -> None:
    """Assigns variables, whatever scope is open."""
    for variable, value in zip(variables, values, strict=True):
        private_keras.assign(variable, value)


def _calls_replaced(models: list, replacement: Callable) -> patching.Context:
    """Within, `replacement` stands for each model's `call`: it takes both."""
    return patching.together(
        patching.method(model, "call", functools.partial(replacement, model))
        for model in models
    )


def _in_32_bits(tensor):
    if tf.is_tensor(tensor) and tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tensor, tf.float32)
    return tensor
