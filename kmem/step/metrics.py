"""The metrics and the logs of a batch that comes in micro-batches.

A metric adds up by itself: what it gives of the last micro-batch is that of
the batch, once it is computed anew. What else a step returns is averaged over
the micro-batches, or added up if it is an integer.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.step import patching

# For each result of a metric, by its `id` and its name: the result, and a
# function that computes it anew.
Results = dict[int | str, tuple[Any, Callable]]


@contextlib.contextmanager
def counting_share(model: keras.Model, share) -> Iterator[Results]:
    """Lets the model's metrics count one micro-batch.

    A mean of scalars that is updated without a weight counts `share`, so that
    the micro-batches of a batch count as one update together.

    Args:
        model: The model whose metrics are updated within.
        share: The micro-batch's examples over the batch's, a scalar.

    Yields:
        What the metrics give.
    """
    results: Results = {}

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

    with contextlib.ExitStack() as stack:
        for metric in model.metrics:
            changes: dict[str, Callable] = {"result": recording_result}
            if type(metric).update_state is keras.metrics.Mean.update_state:
                changes["update_state"] = weighted_update
            for name, change in changes.items():
                replacement = functools.partial(change, metric)
                stack.enter_context(patching.method(metric, name, replacement))
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


def _nth_leaf(function: Callable, position: int):
    return keras.tree.flatten(function())[position]


def _weighted(leaf, weight) -> tf.Tensor:
    leaf = tf.convert_to_tensor(leaf)
    if weight is None or not leaf.dtype.is_floating:
        return leaf
    return leaf * tf.cast(weight, leaf.dtype)
