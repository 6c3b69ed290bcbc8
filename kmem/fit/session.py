"""A model's training under memory options: put on, and taken off again.

Options act only while the Python of a training step runs: when it is traced,
or at every step in eager mode. Between steps, in callbacks and after `fit`,
however it ends, the model is a plain Keras model; all that has to be taken
off are the functions that were traced. They are kept for the next `fit` with
the same options, as long as the model is.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem import precision
from kmem.base import private_keras
from kmem.dtr.blocks import Blocks
from kmem.dtr.device import DeviceSession
from kmem.dtr.feasible import with_least_threshold
from kmem.fit import pipeline
from kmem.fit import requirements
from kmem.fit.guarding import guarded
from kmem.graph import ordering
from kmem.graph import releasing
from kmem.keras_graph import applying
from kmem.keras_graph import matching
from kmem.keras_graph import profiling
from kmem.keras_graph.recording import Frame
from kmem.options import MemoryOptions
from kmem.planning.plan import Plan
from kmem.sharding.training import ShardedTraining
from kmem.sharding.training import stored
from kmem.step import batches
from kmem.step import capture
from kmem.step import microbatch
from kmem.step import patching
from kmem.step import updates
from kmem.step.accumulation import Updater
from kmem.step.accumulation import build_optimizer
from kmem.step.microbatch import GradientStep
from kmem.step.processes import Alone

_FUNCTIONS = ("train_function", "test_function", "predict_function")
_SESSIONS = "_kmem_sessions"
_MAX_SESSIONS = 8
_NOTHING = contextlib.nullcontext()


class Session:
    """Runs a model's steps under options.

    Args:
        model: A compiled `keras.Model`.
        options: `MemoryOptions` with at least one option on.
        plan: What `options.remat` recomputes.

    Raises:
        ValueError: If the model is not compiled, or an option cannot work
            with it.
    """

    def __init__(
        self,
        model: keras.Model,
        options: MemoryOptions,
        plan: Plan | None = None,
    ):
        requirements.check(model, options)
        self.model = model
        self.options = options
        self._user_train_step = model.train_step
        self._user_test_step = model.test_step
        self._user_predict_step = model.predict_step
        self._plain_functions: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        optimizer: Any = model.optimizer
        if options.mixed_precision is not None:
            optimizer = precision.loss_scaled(model, options.mixed_precision)
        # A plan counts on the order that a captured gradient is given.
        self._plan = plan
        self._frame = planned_frame(model, options, plan) if plan else None
        self._dtr = DeviceSession(options.dtr) if options.dtr else None
        # A layer that gathers its weights is not one operator.
        self._blocks = None
        if options.dtr is not None and options.sharding is None:
            self._blocks = Blocks(model, options.dtr.compile)
        self._captures = (
            (self._plan is not None and capture.has_default_step(model))
            or options.microbatches is not None
            or options.gradient_accumulation_steps is not None
            or optimizer is not model.optimizer
            or options.sharding is not None
        )
        self._optimizer = optimizer
        steps = options.gradient_accumulation_steps
        self._num_batches = steps.steps if steps else 1
        self._compiled = compiled_state(model)
        strategy = model.distribute_strategy
        self._sharded = None
        if options.sharding is not None:
            self._sharded = ShardedTraining(
                model, optimizer, options.sharding, self._num_batches
            )
        processes = self._sharded.slices if self._sharded else Alone()
        # Shards of all gradients would be a large part of what a step needs.
        early = self._plan is not None and updates.are_early(model, options)
        # Of both, a step may fail between two of its updates.
        self._undoes = early or self._dtr is not None
        early = early or self._sharded is not None
        self._updater = Updater(
            optimizer, self._num_batches, strategy, processes, early
        )
        # Whether it is yet to say which layers see parts of batches.
        self._warns = False
        self.gradient_step = GradientStep(
            model,
            self._user_train_step,
            optimizer,
            num_parts=options.num_parts,
            by_group=self._num_batches > 1 or strategy.num_replicas_in_sync > 1,
            ordered=self._plan is not None,
            processes=processes,
        )
        self._gradient: Callable = self.gradient_step

    @classmethod
    def of(
        cls,
        model: keras.Model,
        options: MemoryOptions,
        plan: Plan | None = None,
    ) -> "Session":
        """The model's session under these options, from an earlier `fit` if
        the model was not compiled again since."""
        sessions = vars(model).get(_SESSIONS, {})
        key = options, plan
        session = sessions.pop(key, None)
        if session is None or session._compiled != compiled_state(model):
            session = cls(model, options, plan)
            session._warns = True
        kept = list(sessions.items())[1 - _MAX_SESSIONS :]
        object.__setattr__(model, _SESSIONS, dict([*kept, (key, session)]))
        return session

    def install(
        self, test_step: bool = True, guard: bool = False, undo: bool = True
    ) -> None:
        """Gives the model functions that train, and test, under the options.

        Args:
            test_step: Whether validation runs in mixed precision as well.
            guard: Whether a function takes the session off by itself, when
                it raises or is called in a later `fit`.
            undo: Whether a step is undone that may fail between its updates.
        """
        if self._sharded is not None:
            self._sharded.start()
        self._updater.start()
        precision.recall_scale(self._optimizer)
        model = self.model
        if not self._made:
            self._make_functions()
        # Others were traced with weights that are in shards now.
        every = test_step or self._sharded is not None
        names = [n for n in self._made if n == "train_function" or every]
        for name in names:
            function = self._made[name]
            if name == "train_function" and undo and self._undoes:
                if self._is_built():
                    self.build()
                function = updates.undone_if_failed(
                    function, model, lambda: self.state
                )
            if guard:
                function = guarded(self, name, function)
            self._plain_functions[name] = getattr(model, name)
            self._functions[name] = function
            setattr(model, name, function)

    def _make_functions(self) -> None:
        model = self.model
        jit_compile, run_eagerly = model.jit_compile, model.run_eagerly
        # Only the gradient is compiled when updates are rarer than batches:
        # a branch inside XLA copies all that it may assign.
        separately = self._num_batches > 1 and jit_compile
        if separately and not model.run_eagerly:
            self._gradient = microbatch.compiled(self.gradient_step)
        plain = {name: getattr(model, name) for name in _FUNCTIONS}
        try:
            if separately or self._sharded is not None:
                model.jit_compile = False
            if self._dtr is not None:
                model.run_eagerly = True
            self._make_function("train", self._run_train_step)
            model.run_eagerly = run_eagerly
            # Both read weights, in a dtype or from shards.
            if self.options.mixed_precision or self._sharded is not None:
                self._make_function("test", self._run_test_step)
            if self._sharded is not None:
                self._make_function("predict", self._run_predict_step)
        finally:
            model.jit_compile = jit_compile
            model.run_eagerly = run_eagerly
            for name, function in plain.items():
                setattr(model, name, function)

    def _make_function(self, kind: str, step: Callable) -> None:
        model, name = self.model, f"{kind}_function"
        with patching.attribute(model, f"{kind}_step", step):
            getattr(model, f"make_{name}")(force=True)
        new = getattr(model, name)
        self._made[name] = self._sharded.watched(new) if self._sharded else new

    def on_batch(self, spec: Any = None) -> Callable:
        """Returns a train function of one batch instead of an iterator.

        Args:
            spec: What an iterator's graph would know of its batches, as
                `tf.TensorSpec`s. Keras weighs some logs by the number of rows
                if the graph knows it.
        """
        if not self._made:
            self._make_functions()
        function = self._made["train_function"]

        def run(data):
            return function(iter([data]))

        runs_eagerly = self.model.run_eagerly or self._dtr is not None
        if spec is None or runs_eagerly or self._sharded is not None:
            return run
        return releasing.function(run, input_signature=[spec])

    def trains(self) -> bool:
        """Whether this session's function is on the model."""
        function = self._functions.get("train_function")
        return function is not None and self.model.train_function is function

    def remove(self, failed: bool = False) -> None:
        """Gives the model its own functions back. May be called twice.

        Args:
            failed: Whether an error ended the training. Shards are left then
                if there are other processes, which may be gone.
        """
        left = self._sharded is not None and self._sharded.is_left(failed)
        for name, function in self._functions.items():
            # `compile` may have taken ours off already.
            if getattr(self.model, name) is function:
                plain = self._plain_functions[name]
                # It was traced with weights that are still in shards.
                setattr(self.model, name, None if left else plain)
        self._functions = {}
        self._updater.stop()
        precision.remember_scale(self._optimizer)
        if self._sharded is not None:
            self._sharded.stop(failed)

    @property
    def state(self) -> list:
        """The variables that a step may change."""
        return stored(capture.variables(self.model, self._optimizer))

    def build(self, batch=None) -> None:
        """Makes the variables that the first step would make.

        Args:
            batch: What the step gets, as `tf.TensorSpec`s. It is traced for
                the optimizers that a `train_step` has besides the model's.
        """
        strategy = self.model.distribute_strategy
        with strategy.scope():
            build_optimizer(self._optimizer, self.model.trainable_variables)
        others = capture.optimizers(self.model)
        if batch is not None and not all(each.built for each in others):
            step = self._user_train_step
            releasing.function(
                lambda data: strategy.run(step, args=(data,))
            ).get_concrete_function(batch)

    def _is_built(self) -> bool:
        return all(layer.built for layer in capture.all_layers(self.model))

    def end_group(self) -> None:
        """Applies the last, incomplete group of batches."""
        with self._updating():
            self._updater.flush()

    def _run_train_step(self, data):
        data = keras.tree.map_structure(_as_tensor, data)
        try:
            logs = self._take_step(data)
            releasing.forget_gradients()
            if self._warns:
                self._warns = False
                self.gradient_step.warn_of_parts()
            return logs
        except tf.errors.ResourceExhaustedError as error:
            failed, message = self._dtr, error.message
            # Variables that a step makes could not be given back.
            if failed is None or self._captures or not self._is_built():
                raise
        self.build()
        step = functools.partial(self._rehearse, data, failed)
        ready = pipeline.ready_bytes(data)
        raise with_least_threshold(failed.limit_bytes, message, step, ready)

    def _rehearse(self, data, failed: DeviceSession, threshold: int) -> int:
        device = failed.again()
        unchanged = capture.unchanged(self.state, self.model.metrics)
        with unchanged, patching.attribute(self, "_dtr", device):
            self._take_step(data, grows_from=threshold)
        return device.limit_bytes

    def _take_step(self, data, grows_from: int | None = None):
        with self._device(grows_from):
            with self._precision(), self._forward(training=True), self._remat():
                if not self._captures:
                    return ordering.one_by_one(self._user_train_step, data)
                batch = self._gradient(data)
            with self._updating():
                self._updater.add(batch)
        return batch.logs

    def _run_test_step(self, data):
        with self._precision(), self._forward(training=False):
            return self._user_test_step(data)

    def _run_predict_step(self, data):
        with self._precision(), self._forward(training=False):
            return self._user_predict_step(data)

    def _forward(self, training: bool):
        return self._sharded.forward(training) if self._sharded else _NOTHING

    def _updating(self):
        return self._sharded.updating() if self._sharded else _NOTHING

    def _precision(self):
        return option_precision(self.model, self.options)

    @contextlib.contextmanager
    def _device(self, grows_from: int | None):
        device = self._dtr.scope(grows_from) if self._dtr else _NOTHING
        blocks = self._blocks.compiled() if self._blocks else _NOTHING
        with device, blocks:
            yield

    def _remat(self):
        if self._plan is None or self._frame is None:
            return _NOTHING
        return applying.applied(self.model, self._frame, self._plan.segments)


def compiled_state(model) -> tuple:
    """What a traced step depends on, compared by identity.

    `compile` makes a new tracker of the loss.
    """
    return (
        model.optimizer,
        private_keras.loss_tracker(model),
        model.jit_compile,
        model.run_eagerly,
        model.steps_per_execution,
        model.train_step,
    )


def planned_frame(model, options: MemoryOptions, plan: Plan) -> Frame:
    """Where a plan lies in the model, which computes as `options` say.

    Raises:
        ValueError: If it is a plan for another model.
    """
    with option_precision(model, options):
        recording = profiling.record_batch(model, batches.from_json(plan.batch))
    matching.check(plan.network, recording)
    return recording.frame


def option_precision(model, options: MemoryOptions):
    """The context in which a model computes in what `options` say."""
    mixed = options.mixed_precision
    return precision.applied(model, mixed) if mixed else _NOTHING


def _as_tensor(leaf):
    """`train_on_batch` in eager mode hands NumPy arrays to the step."""
    if leaf is None or tf.is_tensor(leaf):
        return leaf
    return tf.convert_to_tensor(leaf)
