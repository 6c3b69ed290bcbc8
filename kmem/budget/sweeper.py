"""Trains a few steps at each of several thresholds of DTR, to see what they
cost: the figure of MegEngine's guide, for the user's own model.

Every step begins with the same state and the same batch, so that all
thresholds run the same program, and all take their steps in turns, so that
other work on the machine slows all of them. One step with each batch is
recorded besides, from which the simulator tells what to expect. As many
batches are in memory as an input pipeline has ready in `fit`.

What it does not do: know of arrays that `fit` is given, which Keras copies
whole.
"""

import contextlib
import dataclasses
import gc
import itertools
import pathlib
import re
import statistics
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.base import checks
from kmem.base.bindings import AUTO
from kmem.base.sizes import format_size
from kmem.budget import planner
from kmem.budget.dry_run import installed
from kmem.budget.dry_run import timed
from kmem.dtr import device
from kmem.dtr.simulator import Forecast
from kmem.dtr.sweep import Row
from kmem.dtr.sweep import Sweep
from kmem.dtr.trace import Program
from kmem.dtr.trace import read_program
from kmem.fit import pipeline
from kmem.fit.session import Session
from kmem.options import DTR
from kmem.options import MemoryOptions
from kmem.step import batches

SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
# The step's own, and those that are ready.
_MAX_BATCHES = 1 + pipeline.BATCHES_READY


def sweep(
    model: keras.Model,
    data: Any,
    thresholds: Sequence[float | int | str] | None = None,
    *,
    dtr: DTR | None = None,
    steps: int = 4,
    verbose: int = 0,
) -> Sweep:
    """Measures what training under DTR costs at several thresholds.

    The model, its optimizer, metrics and random seeds stay as they are.

    Args:
        model: A compiled `keras.Model`.
        data: One batch, as `train_step` gets it: `x`, `(x, y)` or
            `(x, y, sample_weight)`, of arrays or tensors. Or a
            `tf.data.Dataset` or `keras.utils.PyDataset`, of which the first
            four batches are used.
        thresholds: Bytes, sizes such as `"2GB"`, and shares of plain eager
            training's peak, as floats in (0, 1]. By default six shares from
            1.0 to 0.3 and, if the device's memory is a pool, all of it.
        dtr: The other settings.
        steps: How many steps to take with each batch; the fastest counts.
        verbose: 1 shows progress.

    Returns:
        A `kmem.Sweep`. A threshold that is too small is a row that says so.

    Raises:
        ValueError: If a threshold is not of one of its forms, if DTR cannot
            work with this model, or if a step does not fit in the device even
            under DTR.
        NativeLibraryError: If kmem's allocator is not in place.

    Example:

    ```python
    import keras
    import numpy as np

    import kmem

    layers = [keras.layers.Conv2D(8, 3, activation="relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((48, 48, 1)), *layers])
    model.compile("sgd", "mse")
    x, y = np.zeros((32, 48, 48, 1)), np.zeros((32, 32, 32, 8))
    result = kmem.sweep(model, (x, y), [0.9, 0.75], steps=2)
    print(result.summary())
    kmem.wrap(model).fit(x, y, dtr=result.recommended)
    ```
    """
    pool = memory.pool()
    asked: tuple = SHARES if pool is None else (pool.size, *SHARES)
    if thresholds is not None:
        asked = tuple(thresholds)
    for threshold in asked:
        _to_bytes(threshold, whole_bytes=1)
    checks.positive_int(steps, "steps")
    gc.collect()
    before = memory.current()
    tensors = _tensors(data)
    room = _room(tensors, memory.current() - before)
    sweeper = _Sweeper(model, tensors, dtr or DTR(), steps, room)
    return sweeper.sweep(asked, verbose)


class _Sweeper:
    """Tries a model's training step under settings of DTR, in what memory
    `room` leaves."""

    def __init__(
        self, model, data: list, settings: DTR, steps: int, room: tf.Tensor
    ):
        planner.build(model, batches.specs_of(data[0]))
        self._model = model
        self._data = data
        self._room = room
        self._settings = settings
        self._steps = steps
        self._trials: dict[DTR, _Trial] = {}
        self._unlimited = self._trial(0)
        self._plain = _Trial(self._session(self._unlimited), data, plainly=True)

    def sweep(self, asked: Sequence[float | int | str], verbose: int) -> Sweep:
        forecast = self._forecast()
        plain = self._plain
        whole = forecast.peak_bytes if plain.error else max(plain.peaks)
        for threshold in asked:
            self._trial(_to_bytes(threshold, whole))
        trials = [plain, *self._trials.values()]
        progress = keras.utils.Progbar(
            self._steps * len(trials), verbose=verbose, unit_name="trial"
        )
        for trial in trials * self._steps:
            trial.run()
            progress.add(1)
        return self._result(forecast)

    def _trial(self, threshold_bytes: int) -> DTR:
        """Begins a trial, and gives its settings."""
        options = dataclasses.replace(
            self._settings, eviction_threshold=threshold_bytes
        )
        if options not in self._trials:
            trial = _Trial(self._session(options), self._data)
            self._trials[options] = trial
        return options

    def _session(self, options: DTR) -> Session:
        session = Session(self._model, MemoryOptions(dtr=options))
        session.changes.build()
        return session

    def _forecast(self) -> Forecast:
        """What the simulator makes of a step without a threshold."""
        unlimited = self._trials[self._unlimited]
        for trial in (self._plain, unlimited):
            trial.run()
        programs = [] if unlimited.error else unlimited.record()
        if unlimited.error:
            raise ValueError(
                "A step must fit in the device under DTR without a threshold: "
                f"make the batch smaller. Received: {unlimited.error}"
            )
        peaks = None if self._plain.error else unlimited.peaks
        in_pool = memory.pool() is not None
        return Forecast(programs, peaks, memory.current(), in_pool)

    def _result(self, forecast: Forecast) -> Sweep:
        unlimited = self._trials[self._unlimited].seconds
        rows = [self._plain.row(None)]
        for options, trial in self._trials.items():
            expected = forecast.of(options)
            rows.append(
                dataclasses.replace(
                    trial.row(options),
                    predicted_seconds=unlimited + expected.more_seconds,
                    predicted_peak_bytes=expected.peak_bytes,
                )
            )
        pool = memory.pool()
        return Sweep(tuple(rows), pool_bytes=pool.size if pool else None)


class _Trial:
    """Takes training steps with one option on some batches, and measures them.

    Each begins with the state in which the model is, and gives it back.

    Args:
        session: Trains under DTR.
        data: The batches, as tensors.
        plainly: Train in plain eager Keras instead; the session then only
            says what a step changes.

    Attributes:
        error: Why it cannot run; empty if it can.
        peaks: The most bytes of a step with each batch.
    """

    def __init__(self, session: Session, data: list, plainly: bool = False):
        self._session = session
        self._data = data
        self._plainly = plainly
        self._seconds: list[list[float]] = [[] for _ in data]
        self._num_steps = 0
        self._statistics: device.Statistics | None = None
        self.error = ""
        self.peaks = [0] * len(data)

    def run(self) -> None:
        """Takes a step with each batch, unless one has failed."""
        options: Any = self._session.options.dtr
        threshold, in_use = options.eviction_threshold, memory.current()
        if not self._plainly and 0 < threshold < in_use:
            self.error = (
                f"The threshold must be at least {in_use} bytes: they are in "
                f"use between the steps. Received: {threshold}"
            )
        for index in range(len(self._data)):
            if not self.error:
                self._step(index)

    def record(self) -> list[Program]:
        """Takes a step with each batch, and writes down what runs.

        It must be this trial that has run last.
        """
        session: Any = device.DeviceSession.latest
        programs = []
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "step.log"
            for index in range(len(self._data)):
                with session.trace(path):
                    self._step(index)
                programs.append(read_program(path))
        return programs

    @property
    def seconds(self) -> float:
        """The mean over the batches of their fastest steps."""
        return statistics.mean(map(min, self._seconds))

    def row(self, options: DTR | None) -> Row:
        """What was measured; the counts are means over the steps."""
        if self.error:
            return Row(options, error=_reason(self.error))
        row = Row(options, self.seconds, max(self.peaks))
        total = self._statistics
        if total is None:
            return row
        counts = {
            name: round(getattr(total, name) / self._num_steps)
            for name in ("num_evictions", "num_recomputations")
        }
        return dataclasses.replace(row, **counts)

    def _step(self, index: int) -> None:
        self._try(index)
        options: Any = self._session.options.dtr
        tried: set[str] = set()
        # As `fit` does. Another heuristic is chosen where one has failed.
        while self.error and not self._plainly and options.heuristic == AUTO:
            session: Any = device.DeviceSession.latest
            if session.heuristic in tried:
                break
            tried.add(session.heuristic)
            self.error = ""
            self._try(index)

    def _try(self, index: int) -> None:
        model: Any = self._session.model
        # More than one step, if Keras takes several at a time.
        batch = itertools.repeat(self._data[index])
        with self._session.changes.undone(), self._installed():
            if memory.pool() is not None:
                memory.reset_peak()
            try:
                with memory.track() as usage:
                    seconds = timed(model.train_function, batch)
            except tf.errors.ResourceExhaustedError as error:
                self.error = error.message
            pool = memory.pool()
        if self.error:
            # What the error's frames held.
            gc.collect()
            return
        seconds /= model.steps_per_execution
        self._seconds[index].append(seconds)
        peak_bytes = pool.peak_chunks if pool else usage.peak_bytes
        self.peaks[index] = max(self.peaks[index], peak_bytes)
        self._num_steps += model.steps_per_execution
        session = device.DeviceSession.latest
        if session is not None and not self._plainly:
            self._statistics = session.statistics()

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        model: Any = self._session.model
        if not self._plainly:
            with installed(self._session):
                yield
            return
        before = model.run_eagerly, model.train_function
        try:
            model.run_eagerly = True
            model.make_train_function(force=True)
            yield
        finally:
            model.run_eagerly, model.train_function = before


def _reason(error: str) -> str:
    """In a few words, why a step could not be taken."""
    needed = re.search(r"must be at least (\d+) bytes", error)
    if needed is not None:
        return f"no room: at least {format_size(int(needed[1]))}"
    return "thrashes" if "Recomputation must end" in error else "out of memory"


def _to_bytes(threshold: float | int | str, whole_bytes: int) -> int:
    """A share of the whole, or a size."""
    size = checks.budget(threshold, "thresholds")
    return round(size * whole_bytes) if isinstance(size, float) else size


def _tensors(data: Any) -> list:
    """The batches of what may be a data set, as a step gets them."""
    if isinstance(data, tf.data.Dataset):
        taken = list(data.take(_MAX_BATCHES))
    elif isinstance(data, keras.utils.PyDataset):
        count = min(data.num_batches or _MAX_BATCHES, _MAX_BATCHES)
        taken = [data[index] for index in range(count)]
    else:
        taken = [data]
    if not taken:
        raise ValueError("`data` must have a batch. Received: an empty one")

    def tensor(leaf) -> tf.Tensor | None:
        return batches.as_tensor(leaf, batches.specs_of(leaf))

    return [keras.tree.map_structure(tensor, batch) for batch in taken]


def _room(data: list, held_bytes: int) -> tf.Tensor:
    """As much as `fit` holds of batches, less what is held of them already."""
    needed = max(pipeline.ready_bytes(batch, _MAX_BATCHES) for batch in data)
    return tf.zeros(max(needed - held_bytes, 0), tf.uint8)
