"""What a loss sees of Keras's variables while it runs.

`Looking` tells which variables a loss reads and assigns. `Substituted` lets it
run at given values, so that a gradient is taken with regard to tensors: no
weight is moved and moved back, and frozen ones are not watched. What it does
not do: see a `tf.function` of the user's, which keeps what it first saw.
"""

from typing import Any

import keras
import tensorflow as tf

# Private in TensorFlow: how a variable tells that it is read.
# tests/test_multilevel_hypergradients.py fails if it moves.
from tensorflow.python.eager.tape import variable_accessed

from kmem import capture
from kmem.remat.state import current_scope
from kmem.remat.state import held


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


class Substituted(keras.StatelessScope):
    """Gives variables other values; the rest is read, and assigned, as ever.

    To TensorFlow these tensors are variables: it has many kinds of them, and
    all of them have a `handle`. So tapes within, and custom gradients such as
    that of `keras.remat`, differentiate with regard to them.

    Args:
        values: By the `id` of one of Keras's variables, a tensor.
    """

    def __init__(self, values: dict[int, tf.Tensor]):
        super().__init__()
        self.state_mapping = values
        self._graph = _current_graph()

    def __enter__(self):
        for value in self.state_mapping.values():
            value.handle = value
        return super().__enter__()

    def __exit__(self, *args, **kwargs):
        for value in self.state_mapping.values():
            # Python never frees a tensor that refers to itself.
            vars(value).pop("handle", None)
        return super().__exit__(*args, **kwargs)

    def get_current_value(self, variable):
        value = self.state_mapping.get(id(variable))
        if value is None:
            return held(variable)
        _refuse_own_function(self, self._graph, variable)
        variable_accessed(value)
        return value

    def add_update(self, update):
        variable, value = update
        assign(variable, value)


def read(variables: list) -> list[tf.Tensor]:
    """The variables' values."""
    own: Any = [held(variable) for variable in variables]
    return [tf.convert_to_tensor(variable) for variable in own]


def assign(variable, value) -> None:
    """Assigns a Keras variable, whatever scope is open."""
    # Private in Keras: through it, every assignment.
    variable._direct_assign(value)


def _refuse_own_function(scope, entered, variable) -> None:
    """Refuses a read in a `tf.function` within a scope."""
    # A recomputation within has looked at its own functions.
    if current_scope() is not scope:
        return
    graph = _current_graph()
    while graph is not None and graph is not entered:
        # Those of loops and branches are subclasses.
        if type(graph) is tf.__internal__.FuncGraph:
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
