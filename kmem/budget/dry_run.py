"""Runs a training step that leaves no trace, to see what it needs."""

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
from kmem.fit.session import Session
from kmem.keras_graph import profiling
from kmem.sharding import agreeing
from kmem.sharding.engine import Engine
from kmem.step import batches
from kmem.step import capture

# Those of a graph's operations that run side by side end in another order
# each time, which makes peaks differ by an operation's result.
_NUM_STEPS = 6
# Of short steps more are taken: many tell more of the highest peak, and the
# quickest of them is hardly disturbed by what else the machine does.
_MOST_STEPS, _AT_LEAST_SECONDS = 20, 1.0
# Of long steps fewer are taken, but two.
_AT_MOST_SECONDS = 20.0
# A peak that this share of the steps has, or nearly, is the highest there is,
# as far as seen.
_OFTEN, _NEARLY = 1 / 3, 0.999
# Threads that have fallen asleep, as between the steps of `fit`, begin their
# work in another order than those that go on at once.
_PAUSE_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What a step took.

    Attributes:
        peak_bytes: The (first) device's peak to count with.
        seconds: The time of the quickest step.
        spread_bytes: How much more that is than any step needed: where few
            had the highest peak, others may have a higher one.
    """

    peak_bytes: int
    seconds: float
    spread_bytes: int = 0


def rehearse(session: Session, batch) -> Rehearsal | None:
    """Runs a session's step on made-up numbers, and measures it.

    Everything that the step changes is given back: weights, optimizer,
    statistics, random seeds, metrics. They are kept outside of the device in
    the meantime.

    Args:
        session: Whose step it is.
        batch: A replica's batch, as `tf.TensorSpec`s.

    Returns:
        What it took, in the process that needs most of those that train
        together; `None` if it ran out of memory.
    """
    accumulates = session.options.gradient_accumulation_steps is not None
    group = agreeing.processes(session.options)
    with _rehearsing(session, batch):
        seen = rehearse_steps(session.model, batch, accumulates, group)
        if seen is None:
            return None
        return dataclasses.replace(
            seen,
            peak_bytes=agreeing.highest(group, seen.peak_bytes),
            spread_bytes=agreeing.highest(group, seen.spread_bytes),
        )


def rehearse_steps(
    model: keras.Model,
    batch,
    accumulates: bool = False,
    group: Engine | None = None,
) -> Rehearsal | None:
    """Runs a model's steps on made-up numbers, and measures them.

    Args:
        model: The model, whose state the caller gives back.
        batch: A replica's batch, as `tf.TensorSpec`s.
        accumulates: Whether steps differ, as some of them make no update.
        group: The processes that take them together.

    Returns:
        What they took, or `None` if they ran out of memory.
    """
    step: Any = model.train_function
    # As `fit` does: the graph of a step on a batch is another one.
    iterator = _batches(model.distribute_strategy, batch)
    num_steps = _num_steps(model, accumulates)
    return _measured(step, iterator, num_steps, group or Engine())


def rehearse_on_batch(
    session: Session, batch, at_most_seconds: float
) -> Rehearsal | None:
    """`rehearse`, by the function that is given a batch.

    Args:
        session: Whose step it is; its `on_batch` runs it.
        batch: A batch, as `tf.TensorSpec`s.
        at_most_seconds: Fewer steps are taken, but two, if they take longer.
    """
    data = batches.made_up(batch)
    num_steps = _num_steps(session.model, accumulates=False)
    with _rehearsing(session, batch):
        return _measured(
            session.on_batch(),
            data,
            num_steps,
            agreeing.processes(session.options),
            at_most_seconds,
        )


@contextlib.contextmanager
def _rehearsing(session: Session, batch) -> Iterator[None]:
    """Within, the model trains in a session; then it is as it was."""
    session.build(batch)
    with unchanged(session):
        try:
            with installed(session):
                yield
        finally:
            gc.collect()


@contextlib.contextmanager
def installed(session: Session) -> Iterator[None]:
    """Within, the model trains in a session.

    Args:
        session: The session, which validates as the model does.
    """
    session.install(test_step=False, undo=False)
    try:
        yield
    finally:
        session.remove()


def _measured(
    step: Callable,
    data,
    num_steps: int,
    group: Engine,
    at_most_seconds: float = _AT_MOST_SECONDS,
) -> Rehearsal | None:
    peaks, seconds = [], []
    try:
        # The first run traces, and may take memory that no other does.
        timed(step, data)
        for number in range(_MOST_STEPS):
            if number >= num_steps and sum(seconds) >= _AT_LEAST_SECONDS:
                break
            if number > 1 and sum(seconds) > at_most_seconds:
                break
            if number < num_steps:
                time.sleep(_PAUSE_SECONDS)
            with memory.track() as usage:
                duration = timed(step, data)
            # They all have to take as many.
            seconds.append(agreeing.slowest(group, duration))
            peaks.append(usage.peak_bytes)
    except tf.errors.ResourceExhaustedError:
        return None
    spread_bytes = _spread(peaks)
    return Rehearsal(max(peaks) + spread_bytes, min(seconds), spread_bytes)


def _spread(peaks: list[int]) -> int:
    """How much more than the highest peak to count with."""
    highest = max(peaks)
    near = sum(peak >= _NEARLY * highest for peak in peaks)
    often = max(2, _OFTEN * len(peaks))
    return 0 if near >= often else highest - min(peaks)


def timed(step: Callable, data) -> float:
    """Takes a step, and returns the seconds until it was done."""
    start = time.perf_counter()
    logs = step(data)
    # Waits for a GPU.
    keras.tree.map_structure(np.asarray, logs)
    return time.perf_counter() - start


def _num_steps(model: keras.Model, accumulates: bool) -> int:
    """One, if XLA lays out the memory of a whole step when it compiles it."""
    is_whole = (
        not accumulates and model.distribute_strategy.num_replicas_in_sync == 1
    )
    return 1 if is_whole and profiling.mode(model) == "xla" else _NUM_STEPS


def _batches(strategy, batch) -> Iterator:
    """Gives every replica the same batch, as often as asked."""
    made = batches.made_up(batch)
    leaves = [leaf for leaf in keras.tree.flatten(made) if leaf is not None]

    def structured(*leaves):
        given = iter(leaves)
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(given), made
        )

    # A data set is not made of `None`, but may be mapped to it.
    data = tf.data.Dataset.from_tensors(tuple(leaves)).repeat().map(structured)
    if strategy.num_replicas_in_sync == 1:
        return iter(data)
    return iter(strategy.distribute_datasets_from_function(lambda _: data))


@contextlib.contextmanager
def unchanged(session: Session) -> Iterator[None]:
    """Gives back what a session's steps change in a block of code.

    Args:
        session: Whose steps they are; its optimizer is built.
    """
    with capture.unchanged(session.state, session.model.metrics):
        yield
