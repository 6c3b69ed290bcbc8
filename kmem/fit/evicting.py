"""`dtr`: a training step runs on DTR's device, operator by operator.

A step that runs out of memory there is tried on further devices that know no
program yet, to say in its error which threshold would do.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator

import keras
import tensorflow as tf

from kmem.dtr.blocks import Blocks
from kmem.dtr.device import DeviceSession
from kmem.dtr.feasible import with_least_threshold
from kmem.fit import pipeline
from kmem.fit.undoing import Changes
from kmem.options import DTR
from kmem.step.mechanism import Mechanism


class Evicting(Mechanism):
    """Changes where operators run, and compiles the calls of layers.

    Args:
        model: The model.
        option: The option.
        changes: What a step changes.
        compiles: Whether calls of layers may be compiled.
        repeats: Whether a step that has failed can be tried again: all that
            it changes must be known.
    """

    runs_eagerly = True
    is_traceable = False

    def __init__(
        self,
        model: keras.Model,
        option: DTR,
        changes: Changes,
        compiles: bool,
        repeats: bool,
    ):
        self._device = DeviceSession(option)
        self._changes = changes
        self._repeats = repeats
        self._blocks = Blocks(model, option.compile) if compiles else None

    def take(self, step: Callable, data):
        try:
            with self._on(self._device):
                return step(data)
        except tf.errors.ResourceExhaustedError as error:
            message = error.message
            # Variables that a step makes could not be given back.
            if not (self._repeats and self._changes.layers_are_built):
                raise
        self._changes.build()
        raise with_least_threshold(
            self._device.limit_bytes,
            message,
            functools.partial(self._try, step, data),
            pipeline.ready_bytes(data),
        )

    def _try(self, step: Callable, data, threshold: int) -> int:
        """What a threshold is raised to by a step that changes nothing."""
        device = self._device.again()
        with self._changes.undone(), self._on(device, threshold):
            step(data)
        return device.limit_bytes

    @contextlib.contextmanager
    def _on(
        self, device: DeviceSession, grows_from: int | None = None
    ) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(device.scope(grows_from))
            if self._blocks is not None:
                stack.enter_context(self._blocks.compiled())
            yield
