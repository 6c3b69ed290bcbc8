"""The mechanisms of a session, one for each option.

A step is taken by the model as a whole, or in two: so do `microbatches`,
`gradient_accumulation_steps` and options that have to be between a gradient
and its update. `planned`, `Mixed` and `Evicting` change what is computed
within. Not here: sharding (`kmem/sharding/training`) and the undo of a step.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem import precision
from kmem.attention.chunked_attention import ChunkedAttention
from kmem.attention.chunked_attention import draws_nothing
from kmem.base import patching
from kmem.base import private_tf
from kmem.base.bindings import AUTO
from kmem.base.patching import Context
from kmem.dtr.blocks import Blocks
from kmem.dtr.device import DeviceSession
from kmem.dtr.feasible import with_least_threshold
from kmem.fit import pipeline
from kmem.fit.undoing import Changes
from kmem.graph import control
from kmem.graph import ordering
from kmem.graph import releasing
from kmem.keras_graph import applying
from kmem.keras_graph import profiling
from kmem.keras_graph.recording import Recording
from kmem.losses import chunked_loss
from kmem.losses import heads
from kmem.options import DTR
from kmem.options import MemoryOptions
from kmem.options import MixedPrecision
from kmem.planning.plan import Plan
from kmem.step import batches
from kmem.step import microbatch
from kmem.step.accumulation import Updater
from kmem.step.capture import has_default_step
from kmem.step.mechanism import Mechanism
from kmem.step.parts import Alone


class WholeStep(Mechanism):
    """The model's own step, which computes a gradient and applies it."""

    # Whether XLA may compile it as a whole.
    allows_xla = True
    layers_that_see_parts: list[keras.layers.Layer] = []

    def __init__(self, train_step: Callable):
        self._train_step = train_step

    def compute(self, data):
        """Computes what `update` takes."""
        return ordering.one_by_one(self._train_step, data)

    def update(self, computed):
        """Applies it, and returns the logs."""
        return computed

    def end_group(self) -> None:
        """Applies the last, incomplete group of batches."""

    def unfinished(self) -> list | None:
        """What a group of batches has come to, for `go_on` of another step
        with other options."""

    def go_on(self, group: list) -> None:
        """Goes on with a group of batches that another step has begun."""


class SplitStep(WholeStep):
    """The gradient of a batch, then one update of one or several batches."""

    def __init__(
        self,
        model: keras.Model,
        train_step: Callable,
        optimizer,
        options: MemoryOptions,
        processes: Alone,
        ordered: bool,
        early: bool,
    ):
        super().__init__(train_step)
        strategy, steps = model.distribute_strategy, options.num_batches
        self._updater = Updater(optimizer, steps, strategy, processes, early)
        self._gradient = microbatch.GradientStep(
            *(model, train_step, optimizer),
            num_parts=options.num_parts,
            by_group=steps > 1 or strategy.num_replicas_in_sync > 1,
            # Each gradient is added up as soon as it is there.
            ordered=ordered or steps > 1,
            processes=processes,
        )
        self._compute = self._gradient
        # Only the gradient is compiled when updates are rarer than batches:
        # a branch inside XLA copies all that it may assign.
        self.allows_xla = steps == 1
        compiled = profiling.mode(model, options) == "xla"
        if compiled:
            control.prefer_little_memory()
        if compiled and not self.allows_xla:
            alone = strategy.num_replicas_in_sync == 1
            collect = self._updater.collect if alone else lambda batch: None
            self._compute = _compiled(self._gradient, collect)
        self.layers_that_differ = self._gradient.layers_that_differ
        self.warn = self._gradient.warn_of_parts
        self.start = self._updater.start
        self.end_group = self._updater.flush
        self.unfinished = self._updater.unfinished
        self.go_on = self._updater.go_on

    @property
    def layers_that_see_parts(self) -> list[keras.layers.Layer]:
        return self._gradient.layers_that_see_parts

    def stop(self, failed: bool = False) -> None:
        self._updater.stop()

    def compute(self, data) -> microbatch.BatchGradient:
        return self._compute(data)

    def update(self, computed: microbatch.BatchGradient):
        self._updater.add(computed)
        return computed.logs


def _compiled(
    gradient_step: microbatch.GradientStep,
    collect: Callable[[microbatch.BatchGradient], None],
) -> Callable:
    """The same step, its computation compiled by XLA.

    Args:
        collect: May add up the gradients there, and use them up.
    """
    batch: Any = None

    @functools.partial(releasing.function, jit_compile=True)
    def tensors(data):
        nonlocal batch
        batch = gradient_step(data)
        collect(batch)
        return batch.gradients, batch.denominators, batch.logs

    def run(data) -> microbatch.BatchGradient:
        gradients, denominators, logs = tensors(data)
        return microbatch.BatchGradient(
            gradients, denominators, batch.variables, logs
        )

    return run


def in_chunks(model: keras.Model, options: MemoryOptions) -> list[Mechanism]:
    """What computes in chunks, if the options ask for it."""
    asked = {
        chunked_loss.ChunkedLoss: options.chunked_loss,
        ChunkedAttention: options.chunked_attention,
    }
    return [mechanism(model) for mechanism in asked if asked[mechanism]]


def with_chunks(
    model: keras.Model, options: MemoryOptions, batch: Any
) -> MemoryOptions:
    """The options, and in chunks what changes by rounding alone then."""
    loss = options.chunked_loss or _has_more_logits(model)
    attention = options.chunked_attention or _attends(model, options, batch)
    return dataclasses.replace(
        options, chunked_loss=loss or None, chunked_attention=attention or None
    )


def _attends(model: keras.Model, options: MemoryOptions, batch: Any) -> bool:
    """Whether chunks change attention, by rounding alone."""
    if not draws_nothing(model):
        return False
    attention = ChunkedAttention(model)
    with contextlib.suppress(ValueError), as_in_a_step(model, options):
        with attention.computing(True):
            profiling.record_batch(model, batch)
    return attention.has_effect


def _has_more_logits(model: keras.Model) -> bool:
    """Whether the loss can be computed in chunks, and its logits are more
    numbers than the hidden states that they are made of."""
    # Those of a model's own may look at its predictions.
    if not has_default_step(model, "test_step", "compute_loss"):
        return False
    try:
        chunked_loss.check(model)
    except ValueError:
        return False
    head = heads.of(model)
    return head.num_classes > head.num_features


def as_in_a_step(model: keras.Model, options: MemoryOptions) -> Context:
    """Within, a model computes what it does in a training step, kept or not,
    on one device or several."""
    mixed = precision.applied(model, options.mixed_precision)
    chunked = (each.computing(True) for each in in_chunks(model, options))
    return patching.together(itertools.chain([mixed], chunked))


def planned(
    model: keras.Model,
    options: MemoryOptions,
    plan: Plan,
    recording: Recording | None = None,
) -> Callable:
    """A model's `train_step`, in which layers are called as a plan says.

    Args:
        recording: What the plan was made from, if that was just now; else the
            model is recorded anew, and the plan has to be of it.
    """
    if recording is None:
        batch = batches.from_json(plan.batch)
        with as_in_a_step(model, options):
            recording = profiling.record_batch(model, batch)
        applying.check(plan.network, recording)
    frame, train_step = recording.frame, model.train_step

    def step(data):
        with applying.applied(model, frame, plan.segments):
            return train_step(data)

    return step


class Mixed(Mechanism):
    """Changes the layers' policies while they are called.

    Attributes:
        optimizer: The model's, or one around it that scales the loss.
    """

    kinds = ("train", "test")

    def __init__(self, model: keras.Model, option: MixedPrecision):
        self._model = model
        self._option = option
        self.optimizer = precision.loss_scaled(model, option)

    def start(self) -> None:
        precision.recall_scale(self.optimizer)

    def stop(self, failed: bool = False) -> None:
        precision.remember_scale(self.optimizer)

    def warn(self) -> None:
        precision.warn(self._model)

    def computing(self, training: bool) -> Context:
        return precision.applied(self._model, self._option)


class Evicting(Mechanism):
    """Changes where operators run, and compiles the calls of layers.

    Args:
        compiles: Whether calls of layers may be compiled.
        repeats: Whether a step that has failed can be tried again: all that
            it changes must be known.
    """

    runs_eagerly = True

    def __init__(
        self,
        model: keras.Model,
        option: DTR,
        changes: Changes,
        compiles: bool,
        repeats: bool,
    ):
        self._device = DeviceSession(option)
        self._has_threshold = bool(option.eviction_threshold)
        self._changes = changes
        self._repeats = repeats
        self._chooses = option.heuristic == AUTO
        self._blocks = Blocks(model, option.compile if compiles else None)

    def take(self, step: Callable, data):
        while True:
            heuristic = self._device.heuristic
            try:
                with private_tf.refusals(), self._on(self._device):
                    return step(data)
            except tf.errors.ResourceExhaustedError as error:
                message = error.message
                # Variables that a step makes could not be given back.
                if not (self._repeats and self._changes.layers_are_built):
                    raise
            # Under "auto", others are tried: each of them once.
            before = self._changes.before
            is_new = self._device.heuristic != heuristic
            if before is None or not (self._chooses and is_new):
                break
            gc.collect()
            before.restore()
        if not self._has_threshold:
            raise tf.errors.ResourceExhaustedError(None, None, message)
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

    def _on(
        self, device: DeviceSession, grows_from: int | None = None
    ) -> Context:
        on_device = device.scope(grows_from)
        return patching.together((on_device, self._blocks.compiled()))
