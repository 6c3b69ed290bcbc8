"""Turns the levels' data into one stream: a batch or a stack for each level.

A level that takes several batches before the top level's update gets them
stacked, `(count, rows, ...)`, so that one element is one update of the top
level, and one traced step computes it.
"""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from kmem.step import batches


def check(data: Any, names: Iterable[str]) -> None:
    """Checks what `fit` is given.

    Raises:
        ValueError: If it is not a data set for each level.
    """
    names = list(names)
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        received = sorted(data) if isinstance(data, dict) else type(data)
        raise ValueError(
            "`x` must be a dictionary with a `tf.data.Dataset` of batches for "
            f"each level, {names}. Received: {received}"
        )
    for name, dataset in data.items():
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                "`x` must hold a `tf.data.Dataset` of batches for each level. "
                f"Received: {type(dataset).__name__} for level '{name}'"
            )


def first_batches(data: dict[str, Any]) -> dict[str, Any]:
    """The types of each level's first batch, with its rows."""
    return {
        name: batches.specs_of(
            next(iter(each.take(1)))
            if isinstance(each, tf.data.Dataset)
            else each
        )
        for name, each in data.items()
    }


def stream(
    data: dict[str, tf.data.Dataset],
    counts: dict[str, int],
    repeat: bool,
    strategy: tf.distribute.Strategy,
) -> tuple[Any, int | None]:
    """One data set, an element for each update of the top level.

    Args:
        data: For each level's name, its data set of batches.
        counts: For each level's name, the batches that it takes.
        repeat: Whether each data set starts again when it is over.
        strategy: Each of its replicas gets its share of a batch's rows.

    Returns:
        The data set, and the steps of an epoch if Keras has to be told.

    Raises:
        ValueError: If batches differ in their rows where they must not.
    """
    parts = {}
    for name, dataset in data.items():
        _check_rows(name, dataset, counts[name], strategy.num_replicas_in_sync)
        dataset = dataset.repeat() if repeat else dataset
        if counts[name] > 1:
            dataset = dataset.batch(counts[name], drop_remainder=True)
        parts[name] = dataset
    zipped = tf.data.Dataset.zip(parts)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return zipped.prefetch(1), None
    # A step at the end of the data would be run by some replicas only.
    steps = int(zipped.cardinality())
    if steps < 0 and not repeat:
        raise ValueError(
            "The number of steps must be known for several replicas: give "
            "`steps_per_epoch`, or a data set that knows its length. "
            f"Received: {zipped.element_spec}"
        )
    zipped = zipped.repeat()

    def split(element):
        return {
            name: keras.tree.map_structure(
                lambda t, axis=int(counts[name] > 1): tf.stack(
                    tf.split(t, replicas, axis)
                ),
                part,
            )
            for name, part in element.items()
        }

    # Not by Keras, which would split a stack of batches instead of their rows.
    split_up = zipped.map(split).unbatch().prefetch(replicas)
    stream = strategy.distribute_datasets_from_function(lambda _: split_up)
    return stream, None if repeat else steps


def _check_rows(name: str, dataset, count: int, replicas: int) -> None:
    rows = batches.num_rows(dataset.element_spec)
    if count > 1 and rows is None:
        raise ValueError(
            "Batches of a level that takes several of them at a time must "
            "have equally many rows: use `batch(..., drop_remainder=True)`. "
            f"Received: level '{name}', which takes {count} batches, with "
            f"{dataset.element_spec}"
        )
    if replicas > 1 and (rows is None or rows % replicas):
        raise ValueError(
            "The rows of a batch must be a multiple of the number of "
            "replicas: use `batch(..., drop_remainder=True)` with such a "
            f"size. Received: level '{name}' with batches of {rows} rows, "
            f"for {replicas} replicas"
        )
