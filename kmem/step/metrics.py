"""What changes besides weights when a batch comes in micro-batches.

A layer that counts its calls, takes a power iteration (spectral normalization)
or moves an average (batch normalization) would do so once a micro-batch. Here
each micro-batch begins with the state before the batch, and the batch changes
it once, by the mean of the micro-batches' changes, weighted by their examples.
That is exact where a change does not depend on the examples, or is a mean over
them. A metric adds up by itself: what it gives of the last micro-batch is that
of the batch, once it is computed anew. What else a step returns is averaged
over the micro-batches, or added up if it is an integer. What this module does
not do: compute statistics of the whole batch. A layer that normalizes by them
sees one micro-batch at a time.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base.private_keras import all_layers


class LayerState:
    """The state of a model's layers that its steps assign.

    Seeds are not among it, so that each micro-batch draws its own random
    numbers, nor are metrics.

    Args:
        scope: A scope in which a step of the model was run.

    Attributes:
        variables: Those that the step assigned.
        layers_that_see_parts: The layers whose assignments depend on `data`.
            In eager mode that is not known, and all count that assign.
        layers_that_draw: The layers that draw random numbers.
    """

    def __init__(self, model, scope: keras.StatelessScope, data):
        assigned = scope.state_mapping
        self.variables = [v for v in model.weights if id(v) in assigned]
        values = {id(v): assigned[id(v)] for v in self.variables}
        if not tf.executing_eagerly() and values:
            reached = reached_from(tf.nest.flatten(data, True))
            values = {k: v for k, v in values.items() if id(v) in reached}
        self.layers_that_see_parts = innermost(model, set(values), "weights")
        drawn = assigned.keys() - {id(v) for v in model.weights}
        drawn -= {id(v) for metric in model.metrics for v in metric.variables}
        self.layers_that_draw = innermost(model, drawn, "variables")

    def values(self) -> list[tf.Tensor]:
        """What the state is now."""
        return [tf.identity(v.value) for v in self.variables]

    def take_changes(self, before: list[tf.Tensor], share) -> list[tf.Tensor]:
        """What a micro-batch has changed, which is undone.

        Args:
            before: The state before the batch.
            share: The micro-batch's examples over the batch's, a scalar.

        Returns:
            For each variable the change times `share`, in float64.
        """
        changes = []
        for variable, old in zip(self.variables, before, strict=True):
            now, then = (
                tf.cast(value, tf.float64) for value in (variable.value, old)
            )
            changes.append((now - then) * tf.cast(share, tf.float64))
            with tf.control_dependencies(changes[-1:]):
                variable.assign(old)
        return changes

    def change(self, before: list[tf.Tensor], changes: list[tf.Tensor]) -> None:
        """Changes the state by the sum of what the micro-batches gave."""
        for variable, old, change in zip(
            self.variables, before, changes, strict=True
        ):
            new = tf.cast(old, tf.float64) + change
            dtype = tf.as_dtype(variable.dtype)
            variable.assign(
                tf.cast(new if dtype.is_floating else tf.round(new), dtype)
            )


def warn_of_parts(
    layers: list[keras.layers.Layer], microbatches: int, num_processes: int
) -> None:
    """Says which layers see one part of a batch at a time."""
    if not layers:
        return
    names = [f"{each.name} ({type(each).__name__})" for each in layers]
    if microbatches > 1:
        parts = (
            "see one micro-batch at a time. Their numbers are not those of "
            'the whole batch: see "What differs" in docs/accumulation.md. '
            f"Received: microbatches={microbatches}"
        )
    else:
        parts = (
            "see each process's own examples. Their numbers are not those of "
            "one process; `BatchNormalization(synchronized=True)` gives those: "
            'see "Rules" in docs/sharding.md. '
            f"Received: {num_processes} processes"
        )
    warnings.warn(
        f"Layers whose state can depend on the examples {parts}, layers "
        f"{', '.join(names)}",
        stacklevel=2,
    )


def innermost(
    model, identities: set[int], kind: str
) -> list[keras.layers.Layer]:
    """The layers that own variables, and not by way of a layer inside."""
    owners = []
    for layer in all_layers(model):
        own = identities & {id(v) for v in getattr(layer, kind)}
        for inner in all_layers(layer)[1:]:
            own -= {id(v) for v in getattr(inner, kind)}
        if own:
            owners.append(layer)
    return owners


def reached_from(
    tensors: list, without: Container[str] = frozenset()
) -> set[int]:
    """The tensors of a graph that are computed from some, by their `id`, but
    through no operation of a kind in `without`."""
    waiting = [t for t in tensors if tf.is_tensor(t)]
    reached: dict[int, tf.Tensor] = {}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in reached:
            reached[id(tensor)] = tensor
            for reader in tensor.consumers():
                waiting += [] if reader.type in without else reader.outputs
    return set(reached)


# For each result of a metric, by its `id` and its name: the result, and a
# function that computes it anew.
Results = dict[int | str, tuple[Any, Callable]]


@contextlib.contextmanager
def counting_share(model: keras.Model, share) -> Iterator[Results]:
    """Lets the model's metrics count one micro-batch.

    A mean of scalars that is updated without a weight counts `share`, so that
    the micro-batches of a batch count as one update together.

    Args:
        share: The micro-batch's examples over the batch's, a scalar.

    Yields:
        What the metrics give.
    """
    results: Results = {}

    def recorded(metric, compute):
        def leaf_at(position):
            return keras.tree.flatten(compute())[position]

        value = compute()
        leaves = keras.tree.flatten(value)
        names = sorted(value) if isinstance(value, dict) else [metric.name]
        for position, leaf in enumerate(leaves):
            anew = functools.partial(leaf_at, position)
            results[id(leaf)] = (leaf, anew)
            if position < len(names):
                results[names[position]] = (leaf, anew)
        return value

    def weighted(metric, update_state, values, sample_weight=None):
        values = tf.convert_to_tensor(values)
        if sample_weight is None and values.shape.rank == 0:
            sample_weight = tf.cast(share, metric.dtype)
        return update_state(values, sample_weight=sample_weight)

    def changes():
        for metric in model.metrics:
            result = functools.partial(recorded, metric)
            yield patching.method(metric, "result", result)
            if type(metric).update_state is keras.metrics.Mean.update_state:
                update = functools.partial(weighted, metric)
                yield patching.method(metric, "update_state", update)

    with patching.together(changes()):
        yield results


class Logs:
    """What a step returned of one micro-batch.

    Args:
        logs: A structure of tensors.
        results: What the metrics gave; nothing if the batch is whole.
        weight: The micro-batch's examples over the batch's, or `None` if the
            batch is whole.

    Attributes:
        tensors: Those that add up over the micro-batches.
    """

    def __init__(self, logs, results: Results, weight):
        self._logs = logs
        leaves = keras.tree.flatten(logs)
        named = isinstance(logs, dict) and len(logs) == len(leaves)
        names = sorted(logs) if named else [None] * len(leaves)
        self._anew: list[Callable | None] = []
        self.tensors: list[tf.Tensor] = []
        for leaf, name in zip(leaves, names, strict=True):
            result = results.get(id(leaf))
            if result is None and name is not None and not tf.is_tensor(leaf):
                # Keras 3.12 makes NumPy arrays of results in eager mode.
                result = results.get(name)
            self._anew.append(result and result[1])
            if result is None:
                self.tensors.append(_weighted(leaf, weight))

    def of_batch(self, sums: list[tf.Tensor]) -> Any:
        """The logs of the whole batch, of the sums over its micro-batches."""
        rest = iter(sums)
        leaves = [anew() if anew else next(rest) for anew in self._anew]
        return keras.tree.pack_sequence_as(self._logs, leaves)


def _weighted(leaf, weight) -> tf.Tensor:
    leaf = tf.convert_to_tensor(leaf)
    if weight is None or not leaf.dtype.is_floating:
        return leaf
    return leaf * tf.cast(weight, leaf.dtype)
