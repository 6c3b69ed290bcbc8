"""Takes training steps in one way on some batches, and measures them.

Each begins with the state in which the model is, and gives it back.
"""

import contextlib
import gc
import itertools
import math
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem import dtr
from kmem import memory
from kmem.budget.dry_run import installed
from kmem.budget.dry_run import timed
from kmem.dtr import device
from kmem.dtr.program import Program
from kmem.dtr.program import read_program
from kmem.fit.session import Session
from kmem.step import capture


class Trial:
    """A way to train, and what its steps took.

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
        self._quickest = [math.inf] * len(data)
        self._num_steps = 0
        self._statistics = None
        self.error = ""
        self.peaks = [0] * len(data)

    def run(self) -> None:
        """Takes a step with each batch, unless one has failed."""
        options = self._session.options.dtr
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
        session: Any = device.latest()
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
        """The mean over the batches of their quickest steps."""
        return sum(self._quickest) / len(self._quickest)

    @property
    def num_evictions(self) -> float:
        """The mean number of evictions in a step."""
        found = self._statistics
        return found.num_evictions / self._num_steps if found else 0.0

    @property
    def num_recomputations(self) -> float:
        """The mean number of operators that ran again in a step."""
        found = self._statistics
        return found.num_recomputations / self._num_steps if found else 0.0

    def _step(self, index: int) -> None:
        model: Any = self._session.model
        # More than one step, if Keras takes several at a time.
        batch = itertools.repeat(self._data[index])
        state = self._session.state
        with capture.unchanged(state, model.metrics), self._installed():
            try:
                with memory.track() as usage:
                    seconds = timed(model.train_function, batch)
            except tf.errors.ResourceExhaustedError as error:
                self.error = error.message
        if self.error:
            # What the error's frames held.
            gc.collect()
            return
        seconds /= model.steps_per_execution
        self._quickest[index] = min(self._quickest[index], seconds)
        self.peaks[index] = max(self.peaks[index], usage.peak_bytes)
        self._num_steps += model.steps_per_execution
        self._statistics = None if self._plainly else dtr.statistics()

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
