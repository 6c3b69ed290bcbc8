"""Turns the levels' data into one stream: a batch or a stack for each level.

A level that takes several batches before the top level's update gets them
stacked, `(count, batch size, ...)`, so that one element is one update of the
top level, and one traced step computes it.
"""

from typing import Any

import keras
import tensorflow as tf

from kmem.step import batches


def check(data: Any, names: list[str]) -> None:
    """Checks what `fit` is given."""
    if not isinstance(data, dict) or set(data) != set(names):
        received = list(data) if isinstance(data, dict) else type(data)
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
    """The types of each level's first batch, of which `data` may have one."""
    found = {}
    for name, each in data.items():
        if isinstance(each, tf.data.Dataset):
            each = next(iter(each.take(1)), None)
        if each is None:
            raise ValueError(
                "The data of each level must have at least one batch. "
                f"Received: none for level '{name}'"
            )
        found[name] = batches.specs_of(each)
    return found


def element_specs(
    specs: dict[str, Any], counts: dict[str, int], replicas: int
) -> dict[str, Any]:
    """The types of what a replica's step is given: an element of `stream`.

    Args:
        specs: For each level's name, the types of a batch.
        counts: For each level's name, the batches that it takes.
    """

    def stacked(name):
        batch, count = batches.part_of(specs[name], replicas), counts[name]
        if count == 1:
            return batch
        return keras.tree.map_structure(
            lambda spec: tf.TensorSpec([count, *spec.shape], spec.dtype), batch
        )

    return {name: stacked(name) for name in specs}


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
        strategy: Each of its replicas gets its share of a batch's examples.

    Returns:
        The data set, and the steps of an epoch if Keras has to be told.

    Raises:
        ValueError: If batches differ in size where they must not.
    """
    replicas = strategy.num_replicas_in_sync
    sets = {}
    for name, dataset in data.items():
        _check_size(name, dataset, counts[name], replicas)
        dataset = dataset.repeat() if repeat else dataset
        if counts[name] > 1:
            dataset = dataset.batch(counts[name], drop_remainder=True)
        sets[name] = dataset
    zipped = tf.data.Dataset.zip(sets)
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
                batch,
            )
            for name, batch in element.items()
        }

    # Not by Keras, which would split a stack instead of each of its batches.
    split_up = zipped.map(split).unbatch().prefetch(replicas)
    stream = strategy.distribute_datasets_from_function(lambda _: split_up)
    return stream, None if repeat else steps


def _check_size(name: str, dataset, count: int, replicas: int) -> None:
    size = batches.num_rows(dataset.element_spec)
    if count > 1 and size is None:
        raise ValueError(
            "Batches of a level that takes several of them at a time must "
            "have equally many examples: use `batch(..., "
            f"drop_remainder=True)`. Received: level '{name}', which takes "
            f"{count} batches, with {dataset.element_spec}"
        )
    if replicas > 1 and (size is None or size % replicas):
        raise ValueError(
            "The batch size must be a multiple of the number of replicas: use "
            "`batch(..., drop_remainder=True)` with such a size. Received: "
            f"level '{name}' with batches of {size} examples, for {replicas} "
            "replicas"
        )
