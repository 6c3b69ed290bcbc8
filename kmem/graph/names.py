"""Names a recomputation so that it sorts as the forward pass does.

TensorFlow's graph optimizer sorts the addends of a sum by their names, so that
a sum of three rounds by what its addends are called. The second run of a
function, and its gradient, are named after the first run here: each name
scope of the second run lies within that of the first.
"""

import collections
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem.base import private_tf
from kmem.base.patching import member

_Entered = contextlib.AbstractContextManager[str]


class Scopes:
    """The name scopes that a function enters when it runs first."""

    def __init__(self):
        self._outer = ""
        # By what they were to be called, and where.
        self._names: dict[tuple, list[str]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Within, notes the scopes that are entered, in a graph."""
        graph = current_graph()
        if graph is None:
            yield
            return
        self._outer = graph.get_name_scope()
        actual = graph.name_scope

        @contextlib.contextmanager
        def name_scope(name):
            names = self._names[graph.get_name_scope(), name]
            with actual(name) as scope:
                names.append(graph.get_name_scope())
                yield scope

        with member(graph, "name_scope", name_scope):
            yield

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Within, names what is made after what was made in the first run."""
        graph = current_graph()
        if graph is None:
            yield
            return
        unused = {asked: iter(names) for asked, names in self._names.items()}
        actual, actual_scope = graph.name_scope, graph.get_name_scope
        first: dict[str, str] = {}

        @contextlib.contextmanager
        def within(name: str) -> Iterator[str]:
            inner = f"{name}/again" if name else "again"
            with actual(None), actual(inner) as scope:
                first[actual_scope()] = name
                yield scope

        def name_scope(name) -> _Entered:
            asked = graph.get_name_scope(), name
            name_in_first = next(unused.get(asked, iter(())), None)
            return (
                actual(name) if name_in_first is None else within(name_in_first)
            )

        # Gradients are named after it.
        def get_name_scope() -> str:
            return first.get(actual_scope(), actual_scope())

        with (
            within(self._outer),
            member(graph, "get_name_scope", get_name_scope),
            member(graph, "name_scope", name_scope),
        ):
            yield


def after(tensor: tf.Tensor) -> _Entered:
    """A name scope whose operations sort as the tensor itself does."""
    # An eager tensor may also come from outside of the graph, as a constant.
    if not tf.is_symbolic_tensor(tensor):
        return contextlib.nullcontext("")
    return tf.name_scope(f"{tensor.op.name}/")


def of_first(op: tf.Operation) -> str:
    """The name of the operation that this one repeats; else its own."""
    return re.sub(r"/again(_\d+)?(?=/|$)", "", op.name)


def copy(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, which sorts as it does."""
    with after(tensor):
        return tf.identity(tensor)


def current_graph() -> tf.Graph | None:
    """The graph that is being made; none in eager mode."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def operations() -> list[tf.Operation]:
    """All of the graph that is being made; none in eager mode."""
    graph = current_graph()
    return [] if graph is None else graph.get_operations()


def function_within(outer: tf.Graph | None) -> tf.Graph | None:
    """The `tf.function` that is being traced within a graph, if one is."""
    # Those of loops and branches are subclasses.
    return next(filter(private_tf.is_own_function, _graphs(outer)), None)


def in_gradient_of_loop() -> bool:
    """Whether the gradient of a loop is being traced."""
    return any(isinstance(x, private_tf.GradientOfLoop) for x in _graphs())


def _graphs(outer: tf.Graph | None = None) -> Iterator[Any]:
    """The graph that is being made, and those around it up to `outer`."""
    graph: Any = current_graph()
    while graph is not None and graph is not outer:
        yield graph
        graph = getattr(graph, "outer_graph", None)
