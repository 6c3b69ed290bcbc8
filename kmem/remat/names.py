"""Names the gradient of a recomputation as that of the forward pass.

TensorFlow's graph optimizer sorts the addends of a sum by their names, so that
a sum of three rounds by what its addends are called. A gradient is named after
the scope of its operation, and the second run of a function has scopes of its
own, with numbers behind them.
"""

import collections
import contextlib
from collections.abc import Callable
from collections.abc import Iterator

import tensorflow as tf

# A scope's parent, and what it was to be called.
_Asked = tuple[str, str | None]


class Scopes:
    """The name scopes that a function enters when it runs first."""

    def __init__(self):
        self._outer = ""
        self._entered: dict[_Asked, list[str]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Within, notes the scopes that are entered, in a graph."""
        graph = _graph()
        if graph is None:
            yield
            return
        self._outer = graph.get_name_scope()

        def enter(asked, scope):
            self._entered[asked].append(scope)

        with _observed(graph, enter):
            yield

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Within, gradients are named after the scopes that were noted."""
        graph = _graph()
        if graph is None:
            yield
            return
        unused = {asked: iter(names) for asked, names in self._entered.items()}
        actual = graph.get_name_scope
        first: dict[str, str] = {}

        def enter(asked, scope):
            first[scope] = next(unused.get(asked, iter(())), scope)

        with graph.name_scope(f"{self._outer}/" if self._outer else None):
            graph.get_name_scope = lambda: first.get(actual(), actual())
            try:
                with _observed(graph, enter):
                    yield
            finally:
                graph.get_name_scope = actual


@contextlib.contextmanager
def _observed(
    graph: tf.Graph, enter: Callable[[_Asked, str], None]
) -> Iterator[None]:
    actual = graph.name_scope

    @contextlib.contextmanager
    def name_scope(name):
        asked = graph.get_name_scope(), name
        with actual(name) as scope:
            enter(asked, graph.get_name_scope())
            yield scope

    graph.name_scope = name_scope
    try:
        yield
    finally:
        graph.name_scope = actual


def _graph() -> tf.Graph | None:
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()
