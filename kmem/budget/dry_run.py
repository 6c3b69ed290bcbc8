"""The one way to run steps that leave no trace, to see what they need."""

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem import memory
from kmem import precision
from kmem.base import bindings
from kmem.base import native
from kmem.base import private_keras
from kmem.base import private_tf
from kmem.budget import tuning
from kmem.fit.session import Session
from kmem.options import MemoryOptions
from kmem.sharding import agreeing
from kmem.sharding.engine import Engine
from kmem.step import batches
from kmem.step.capture import optimizer_config


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a step takes.

    Attributes:
        peak_bytes: The (first) device's peak to count with, or the size of
            the pool in which it would have run.
        seconds: The time of the fastest step.
    """

    peak_bytes: int
    seconds: float

    def agreed(self, group: Engine) -> "Measurement":
        """The same for all processes that train together: what the one takes
        that needs most. Their times are the same by now."""
        peak_bytes = agreeing.highest(group, self.peak_bytes)
        return dataclasses.replace(self, peak_bytes=peak_bytes)


def dry_run(
    model: keras.Model,
    batch: Any,
    undone: contextlib.AbstractContextManager,
    training: contextlib.AbstractContextManager,
    spec: Any = None,
    *,
    group: Engine | None = None,
    count: int = 1,
) -> Measurement | None:
    """Runs a model's steps on random data, and measures them.

    What steps change (weights, optimizer, statistics, random seeds, metrics)
    is kept in host memory in the meantime, and given back.

    Args:
        model: The model.
        batch: A replica's batch, as `tf.TensorSpec`s.
        undone: Within, what steps change is given back.
        training: Within, `model.train_function` takes the steps.
        spec: What the graph knows of the batch.
        group: The processes that take them together.
        count: As `measured` has it.

    Returns:
        What a step took in this process, or `None` if it ran out of memory.
    """
    with undone:
        try:
            with training:
                iterator = _iterator(model.distribute_strategy, batch, spec)
                step: Any = model.train_function
                return measured(
                    lambda: step(iterator), group or Engine(), count=count
                )
        finally:
            gc.collect()


def of_session(
    session: Session, batch: Any, spec: Any = None
) -> Measurement | None:
    """`dry_run` of a session's step with a batch (`TensorSpec`s)."""
    group = agreeing.processes(session.options)
    around = session.changes.undone(batch), installed(session)
    count = steps_of_update(session.model, session.options)
    return dry_run(
        session.model, batch, *around, spec, group=group, count=count
    )


def steps_of_update(model: Any, options: MemoryOptions) -> int:
    """How many steps have one update, of those that are few enough to take:
    the optimizer's own, or of kmem's the first two."""
    own = getattr(model.optimizer, "gradient_accumulation_steps", None) or 1
    return max(
        own if own <= tuning.NUM_STEPS else 1, min(2, options.num_batches)
    )


def is_possible(model: Any) -> bool:
    """Whether a model's step can be run, and its bytes are counted."""
    strategy = model.distribute_strategy
    # Several workers would have to agree on what to run.
    alone = strategy.num_replicas_in_sync == 1 or isinstance(
        strategy, tf.distribute.MirroredStrategy
    )
    return model.compiled and alone and memory.is_counted()


def beside_layers(model: Any) -> str:
    """What a step's bytes depend on besides the model's layers, as text."""
    if not model.compiled:
        return ""
    # Around it there may be a loss scale.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    kinds = [type(each).__name__ for each in (model.optimizer, optimizer)]
    config = optimizer_config(optimizer)
    for name in ("name", "learning_rate"):
        config.pop(name, None)
    for each in private_keras.asked_metrics(model):
        # A name, a function, or a metric, whose own name may be another.
        kind = each if isinstance(each, str) else type(each).__name__
        kinds.append(getattr(each, "__qualname__", kind))
        kinds += [str(v.shape) for v in getattr(each, "variables", ())]
    replicas = model.distribute_strategy.num_replicas_in_sync
    return repr((kinds, sorted(config.items()), replicas))


@contextlib.contextmanager
def installed(session: Session) -> Iterator[None]:
    """Within, a session's model trains in it, and validates as always."""
    with precision.none_remembered(session.model.optimizer):
        session.install(test_step=False)
        try:
            yield
        finally:
            session.remove()


def timed(step: Callable[..., Any], *arguments: Any) -> float:
    """Takes a step, and returns the seconds until it was done."""
    start = time.perf_counter()
    with private_tf.refusals():
        logs = step(*arguments)
        # Waits for a GPU.
        keras.tree.map_structure(np.asarray, logs)
    return time.perf_counter() - start


def measured(
    step: Callable[[], Any],
    group: Engine,
    is_traced: bool = False,
    count: int = 1,
) -> Measurement | None:
    """Takes two steps, or more if these need other than one another, and
    measures them.

    Args:
        step: Takes one.
        group: The processes that take them together.
        is_traced: Whether the first one does not trace.
        count: How many have one update. So many are taken together, as one
            that updates may need more than the others.

    Returns:
        What a step took in this process, or `None` if it ran out of memory.

    Raises:
        ValueError: If the step refuses random numbers.
    """
    peaks: list[int] = []
    seconds: list[float] = []
    try:
        if not is_traced:
            # It may take memory that no other step does.
            for _ in range(count):
                timed(step)
        while len(peaks) < tuning.NUM_STEPS:
            each = [_timed_and_needed(step) for _ in range(count)]
            duration, num_bytes = (
                max(both) for both in zip(*each, strict=True)
            )
            # They all have to take as many, in nanoseconds.
            longest = agreeing.highest(group, int(1e9 * duration))
            seconds.append(longest / 1e9)
            differs = num_bytes not in peaks[-1:]
            peaks.append(num_bytes)
            is_long = len(peaks) > 1 and sum(seconds) > tuning.ENOUGH_SECONDS
            if is_long or not agreeing.highest(group, int(differs)):
                break
    except tf.errors.ResourceExhaustedError:
        return None
    except tf.errors.InvalidArgumentError as error:
        *_, what = error.message.split("\n\n")
        raise ValueError(
            "A step must take random numbers of the batch's shapes, which kmem "
            "tries it with before it trains: assert what a step's values are "
            f"in the input pipeline, or use `microbatches`. Received: {what}"
        ) from error
    # Where few have the highest peak, others may have a higher one.
    peak_bytes = 2 * max(peaks) - int(statistics.median(peaks))
    return Measurement(peak_bytes, min(seconds))


def _timed_and_needed(step: Callable[[], Any]) -> tuple[float, int]:
    """The seconds of a step, and what a device must have for it to run.

    That is its peak or, where blocks come from a pool, the size of one in
    which each finds a place: what is free may lie in pieces. What is allocated
    is replayed in pools of other sizes for that. On a GPU that was not asked
    for a pool of kmem's it is TensorFlow's.
    """
    library, num_bytes = native.allocator(), 0
    with memory.track() as usage:
        kind = library.kmem_pool_kind(usage.number)
        if kind == bindings.NO_POOL and usage.number != bindings.CPU:
            kind = bindings.BFC_POOL
        if kind == bindings.NO_POOL:
            seconds = timed(step)
        else:
            library.kmem_begin_recording(usage.number)
            try:
                seconds = timed(step)
            finally:
                num_bytes = library.kmem_end_recording_in_pool(
                    usage.number, kind
                )
    return seconds, max(num_bytes, usage.peak_bytes)


def _iterator(
    strategy: tf.distribute.Strategy, batch: Any, spec: Any
) -> Iterator:
    """Gives every replica the same random data again and again, of which a
    graph knows the number of rows, unless the spec has none."""
    data = batches.random_data(batch)
    # A data set is not made of `None`, but may be mapped to it.
    leaves = tuple(batches.leaves(data))
    if spec is not None and batches.num_rows(spec) is None:
        batch = batches.with_rows(batch, None)

    def known(leaf, spec):
        if leaf is None:
            return None
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=spec.shape)

    whole = batches.of_leaves(
        lambda data: keras.tree.map_structure(known, data, batch), data
    )
    # An iterator may wait for seconds until its tuning has ended.
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    dataset = tf.data.Dataset.from_tensors(leaves).repeat().map(whole)
    dataset = dataset.with_options(untuned)
    if strategy.num_replicas_in_sync > 1:
        dataset = strategy.distribute_datasets_from_function(lambda _: dataset)
    return iter(dataset)
