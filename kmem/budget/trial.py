"""What the step of one option takes, with batches of any size.

Its layers by themselves, measured once, tell what to expect: the drawing. What
is worth it is run. A step is traced once, for batches whose size is not known,
and run with the sizes that are asked for. Of a step in many micro-batches two
are run: they come one after another, in one loop, so that from the second on
each needs what the one before did. What grows with their number is the batch,
and the time. Likewise, of a group of batches with one update two are run. Where
bytes cannot be counted, no step is run.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import math
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.budget import dry_run
from kmem.budget import planner
from kmem.budget import tuning
from kmem.budget.dry_run import Measurement
from kmem.fit.mechanisms import as_in_a_step
from kmem.fit.session import Session
from kmem.graph import control
from kmem.keras_graph import applying
from kmem.keras_graph import profiling
from kmem.keras_graph.costs import Costs
from kmem.keras_graph.recording import Recording
from kmem.keras_graph.recording import num_bytes
from kmem.options import GradientAccumulation
from kmem.options import MemoryOptions
from kmem.options import MicroBatches
from kmem.planning.bounds import peak_lower_bound
from kmem.planning.choosing import Chooser
from kmem.planning.flat import evaluate
from kmem.planning.network import Network
from kmem.planning.plan import Plan
from kmem.sharding import agreeing
from kmem.step import batches
from kmem.step import capture

# What was measured in this process, without what else was in memory: models
# of one structure need the same.
_measurements: dict[tuple, Measurement] = {}


@dataclasses.dataclass(eq=False)
class Drawing:
    """What the steps of a model need, in micro-batches of any size."""

    model: keras.Model
    # The whole batch, as `tf.TensorSpec`s.
    batch: Any
    # Without micro-batches.
    options: MemoryOptions
    # What a layer may need by itself while it is measured.
    most_bytes: int
    # 1 shows progress.
    verbose: int

    def __post_init__(self):
        self._choosers: dict[tuple[int, bool], Chooser] = {}
        self._recordings: dict[int, Recording] = {}
        self._num_rows = batches.num_rows(self.batch) or 1

    def least_bytes(self, size: int, is_split: bool) -> int:
        """What a step without a plan makes, in micro-batches of a size, of one
        or of several. That is less than it needs; nothing is run."""
        network = self._traced.scaled(size / self._num_rows)
        return evaluate(self._of_parts(network, is_split), ()).peak_bytes

    def at(self, size: int, is_split: bool) -> Chooser:
        """The plans for micro-batches of a size, of one or of several.

        Raises:
            ValueError: If the model's step cannot be planned for.
            tf.errors.ResourceExhaustedError: If a layer by itself has no room.
        """
        if (size, is_split) not in self._choosers:
            network, measured_size = self._measured
            network = network.scaled(size / measured_size)
            chooser = Chooser(self._of_parts(network, is_split))
            self._choosers[size, is_split] = chooser
        return self._choosers[size, is_split]

    def _of_parts(self, network: Network, is_split: bool) -> Network:
        if not is_split:
            return network
        return planner.adding_up(self.model, network, self.options, True)

    @functools.cached_property
    def _traced(self) -> Network:
        return self._network(self._num_rows, "traced", 0)

    @functools.cached_property
    def _measured(self) -> tuple[Network, int]:
        """The layers, and the micro-batch in which they were measured: the
        largest in which each has room by itself."""
        if profiling.mode(self.model, self.options) == "xla":
            control.prefer_little_memory()
        costs: Costs = "measured" if memory.is_counted() else "flops"
        size = self._num_rows
        while True:
            scaled = self._traced.scaled(size / self._num_rows)
            has_room = peak_lower_bound(scaled.graph) <= self.most_bytes
            half = -(-size // 2)
            try:
                if has_room or half == size or not self.takes(half):
                    return self._network(size, costs, self.verbose), size
            except tf.errors.ResourceExhaustedError:
                if half == size or not self.takes(half):
                    raise
            size = half

    def takes(self, size: int) -> bool:
        """Whether the model is known to take micro-batches of a size."""
        with contextlib.suppress(ValueError):
            return self.recording(size) is not None
        return False

    def _network(self, size: int, costs: Costs, verbose: int) -> Network:
        recording = self.recording(size)
        return planner.network_of(
            *(self.model, recording, self.options, costs, verbose)
        )

    def network(self, size: int, is_split: bool) -> Network:
        """That of micro-batches of a size, with its values as they are."""
        sizes = tuple(map(num_bytes, self.recording(size).tensors))
        network = self.at(size, is_split).network
        return dataclasses.replace(network, value_bytes=sizes)

    def recording(self, size: int) -> Recording:
        """What the model calls in a micro-batch of a size."""
        if size not in self._recordings:
            microbatch = batches.with_rows(self.batch, size)
            with as_in_a_step(self.model, self.options):
                recording = profiling.record_batch(self.model, microbatch)
            self._recordings[size] = recording
        return self._recordings[size]


class Trial:
    """Takes steps with one option, in micro-batches of any size.

    Args:
        model: The model, compiled and with its variables.
        batch: The whole batch, as `tf.TensorSpec`s.
        options: The options. If they have micro-batches, any number of them.
        drawing: What to expect of a step where none can be measured.
        key: What the model's steps are known by, if others' are alike.
        plan: What the step recomputes, if it does.
        recording: What the plan was made from.
        spec: What `fit`'s graph knows of its batches. A step with a whole
            batch is traced for it, and needs not be traced again.

    Attributes:
        plan: As given.
        session: What takes the steps, once one was run.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        options: MemoryOptions,
        drawing: Drawing,
        key: str,
        plan: Plan | None = None,
        recording: Recording | None = None,
        spec: Any = None,
    ):
        self._model = model
        self._batch = batch
        self._num_rows = batches.num_rows(batch) or 1
        self._parts = min(enough_parts(model, options), options.num_parts)
        options = with_count(options, self._parts)
        if options.num_batches > 1:
            both = GradientAccumulation(2)
            options = dataclasses.replace(
                options, gradient_accumulation_steps=both
            )
        self._options = options
        self.plan = plan
        self._recording = recording
        # `train_on_batch` traces a step for the batch that it is given; and a
        # data set may have an `Optional`, of which a batch has nothing.
        leaves = batches.leaves(batches.without_absent(spec))
        is_alike = len(leaves) == len(batches.leaves(batch))
        self._spec = spec if is_alike else batch
        self._drawing = drawing
        self._group = agreeing.processes(options)
        rest = dataclasses.replace(options, remat=None)
        segments = plan and plan.segments
        self._key = key and (key, segments, rest, self._group.size)
        # What is let go of while it is traced would make it seem to need less.
        gc.collect()
        self._in_use = memory.current() if memory.is_counted() else 0
        self.session: Any = None
        self._step: Any = None

    def measure(self, size: int) -> Measurement | None:
        """What a step of the whole batch takes besides what is in memory, in
        micro-batches of a size; `None` if it ran out of memory."""
        key = (*self._key, size) if self._key else ()
        own = _measurements.get(key)
        if own is None:
            own = self._run(size)
            if own is None:
                return None
            if key:
                _measurements[key] = own
            while len(_measurements) > tuning.MAX_KEPT:
                _measurements.pop(next(iter(_measurements)))
        rows = self.rows(size)
        batch = batches.with_rows(self._batch, rows)
        left = batches.num_bytes(self._batch) - batches.num_bytes(batch)
        own = own.agreed(self._group)
        return dataclasses.replace(
            own,
            peak_bytes=own.peak_bytes + left,
            seconds=own.seconds * self._num_rows / rows,
        )

    def rows(self, size: int) -> int:
        """How many examples a step in micro-batches of a size is given."""
        return min(self._num_rows, self._parts * size * self._group.size)

    def _run(self, size: int) -> Measurement | None:
        if not memory.is_counted():
            return self._drawn(size)
        is_traced = self.session is not None
        with self.ready(size) as step, dry_run.installed(self.session):
            count = dry_run.steps_of_update(self._model, self._options)
            measured = dry_run.measured(step, self._group, is_traced, count)
        if not (measured and is_traced and self.session.is_traceable):
            # What a trace, an eager step or an error left. It takes a second.
            gc.collect()
        if measured is None:
            return None
        peak_bytes = measured.peak_bytes - self._in_use
        return dataclasses.replace(measured, peak_bytes=peak_bytes)

    def _drawn(self, size: int) -> Measurement:
        if self.plan is not None:
            point: Any = self.plan.simulation
        else:
            point = self._drawing.at(size, self._parts > 1).everything
        return Measurement(point.peak_bytes, self._parts * point.seconds)

    @contextlib.contextmanager
    def ready(self, size: int) -> Iterator[Callable[[], Any]]:
        """Within, a step can be taken again and again when the session is
        installed; what it changes is given back."""
        if self.session is None:
            self.session = Session(
                *(self._model, self._options, self.plan),
                recording=self._recording,
            )
            any_size = batches.with_rows(self._batch, None)
            # Other numbers of micro-batches may run in the same trace.
            is_whole = self.plan or self._parts == 1
            is_whole = is_whole and self.rows(size) == self._num_rows
            spec = self._spec if is_whole else any_size
            self._step = self.session.on_batch(spec)
        specs = batches.with_rows(self._batch, self.rows(size))
        try:
            with self.session.changes.undone(specs):
                data = batches.random_data(specs)
                yield lambda: self._step(data)
        finally:
            # The sums of a group are given back, too, and are not to stay.
            self.session.remove()


def with_count(options: MemoryOptions, count: int) -> MemoryOptions:
    """The options, with so many micro-batches."""
    microbatches = MicroBatches(count) if count > 1 else None
    return dataclasses.replace(options, microbatches=microbatches)


def enough_parts(model: Any, options: MemoryOptions) -> int:
    """How many micro-batches show what more of them need. For two XLA makes no
    loop, and may do without sums of gradients."""
    return 3 if profiling.mode(model, options) == "xla" else 2


def longest_in_turns(*two: tuple[Trial, int]) -> float:
    """At most how many times as long one step takes as another one.

    Both are taken in turns: what else a machine does slows both down.

    Args:
        *two: The trial of each, and the size of its micro-batches.
    """
    ratios: list[float] = []
    total = 0.0
    with contextlib.ExitStack() as stack:
        steps = [stack.enter_context(trial.ready(n)) for trial, n in two]
        try:
            # The first turn may trace.
            for turn in range(tuning.NUM_STEPS + 1):
                seconds = [0.0, 0.0]
                # A step is slower behind one that has given much memory back.
                for which in (0, 1) if turn % 2 else (1, 0):
                    with dry_run.installed(two[which][0].session):
                        seconds[which] = dry_run.timed(steps[which])
                if turn:
                    ratios.append(seconds[0] / seconds[1])
                    total += sum(seconds)
                if turn > 2 and total > tuning.ENOUGH_SECONDS:
                    break
        except tf.errors.ResourceExhaustedError:
            return math.inf
    # Of the whole batch.
    rows, other_rows = (trial.rows(size) for trial, size in two)
    return max(ratios) * other_rows / rows


def model_key(model: Any, drawing: Drawing, size: int) -> str:
    """What the steps of a model are known by; nothing if only it knows."""
    if not capture.has_default_step(model):
        return ""
    try:
        recording = drawing.recording(size)
    except Exception:
        # One that cannot be recorded can be run all the same.
        return ""
    key = (
        applying.structure(recording),
        [(v.shape, v.dtype, v.trainable) for v in model.variables],
        dry_run.beside_layers(model),
        *(profiling.mode(model), model.steps_per_execution),
    )
    return hashlib.sha256(repr(key).encode()).hexdigest()
