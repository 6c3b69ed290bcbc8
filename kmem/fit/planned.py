"""`remat`: what a plan does not keep of the forward pass runs again."""

import contextlib

import keras

from kmem import precision
from kmem.keras_graph import applying
from kmem.keras_graph import matching
from kmem.keras_graph import profiling
from kmem.options import MemoryOptions
from kmem.planning.plan import Plan
from kmem.step import batches
from kmem.step.mechanism import Context
from kmem.step.mechanism import Mechanism


class Planned(Mechanism):
    """Changes how a training step calls the layers of a plan's segments.

    Raises:
        ValueError: If it is a plan for another model.
    """

    def __init__(self, model: keras.Model, options: MemoryOptions, plan: Plan):
        self._model = model
        self._segments = plan.segments
        batch = batches.from_json(plan.batch)
        with precision.applied(model, options.mixed_precision):
            recording = profiling.record_batch(model, batch)
        matching.check(plan.network, recording)
        self._frame = recording.frame

    def computing(self, training: bool) -> Context:
        if not training:
            return contextlib.nullcontext()
        return applying.applied(self._model, self._frame, self._segments)
