"""The one way to run steps that leave no trace, to see what they need."""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem import memory
from kmem.budget import tuning
from kmem.fit import undoing
from kmem.fit.session import Session
from kmem.sharding import agreeing
from kmem.sharding.engine import Engine
from kmem.step import batches


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a step takes.

    Attributes:
        peak_bytes: The (first) device's peak to count with.
        seconds: The time of the fastest step.
        spread_bytes: How much more that is than any step needed: where few
            had the highest peak, others may have a higher one.
    """

    peak_bytes: int
    seconds: float
    spread_bytes: int = 0

    def agreed(self, group: Engine) -> "Measurement":
        """The same for all processes that train together: what the one takes
        that needs most. Their times are the same by now."""
        return Measurement(
            agreeing.highest(group, self.peak_bytes),
            self.seconds,
            agreeing.highest(group, self.spread_bytes),
        )


def dry_run(
    model: keras.Model,
    batch: Any,
    state: list,
    training: contextlib.AbstractContextManager,
    *,
    in_fit: bool = True,
    group: Engine | None = None,
    most_seconds: float = tuning.PLAN_SECONDS,
) -> Measurement | None:
    """Runs a model's steps on random data, and measures them.

    What steps change (weights, optimizer, statistics, random seeds, metrics)
    is kept in host memory in the meantime, and given back.

    Args:
        model: The model.
        batch: A replica's batch, as `tf.TensorSpec`s.
        state: The variables that a step may change, besides the metrics'.
        training: Within, `model.train_function` takes the steps.
        in_fit: Whether they take their batches from an iterator, as in `fit`,
            whose graph is another one, or are given a batch.
        group: The processes that take them together.
        most_seconds: Fewer steps are taken, but two, if they take longer.

    Returns:
        What a step took in this process, or `None` if it ran out of memory.
    """
    with undoing.unchanged(state, model.metrics):
        try:
            with training:
                feed = _feed(model.distribute_strategy, batch, in_fit)
                step: Any = model.train_function
                return _measured(step, feed, group or Engine(), most_seconds)
        finally:
            gc.collect()


def of_session(
    session: Session, batch: Any, **arguments: Any
) -> Measurement | None:
    """`dry_run` of a session's step with a batch (`TensorSpec`s)."""
    session.changes.build(batch)
    group = agreeing.processes(session.options)
    return dry_run(
        *(session.model, batch, session.changes.variables, installed(session)),
        group=group,
        **arguments,
    )


@contextlib.contextmanager
def installed(session: Session) -> Iterator[None]:
    """Within, a session's model trains in it, and validates as always."""
    session.install(test_step=False)
    try:
        yield
    finally:
        session.remove()


def timed(step: Callable, data: Iterator) -> float:
    """Takes a step, and returns the seconds until it was done."""
    start = time.perf_counter()
    logs = step(data)
    # Waits for a GPU.
    keras.tree.map_structure(np.asarray, logs)
    return time.perf_counter() - start


def _measured(
    step: Callable,
    feed: Callable[[], Iterator],
    group: Engine,
    most_seconds: float,
) -> Measurement | None:
    peaks, seconds = [], []
    try:
        # The first run traces, and may take memory that no other does.
        timed(step, feed())
        for number in range(tuning.MOST_STEPS):
            is_enough = sum(seconds) >= tuning.LEAST_SECONDS
            if number >= tuning.NUM_STEPS and is_enough:
                break
            if number > 1 and sum(seconds) > most_seconds:
                break
            if number < tuning.NUM_STEPS:
                time.sleep(tuning.PAUSE_SECONDS)
            with memory.track() as usage:
                duration = timed(step, feed())
            # They all have to take as many.
            seconds.append(agreeing.slowest(group, duration))
            peaks.append(usage.peak_bytes)
    except tf.errors.ResourceExhaustedError:
        return None
    spread_bytes = _spread(peaks)
    return Measurement(max(peaks) + spread_bytes, min(seconds), spread_bytes)


def _spread(peaks: list[int]) -> int:
    """How much more than the highest peak to count with."""
    highest = max(peaks)
    near = sum(peak >= tuning.NEARLY * highest for peak in peaks)
    often = max(2, tuning.OFTEN * len(peaks))
    return 0 if near >= often else highest - min(peaks)


def _feed(
    strategy: tf.distribute.Strategy, batch: Any, in_fit: bool
) -> Callable[[], Iterator]:
    """What gives every replica the same random data, as often as asked."""
    data = batches.random_data(batch)
    if not in_fit:
        return lambda: iter([data])
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]

    def structured(*leaves):
        given = iter(leaves)
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(given), data
        )

    # A data set is not made of `None`, but may be mapped to it.
    repeated = tf.data.Dataset.from_tensors(tuple(leaves)).repeat()
    dataset = repeated.map(structured)
    if strategy.num_replicas_in_sync > 1:
        dataset = strategy.distribute_datasets_from_function(lambda _: dataset)
    iterator = iter(dataset)
    return lambda: iterator
