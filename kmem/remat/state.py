"""Holds what a forward pass reads and writes besides its arguments.

Both runs of a function see Keras's variables through a `StatelessScope`: the
first one collects what is read and assigned, the second one is given what was
read. The call context (`training`) and the autocast dtype, which Keras keeps
for the time of a layer's call, are kept for the second run.

A variable that was assigned counts, when it is read after that, as the same
variable with a new value, as it does in TensorFlow: the gradient does not
flow through the assignment.
"""

import contextlib
import copy
import sys
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.base import private_tf
from kmem.graph import names
from kmem.remat.structure import NONE
from kmem.remat.structure import Left
from kmem.remat.structure import is_differentiable
from kmem.remat.structure import key_of
from kmem.remat.structure import untracked


class CannotRepeat(BaseException):
    """What a function did that cannot be done twice.

    Not an `Exception`, to which a layer adds its own words.
    """


class _Scope(keras.StatelessScope):
    """Collects what layers leave."""

    def __init__(self):
        super().__init__(collect_losses=True)
        self._layer_of: dict[int, keras.layers.Layer] = {}
        # By the `id` of a layer and a name: both, and the first value.
        self._before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        # By the same, tensors.
        self._attributes: dict[tuple[int, str], Any] = {}
        self._graph = names.current_graph()
        kind = keras.layers.Layer
        self._noting = patching.method(kind, "__setattr__", self._set)

    def __enter__(self):
        self._noting.__enter__()
        return super().__enter__()

    def __exit__(self, *args, **kwargs):
        self._noting.__exit__(None, None, None)
        return super().__exit__(*args, **kwargs)

    def _set(self, assign, layer, name: str, value) -> None:
        key, before = (id(layer), name), vars(layer).get(name, NONE)
        assign(layer, name, value)
        self._attributes.pop(key, None)
        if name not in vars(layer):
            return  # A property, which sets another one.
        leaves = keras.tree.flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        # Those of loops stay there. Constants may be made outside.
        graphs = [getattr(tensor, "graph", None) for tensor in tensors]
        own = [
            t for t, g in zip(tensors, graphs, strict=True) if g is self._graph
        ]
        is_here = all(graph in (None, self._graph) for graph in graphs)
        if is_here and any(map(is_differentiable, own)):
            self._before.setdefault(key, (layer, name, before))
            self._attributes[key] = value

    def add_loss(self, loss):
        super().add_loss(loss)
        # `Layer.add_loss` calls this, and tells the layer nowhere else.
        # test_remat.py fails if that changes.
        self._layer_of[id(loss)] = sys._getframe(1).f_locals["self"]

    def take_left(self, first: Left | None = None) -> tuple[Left, list]:
        """What layers have now, as after a first run; and the values."""
        losses = [self._layer_of[id(loss)] for loss in self.losses]
        for layer, loss in zip(losses, self.losses, strict=True):
            # Else a later tensor with this `id` would pass for the layer's.
            private_keras.forget_loss(layer, loss)
        if first is not None:
            self._check_again(first, losses)
        keys = (
            self._attributes if first is None else map(key_of, first.attributes)
        )
        noted = [(self._before[key], self._attributes[key]) for key in keys]
        left = Left(losses, [before for before, _ in noted])
        return left, [*self.losses, *(value for _, value in noted)]

    def _check_again(self, first: Left, losses: list) -> None:
        for own in first.attributes:
            if key_of(own) not in self._attributes:
                layer, name, _ = own
                raise CannotRepeat(
                    f"sets '{name}' of the layer '{layer.name}' when it runs "
                    "first, and not when it runs again"
                )
        if [*map(id, losses)] != [*map(id, first.losses)]:
            raise CannotRepeat(
                "adds losses when it runs first, and others when it runs again"
            )

    def _check_read(self, variable) -> None:
        if names.function_within(self._graph) is not None:
            raise CannotRepeat(
                f"reads the variable '{variable.path}' in a `tf.function` of "
                "its own, which would keep its value"
            )

    def _check_assignment(self, variable) -> None:
        if names.current_graph() is not self._graph:
            raise CannotRepeat(
                f"assigns the variable '{variable.path}' in a loop, a branch "
                "or a `tf.function` of its own"
            )


class FirstRun(_Scope):
    """The state of the forward pass.

    Attributes:
        entry: `[(variable, value), ...]` as it was before, of all variables
            that were read. The gradient flows to these values.
        assigned: `{id: variable}`, all that were assigned.
        unbuilt: Whether a variable was read that has no value yet.
        raw: The trainable `tf.Variable`s that were read and are not Keras's.
    """

    def __init__(self):
        super().__init__()
        self.entry: list[tuple[Any, tf.Tensor]] = []
        self.assigned: dict[int, Any] = {}
        self.unbuilt = False
        self._unrecorded: set[int] = set()
        self._watcher = tf.GradientTape()

    def __enter__(self):
        self._watcher.__enter__()
        return super().__enter__()

    def __exit__(self, *args, **kwargs):
        try:
            # Makes the variables that were created within, which may fail.
            super().__exit__(*args, **kwargs)
        finally:
            self._watcher.__exit__(*args)
        self.raw = list(self._watcher.watched_variables())
        del self._watcher

    def get_current_value(self, variable):
        self._check_read(variable)
        value = super().get_current_value(variable)
        if value is not None:
            return value
        # Not on a loop's graph, nor seen by those who look for raw variables.
        with _as_default(self._graph), self._watcher.stop_recording():
            value = self._value_at_entry(variable)
            if value is None:
                self.unbuilt = True
                return None
            self.entry.append((variable, value))
            if private_tf.tapes_are_stopped():
                self._unrecorded.add(id(variable))
            value = self._value_to_use(value)
        self.state_mapping[id(variable)] = value
        return value

    def _value_at_entry(self, variable):
        outer = self.original_scope
        value = None if outer is None else outer.get_current_value(variable)
        value = private_keras.tf_variable(variable) if value is None else value
        return None if value is None else tf.convert_to_tensor(value)

    def _value_to_use(self, value):
        return untracked(value)

    def add_update(self, update):
        variable, _ = update
        self._check_assignment(variable)
        self.get_current_value(variable)  # So that it has a value at entry.
        self.assigned[id(variable)] = variable
        super().add_update(update)

    def commit(self) -> None:
        """Links what was read to the variables, and makes the assignments,
        after the scope was left."""
        # A custom gradient runs its function where no tape records.
        for i, (variable, _) in enumerate(self.entry):
            if id(variable) in self._unrecorded:
                value: Any = self._value_at_entry(variable)
                self.entry[i] = variable, value
        for variable in self.assigned.values():
            variable.assign(self.state_mapping[id(variable)])


class SecondRun(_Scope):
    """The state of the recomputation.

    Args:
        values: `[(variable, value), ...]`, what the variables are.
        trained: Those of the variables that a gradient is wanted for.
        tape: Where their values are watched.
    """

    def __init__(self, values: list, trained: list, tape: tf.GradientTape):
        super().__init__()
        self._substitutes: list[tf.Tensor] = []
        self.state_mapping = {
            id(variable): self._substitute(variable, value)
            for variable, value in values
        }
        self._tape = tape
        self._watched: dict[int, list[tf.Tensor]] = {}
        for variable in trained:
            self._watched[id(variable)] = []
            self._watch(variable, self.state_mapping[id(variable)])

    def __exit__(self, *args, **kwargs):
        _release(self._substitutes)
        return super().__exit__(*args, **kwargs)

    def _substitute(self, variable, value: tf.Tensor) -> tf.Tensor:
        """Lets TensorFlow take a value for a variable where it would."""
        # Keras's may be frozen, which TensorFlow's does not know.
        own = private_keras.tf_variable(variable)
        if own is not None and own.trainable and is_differentiable(value):
            self._substitutes.append(_substitute(value))
        return value

    @property
    def trained(self) -> dict[int, tf.Tensor]:
        """What the variables trained are by now, by their `id`."""
        return {key: self.state_mapping[key] for key in self._watched}

    @property
    def watched(self) -> list[list[tf.Tensor]]:
        """For each variable trained, all the values that it had."""
        return list(self._watched.values())

    def get_current_value(self, variable):
        self._check_read(variable)
        value = super().get_current_value(variable)
        if value is None:
            raise CannotRepeat(
                f"reads '{variable.path}' when it runs again, and did not "
                "when it ran first"
            )
        return _read(value)

    def add_update(self, update):
        variable, value = update
        self._check_assignment(variable)
        value = self._substitute(variable, untracked(tf.identity(value)))
        if id(variable) in self._watched:
            self._watch(variable, value)
        super().add_update((variable, value))

    def _watch(self, variable, value) -> None:
        self._tape.watch(value)
        self._watched[id(variable)].append(value)


class Substituted(keras.StatelessScope):
    """Gives variables other values; the rest is read, and assigned, as ever.

    To TensorFlow these tensors are variables: custom gradients, such as that
    of `keras.remat`, look for what is read, and tapes within watch it.

    Args:
        values: By the `id` of one of Keras's variables, a tensor.
    """

    def __init__(self, values: dict[int, tf.Tensor]):
        super().__init__()
        self.state_mapping = values

    def __enter__(self):
        for value in self.state_mapping.values():
            _substitute(value)
        return super().__enter__()

    def __exit__(self, *args, **kwargs):
        _release(self.state_mapping.values())
        return super().__exit__(*args, **kwargs)

    def get_current_value(self, variable):
        value = self.state_mapping.get(id(variable))
        if value is not None:
            return _read(value)
        if self.original_scope is None:
            # Not `None`: regularizers ask here for what they add up.
            return private_keras.tf_variable(variable)
        return self.original_scope.get_current_value(variable)

    def add_update(self, update):
        if self.original_scope is None:
            private_keras.assign(*update)
        else:
            self.original_scope.add_update(update)


def seeds(values: list[tuple]) -> list[tf.Tensor]:
    """Of variables' values, all that random numbers are made from."""
    return [value for _, value in values if not is_differentiable(value)]


def ambient() -> dict[str, Any]:
    """What is around the layer that is being called, as it is now."""
    values = private_keras.around_call().items()
    return {name: copy.copy(value) for name, value in values}


def ambient_key() -> tuple:
    """What of it a layer's call may depend on, to be compared."""
    call, autocast = private_keras.around_call().values()
    return getattr(call, "training", None), getattr(autocast, "dtype", None)


@contextlib.contextmanager
def restored(
    values: dict[str, Any], left: Left | None = None
) -> Iterator[None]:
    """Calls layers again as they were called before.

    Args:
        values: What `ambient` gave.
        left: What layers have, which a new call would clear, or set anew.
    """
    before = private_keras.around_call()
    left = left or Left([], [])
    losses = [private_keras.own_losses(layer)[:] for layer in left.losses]
    attributes = [getattr(*own[:2]) for own in left.attributes]
    left.put_back()
    given = {name: copy.copy(value) for name, value in values.items()}
    private_keras.set_around_call(given)
    try:
        yield
    finally:
        private_keras.set_around_call(before)
        for layer, own in zip(left.losses, losses, strict=True):
            private_keras.own_losses(layer)[:] = own
        for own, value in zip(left.attributes, attributes, strict=True):
            setattr(*own[:2], value)


def _substitute(tensor: tf.Tensor) -> tf.Tensor:
    """Makes a tensor a variable to TensorFlow, until it is released.

    It has many kinds of them, and all of them have a `handle`.
    """
    tensor.handle = tensor
    return tensor


def _read(tensor: tf.Tensor) -> tf.Tensor:
    if hasattr(tensor, "handle"):
        private_tf.variable_accessed(tensor)
    return tensor


def _release(tensors: Iterable[tf.Tensor]) -> None:
    for tensor in tensors:
        # Python never frees a tensor that refers to itself.
        vars(tensor).pop("handle", None)


def _as_default(graph):
    if graph is names.current_graph():
        return contextlib.nullcontext()
    return tf.init_scope() if graph is None else graph.as_default()
