"""A model's training under memory options: put on, and taken off again.

Options act only while the Python of a training step runs: when it is traced,
or at every step in eager mode. Between steps, in callbacks and after `fit`,
however it ends, the model is a plain Keras model; all that has to be taken
off are the functions that were traced. They are kept for the next `fit` with
the same options, as long as the model is. A callback is not told when another
one raises, or when training is interrupted between two steps: there a function
takes off, by itself, what put it on, at the latest when the model trains again.
"""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.fit import mechanisms
from kmem.fit import requirements
from kmem.fit.undoing import Changes
from kmem.fit.undoing import Undoing
from kmem.fit.undoing import variables_at_once
from kmem.graph import ordering
from kmem.graph import releasing
from kmem.keras_graph.recording import Recording
from kmem.options import MemoryOptions
from kmem.planning.plan import Plan
from kmem.sharding.training import ShardedTraining
from kmem.step import batches
from kmem.step import updates
from kmem.step.capture import has_default_step
from kmem.step.capture import scales_later
from kmem.step.parts import Alone

_KINDS = ("train", "test", "predict")
_SESSIONS = "_kmem_sessions"
_MAX_SESSIONS = 8
_UNCOMPILED = (
    "Training steps run without XLA, which Keras's default would use here: "
    "`dtr` and `sharding` exclude it. Call `model.compile(jit_compile=False)` "
    "if this is what you want."
)


class Session:
    """Runs a model's steps under options.

    Args:
        model: A compiled `keras.Model`.
        plan: What `options.remat` recomputes.
        recording: What the plan was made from, if that was just now.
        ordered: Whether a step runs its operations in one order, and so
            needs the same memory each time.

    Attributes:
        planned: For the planner: what was asked for, the plan, and the bytes
            that were in memory when it was made.
        is_traced: Whether a step was taken, or traced.

    Raises:
        ValueError: If the model is not compiled, or an option cannot work
            with it.
    """

    planned: tuple[tuple, Plan, int] | None = None

    def __init__(
        self,
        model: keras.Model,
        options: MemoryOptions,
        plan: Plan | None = None,
        recording: Recording | None = None,
        ordered: bool = True,
    ):
        requirements.check(model, options)
        self.model = model
        self.options = options
        self._compiled = compiled_state(model)
        self._is_users = self.is_traced = False
        self._ordered = ordered
        self._steps = {k: getattr(model, f"{k}_step") for k in _KINDS}
        self._made: dict[str, Callable] = {}
        # What a graph knows of its batches, and takes a step with one.
        self._of_batch: tuple[str, Callable] | None = None
        # By name: what is on the model, and what was there before.
        self._installed: dict[str, tuple[Callable, Any]] = {}
        self._kept = contextlib.ExitStack()
        self._put_together(plan, recording)

    def _put_together(
        self, plan: Plan | None, recording: Recording | None
    ) -> None:
        """Makes the mechanisms, the outermost first."""
        model, options, optimizer = self.model, self.options, None
        mixed = evicting = sharded = self._undoing = None
        train_step = model.train_step
        if options.mixed_precision is not None:
            mixed = mechanisms.Mixed(model, options.mixed_precision)
            optimizer = mixed.optimizer
        optimizer = optimizer or model.optimizer
        self.changes = Changes(model, optimizer, options.dtr is not None)
        if plan is not None:
            train_step = mechanisms.planned(model, options, plan, recording)
        processes = Alone()
        if options.sharding is not None:
            sharded = ShardedTraining(
                model, optimizer, options.sharding, options.num_batches
            )
            processes = sharded.slices
        # A plan counts on the order that a gradient of its own is given, and
        # shards of all gradients would be a large part of what a step needs.
        early = sharded is not None or (
            plan is not None and updates.are_early(model, options)
        )
        if (
            (plan is not None and has_default_step(model))
            or options.microbatches is not None
            or options.gradient_accumulation_steps is not None
            or optimizer is not model.optimizer
            or sharded is not None
        ):
            self.step: mechanisms.WholeStep = mechanisms.SplitStep(
                *(model, train_step, optimizer, options, processes),
                ordered=plan is not None,
                early=early,
            )
        else:
            self.step = mechanisms.WholeStep(train_step)
        if options.dtr is not None:
            evicting = mechanisms.Evicting(
                *(model, options.dtr, self.changes),
                # A layer that gathers its weights is not one operator.
                compiles=sharded is None,
                repeats=not isinstance(self.step, mechanisms.SplitStep),
            )
        # Where several processes train, one that fails ends all of them.
        replicas = model.distribute_strategy.num_replicas_in_sync
        if processes.num_processes == replicas == 1:
            self._undoing = Undoing(model, self.changes)
        chunked = mechanisms.in_chunks(model, options)
        together = evicting, mixed, sharded, *chunked, self.step, self._undoing
        self._mechanisms = [each for each in together if each is not None]

    @classmethod
    def earlier(cls, model: Any) -> list["Session"]:
        """Those of earlier `fit`s that may be used again."""
        sessions, now = vars(model).get(_SESSIONS, {}), compiled_state(model)
        return [each for each in sessions.values() if each._compiled == now]

    @classmethod
    def of(
        cls,
        model: keras.Model,
        options: MemoryOptions,
        plan: Plan | None = None,
        made: "Session | None" = None,
    ) -> "Session":
        """The model's session under these options, in which a user trains:
        from an earlier `fit` if the model was not compiled again since.

        Args:
            made: One of them, if it was made just now.
        """
        sessions = vars(model).get(_SESSIONS, {})
        # What a plan predicts differs with what else is in memory.
        key = options, plan and (plan.segments, plan.batch)
        session = sessions.pop(key, None)
        if session is None or session._compiled != compiled_state(model):
            session = made or cls(model, options, plan)
        others = list(sessions.items())[1 - _MAX_SESSIONS :]
        object.__setattr__(model, _SESSIONS, dict([*others, (key, session)]))
        session._give_to_user()
        return session

    def _give_to_user(self) -> None:
        """From now on a step that fails is undone, and layers that see parts
        of batches are named."""
        if self._is_users:
            return
        self._is_users = True
        if self.model.jit_compile and not self.options.allows_xla:
            warnings.warn(_UNCOMPILED, stacklevel=2)
        if self._undoing is not None:
            self._undoing.is_on = True
        if self.is_traced:
            self.warn()

    def warn(self, of_parts: bool = True) -> None:
        """Says what a user should know, if asked also of parts of batches."""
        for each in self._mechanisms:
            if of_parts or each is not self.step:
                each.warn()

    def install(self, test_step: bool = True, guard: bool = False) -> None:
        """Gives the model functions that train, and test, under the options.

        Args:
            test_step: Whether validation runs in mixed precision as well.
            guard: Whether a function takes the session off by itself, when
                it raises or is called in a later `fit`.
        """
        for each in self._mechanisms:
            each.start()
        self._make_functions()
        if test_step:
            self._kept.enter_context(patching.kept(self.model))
        # Others were traced with weights that are in shards now.
        every = test_step or any(m.between_steps for m in self._mechanisms)
        for name, function in self._made.items():
            if name == "train_function" or every:
                if guard:
                    function = patching.guarded(self, name, function)
                plain = getattr(self.model, name)
                self._installed[name] = function, plain
                setattr(self.model, name, function)

    def remove(self, failed: bool = False) -> None:
        """Gives the model its own functions back. May be called twice.

        Args:
            failed: Whether an error ended the training. Shards are left then
                if there are other processes, which may be gone.
        """
        left = any(each.stays(failed) for each in self._mechanisms)
        for name, (function, plain) in self._installed.items():
            # `compile` may have taken ours off already.
            if getattr(self.model, name) is function:
                # It was traced with weights that are still in shards.
                setattr(self.model, name, None if left else plain)
        self._installed = {}
        self._kept.close()
        for each in reversed(self._mechanisms):
            each.stop(failed)

    def trains(self) -> bool:
        """Whether this session's function is on the model."""
        function, _ = self._installed.get("train_function", (None, None))
        return function is not None and self.model.train_function is function

    @property
    def is_traceable(self) -> bool:
        """Whether a training step can be a part of a graph."""
        is_eager = any(each.runs_eagerly for each in self._mechanisms)
        return not (is_eager or self.model.run_eagerly)

    def on_batch(self, spec: Any = None) -> Callable:
        """Returns a train function of one batch instead of an iterator.

        Args:
            spec: What an iterator's graph would know of its batches, as
                `tf.TensorSpec`s. Keras weighs some logs by the number of rows
                if the graph knows it.
        """
        if self._of_batch is not None:
            known, take = self._of_batch
            if known == repr(spec):
                return take
            # What is traced for batches of any size rounds otherwise.
            self.trace_again()
        self._make_functions()
        function = self._made["train_function"]

        def take(data):
            return function(iter([data]))

        if spec is not None and self.is_traceable:
            take = self._traced(take, batches.without_absent(spec))
        self._of_batch = repr(spec), take
        return take

    def _traced(self, take: Callable, spec: Any) -> Callable:
        of_leaves = batches.of_leaves(take, spec)
        function = releasing.function(
            lambda leaves: of_leaves(*leaves),
            input_signature=[batches.leaves(spec)],
        )
        for each in self._mechanisms:
            function = each.wrapped(function)
        return lambda data: function(batches.leaves(data))

    @property
    def test_step(self) -> Callable:
        """Takes a step of validation, with a batch."""
        concerned = any("test" in each.kinds for each in self._mechanisms)
        evaluate = functools.partial(self._evaluate, "test")
        return evaluate if concerned else self._steps["test"]

    def trace_again(self) -> None:
        """Has `on_batch` make other functions than before."""
        self._made, self._of_batch = {}, None
        # What was traced would count in a step of them.
        gc.collect()

    def layers_that_differ(self, spec: Any) -> list[keras.layers.Layer]:
        """As in `GradientStep`, of a batch as `tf.TensorSpec`s."""
        step: Any = self.step
        with self._computing(training=True):
            return step.layers_that_differ(spec)

    def end_group(self) -> None:
        """Applies the last, incomplete group of batches."""
        with patching.together(each.updating() for each in self._mechanisms):
            self.step.end_group()

    def _make_functions(self) -> None:
        """Lets Keras make the model's functions, once."""
        model, mechanisms = self.model, self._mechanisms
        if self._made:
            return
        functions = {}
        names = [f"{kind}_function" for kind in _KINDS]
        was_eager = model.run_eagerly
        # Keras's methods go by some of these and set the others.
        with patching.together(
            patching.member(model, name, getattr(model, name))
            for name in (*names, "jit_compile", "run_eagerly")
        ):
            if not (self.options.allows_xla and self.step.allows_xla):
                model.jit_compile = False
            for kind, name in zip(_KINDS, names, strict=True):
                concerned = [each for each in mechanisms if kind in each.kinds]
                if not concerned:
                    continue
                model.run_eagerly = was_eager or any(
                    each.runs_eagerly for each in concerned
                )
                evaluate = functools.partial(self._evaluate, kind)
                step = self._train if kind == "train" else evaluate
                with patching.attribute(model, f"{kind}_step", step):
                    patching.maker(model, f"make_{name}")(force=True)
                function = getattr(model, name)
                if kind == "train":
                    function = patching.taking(self, function)
                for each in concerned:
                    function = each.wrapped(function)
                functions[name] = function
        self._made = functions

    def _train(self, data):
        take: Callable = self._take_step
        for each in reversed(self._mechanisms):
            take = functools.partial(each.take, take)
        made: Any = contextlib.nullcontext()
        if not scales_later(self.model):
            made = variables_at_once()
        with made:
            # `train_on_batch` in eager mode hands NumPy arrays to the step.
            logs = take(keras.tree.map_structure(batches.as_tensor, data))
        releasing.forget_gradients()
        self.changes.look()
        if self._is_users:
            self.warn(of_parts=not self.is_traced)
        self.is_traced = True
        return keras.tree.map_structure(_as_value, logs)

    def _take_step(self, data):
        with self._computing(training=True):
            computed = self.step.compute(data)
        with patching.together(each.updating() for each in self._mechanisms):
            logs = self.step.update(computed)
        if self._ordered:
            ordering.keep_order()
        return logs

    def _evaluate(self, kind: str, data):
        with self._computing(training=False):
            results = self._steps[kind](data)
        if self._is_users:
            self.warn(of_parts=False)
        return results

    def _computing(self, training: bool) -> patching.Context:
        return patching.together(
            each.computing(training) for each in self._mechanisms
        )


def compiled_state(model) -> tuple:
    """What a traced step depends on, compared by identity: `compile` makes a
    new tracker of the loss."""
    return (
        model.optimizer,
        private_keras.loss_tracker(model),
        model.jit_compile,
        model.run_eagerly,
        model.steps_per_execution,
        model.train_step,
    )


def _as_value(leaf):
    """A metric's result may be its variable, which is read by then in a graph
    and which an eager step of Keras cannot hand on."""
    return tf.identity(leaf) if isinstance(leaf, tf.Variable) else leaf
