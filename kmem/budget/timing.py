"""What the steps of a model take: dry runs, of which none is made twice.

A search (search.py) measures a dozen steps. One for less memory, for a larger
batch or for another model of the same structure needs many of them again.
Where bytes cannot be counted, no step is run: a plan that recomputes nothing
tells what is predicted of it.
"""

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.budget import dry_run
from kmem.budget import planner
from kmem.budget import tuning
from kmem.budget.dry_run import Measurement
from kmem.fit import undoing
from kmem.fit.session import Session
from kmem.keras_graph import applying
from kmem.keras_graph import profiling
from kmem.options import MemoryOptions
from kmem.options import MicroBatches
from kmem.options import Remat
from kmem.planning.plan import Plan
from kmem.sharding import agreeing
from kmem.step import batches
from kmem.step import capture

# What was measured in this process: peaks without what else was in memory,
# and how many times as long one step takes as another.
_measurements: dict[tuple, Measurement] = {}
_ratios: dict[tuple, float] = {}


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """A step in a micro-batch or two, in place of one in many.

    They run one after another, in one loop: from the second on each needs
    what the one before did. What grows with their number is the batch, and
    the time.

    Attributes:
        batch: What it gets, as `tf.TensorSpec`s.
        options: Its options.
        plan: What it follows, if it follows one.
        left_bytes: The rest of the batch.
        times: How many times as long the whole step takes.
    """

    batch: Any
    options: MemoryOptions
    plan: Plan | None = None
    left_bytes: int = 0
    times: float = 1.0


def excerpt(
    batch: Any, options: MemoryOptions, plan: Plan | None = None
) -> Excerpt:
    """The first two micro-batches of a step with a batch (`TensorSpec`s)."""
    batch_size = batches.num_rows(batch)
    if batch_size is None or options.num_parts <= 2:
        return Excerpt(batch, options, plan)
    size = min(batch_size, 2 * -(-batch_size // options.num_parts))
    first = batches.with_rows(batch, size)
    return Excerpt(
        first,
        dataclasses.replace(options, microbatches=MicroBatches(2)),
        plan,
        batches.num_bytes(batch) - batches.num_bytes(first),
        batch_size / size,
    )


@dataclasses.dataclass(frozen=True)
class Line:
    """What steps need by their examples.

    That is a line: weights, their gradients and the optimizer whatever the
    number of examples, and activations for each of them.

    Attributes:
        base_bytes: The peak without examples.
        example_bytes: What each example adds.
        example_seconds: The time that each takes.
    """

    base_bytes: float
    example_bytes: float
    example_seconds: float

    def peak_bytes(self, num_examples: int) -> int:
        """The peak of a step with so many examples."""
        return int(self.base_bytes + num_examples * self.example_bytes)


class Timing:
    """What the steps of one model take.

    Args:
        model: The model, compiled and with its variables.
        batch: What it trains on, as `tf.TensorSpec`s.
    """

    def __init__(self, model: keras.Model, batch: Any):
        self._model = model
        self._batch = batch
        self._is_counted = memory.is_counted()
        self._key = _key(model, batch)
        # Once: right after a step its inputs may still be there.
        self._in_use = memory.current() if self._is_counted else 0

    def measure(
        self, step: Excerpt, most_seconds: float = tuning.OPTION_SECONDS
    ) -> tuple[Measurement | None, Session | None]:
        """Measures a step, unless that was done before.

        Returns what it took, in the process that needs most, or `None` if it
        ran out of memory; and what ran it, if it ran now.
        """
        if not self._is_counted:
            return self._predicted(step), None
        key, session = self._step_key(step), None
        own = _measurements.get(key)
        if own is None:
            session = self._session(step)
            measurement = dry_run.of_session(
                session, step.batch, in_fit=False, most_seconds=most_seconds
            )
            if measurement is None:
                # What took the memory may be gone the next time.
                return None, session
            own = _with_more(measurement, -self._in_use)
            self._remember(_measurements, key, own)
        # What else is in memory now is part of the peak.
        group = agreeing.processes(step.options)
        return _with_more(own, self._in_use).agreed(group), session

    def compare(
        self, steps: Sequence[Excerpt], sessions: Sequence[Session | None]
    ) -> float | None:
        """How many times as long a whole step takes as another one, or `None`
        if they ran out of memory or cannot run.

        Args:
            steps: Two steps of this process alone.
            sessions: What ran them, if they ran now.
        """
        if not self._is_counted:
            return None
        one, other = steps
        key = self._step_key(one), self._step_key(other)
        ratio = _ratios.get(key)
        if ratio is None:
            ran = [
                session or self._session(step)
                for session, step in zip(sessions, steps, strict=True)
            ]
            ratio = ratio_in_turns(ran, [step.batch for step in steps])
            if ratio is None:
                return None
            self._remember(_ratios, key, ratio)
        return ratio * one.times / other.times

    def line(self, options: MemoryOptions, most_bytes: int) -> Line:
        """Measures steps with a few examples, and draws the line through them.

        With few examples it bends: the update of the weights needs more than
        they do. So there are more and more, until that matters, and the line
        is drawn through the last two. Steps that need more than `most_bytes`
        need not be seen. Where the device has no room for a step, the line
        tells of the least that this means.
        """
        total = batches.num_rows(self._batch) or 1
        num_processes = agreeing.processes(options).size
        last_size = min(total, num_processes)
        first = last = self._probe(options, last_size)
        if first is None or last is None:
            return Line(most_bytes, most_bytes, math.inf)
        slope = first.peak_bytes / last_size
        line = Line(0, slope, first.seconds / last_size)
        while last_size < total and last.peak_bytes < most_bytes:
            size = min(total, tuning.PROBE_GROWTH * last_size)
            is_unsafe = last is not first and line.peak_bytes(size) > most_bytes
            if num_processes > 1 and is_unsafe:
                # One that runs out of memory would end them all.
                break
            probe = self._probe(options, size)
            if probe is None:
                # It is steeper than can be seen.
                slope = most_bytes / last_size
                return Line(0, slope, last.seconds / last_size)
            growth = max(0, probe.peak_bytes - last.peak_bytes)
            slope = growth / (size - last_size)
            base_bytes = probe.peak_bytes - slope * size
            line = Line(base_bytes, slope, probe.seconds / size)
            last, last_size = probe, size
            if probe.peak_bytes > tuning.PEAK_GROWTH * first.peak_bytes:
                break
        return line

    def _probe(self, options: MemoryOptions, size: int) -> Measurement | None:
        step = Excerpt(batches.with_rows(self._batch, size), options)
        measurement, _ = self.measure(step, tuning.PROBE_SECONDS)
        return measurement

    def _session(self, step: Excerpt) -> Session:
        return Session(self._model, step.options, step.plan)

    def _predicted(self, step: Excerpt) -> Measurement:
        """What the drawing of a step tells."""
        options, plan = step.options, step.plan
        if plan is None:
            # The fastest plan within more than any step needs.
            remat = Remat(budget=2**62)
            planned = dataclasses.replace(options, remat=remat)
            plan = planner.make_plan(
                self._model, step.batch, planned, "flops", 0
            )
        seconds = options.num_parts * plan.predicted_seconds
        return Measurement(plan.highest_peak_bytes, seconds)

    def _step_key(self, step: Excerpt) -> tuple:
        """What a step is known by."""
        options, plan = step.options, step.plan
        return (
            *(self._key, batches.to_json(step.batch), plan and plan.segments),
            *(options.microbatches, options.mixed_precision),
            *(options.sharding, agreeing.processes(options).size),
        )

    def _remember(self, known: dict, key: tuple, value: Any) -> None:
        if not self._key:
            return
        known[key] = value
        while len(known) > tuning.MAX_MEASURED:
            known.pop(next(iter(known)))


def ratio_in_turns(
    sessions: Sequence[Session], specs: Sequence[Any]
) -> float | None:
    """How many times as long a session's step takes as another one's.

    What else a machine does may slow a step down by a tenth for minutes, and
    so decide between two that were measured one after the other. In turns
    both are slowed down. Everything that the steps change is given back.

    Args:
        sessions: Two sessions of one model.
        specs: The batch of each, as `tf.TensorSpec`s.

    Returns:
        The median of some turns, or `None` if they ran out of memory.
    """
    data = [batches.random_data(batch) for batch in specs]
    for session in sessions:
        session.changes.build()
    changes = [session.changes.variables for session in sessions]
    state = {id(v): v for variables in changes for v in variables}
    metrics = sessions[0].model.metrics
    turns: list[tuple[float, float]] = []
    with undoing.unchanged(list(state.values()), metrics):
        try:
            # The first turn traces.
            while len(turns) <= tuning.NUM_TURNS:
                seconds = [0.0, 0.0]
                # A step is slower behind one that has given much memory back.
                for which in (0, 1) if len(turns) % 2 else (1, 0):
                    seconds[which] = _turn(sessions[which], data[which])
                turns.append((seconds[0], seconds[1]))
                total = sum(map(sum, turns[1:]))
                is_long = total > 2 * tuning.OPTION_SECONDS
                if is_long and len(turns) > tuning.LEAST_TURNS:
                    break
        except tf.errors.ResourceExhaustedError:
            return None
    return statistics.median(one / other for one, other in turns[1:])


def _turn(session: Session, data: Any) -> float:
    model: Any = session.model
    with dry_run.installed(session):
        return dry_run.timed(model.train_function, iter([data]))


def _with_more(measurement: Measurement, num_bytes: int) -> Measurement:
    peak_bytes = measurement.peak_bytes + num_bytes
    return dataclasses.replace(measurement, peak_bytes=peak_bytes)


def _key(model: keras.Model, batch: Any) -> str:
    """What the steps of a model are known by; nothing if only it knows."""
    if not capture.has_default_step(model):
        return ""
    try:
        recording = profiling.record_batch(model, batch)
    except Exception:
        # One that cannot be recorded can be run all the same.
        return ""
    config = model.optimizer.get_config()
    for name in ("name", "learning_rate"):
        config.pop(name, None)
    key = (
        applying.structure(recording),
        [(v.shape, v.dtype, v.trainable) for v in model.variables],
        type(model.optimizer).__name__,
        sorted(config.items()),
        *(profiling.mode(model), model.steps_per_execution),
    )
    return hashlib.sha256(repr(key).encode()).hexdigest()
