"""What a loss sees of Keras's variables while it runs.

`Looking` tells which variables a loss reads and assigns. `Substituted` lets it
run at given values, so that a gradient is taken with regard to tensors: no
weight is moved and moved back, and frozen ones are not watched. What it does
not do: see a `tf.function` of the user's, which keeps what it first saw.
"""

from typing import Any

import keras
import tensorflow as tf

from kmem.base import private_keras
from kmem.base import private_tf
from kmem.base.private_keras import tf_variable
from kmem.remat import state
from kmem.step import capture


class Looking(capture.DiscardedState):
    """Changes nothing, and notes which variables are read and assigned.

    Attributes:
        read: `{id: variable}`.
        assigned: `{id: variable}`.
    """

    def __init__(self):
        super().__init__()
        self.read: dict[int, keras.Variable] = {}
        self.assigned: dict[int, keras.Variable] = {}

    def __enter__(self):
        self._graph = _current_graph()
        return super().__enter__()

    def get_current_value(self, variable):
        _refuse_own_function(self, self._graph, variable)
        self.read[id(variable)] = variable
        return super().get_current_value(variable)

    def add_update(self, update):
        variable, _ = update
        self.assigned[id(variable)] = variable
        super().add_update(update)


class Substituted(state.Substituted):
    """Gives variables other values; not in a `tf.function` of the user's."""

    def __enter__(self):
        self._graph = _current_graph()
        return super().__enter__()

    def get_current_value(self, variable):
        if id(variable) in self.state_mapping:
            _refuse_own_function(self, self._graph, variable)
        return super().get_current_value(variable)


def read(variables: list) -> list[tf.Tensor]:
    """The variables' values."""
    own: Any = [tf_variable(variable) for variable in variables]
    return [tf.convert_to_tensor(variable) for variable in own]


def _refuse_own_function(scope, entered, variable) -> None:
    """Refuses a read in a `tf.function` within a scope."""
    # A recomputation within has looked at its own functions.
    if private_keras.stateless_scope() is not scope:
        return
    graph = _current_graph()
    while graph is not None and graph is not entered:
        # Those of loops and branches are subclasses.
        if private_tf.is_own_function(graph):
            raise ValueError(
                "A level's loss must not call a `tf.function` that reads "
                "variables: it would keep the values of its first call. Take "
                f"the decorator off. Received: '{variable.path}' read in "
                f"'{graph.name}'"
            )
        graph = getattr(graph, "outer_graph", None)


def _current_graph():
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()
