"""Trains within a memory budget, and adapts when a step exceeds it.

Options are chosen for the first batch, and again for each that is larger in
some dimension than those before. What a step changes is kept in host memory
until it is done: a step that runs out of memory is undone and taken again,
with the same options first, for what took the memory may be gone, then with
some that are chosen for less. One that was done, and needed more than the
budget, makes the next ones use less.

Processes that train in shards choose together. These cannot undo a step, and
neither can replicas: one that runs out of memory ends them all. What this does
not do: choose (choosing.py), or undo what a step does outside of the model.
"""

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.base import patching
from kmem.base.sizes import format_size
from kmem.budget import choosing
from kmem.budget import report as reports
from kmem.budget import tuning
from kmem.budget.inference import BudgetedInference
from kmem.budget.inference import budget_bytes
from kmem.budget.inference_steps import attempt
from kmem.fit import pipeline
from kmem.fit import undoing
from kmem.fit.session import Session
from kmem.fit.session import compiled_state
from kmem.options import MemoryOptions
from kmem.sharding import agreeing
from kmem.step import batches

_SESSIONS = "_kmem_budgeted"


@dataclasses.dataclass
class Bucket:
    """How steps are taken with batches of some shapes, or smaller ones."""

    batch: Any
    session: Session
    report: reports.MemoryReport
    # Between the steps.
    expected_in_use_bytes: int
    # Whether nothing that needs less is known.
    is_least: bool = False
    num_steps: int = 0
    reader: undoing.Reader | None = None
    # Whether steps write summaries, as the search's do not.
    writes: bool = False

    def step(self, spec: Any) -> Callable:
        """Takes a step with a batch, of which `fit` knows this."""
        if not self.writes and tf.summary.should_record_summaries():
            self.writes = True
            self.session.trace_again()
        return self.session.on_batch(spec)

    def read_state(self) -> undoing.Reader:
        """Reads what a step changes; the first one may make variables."""
        self.reader = self.session.changes.reader(self.reader)
        return self.reader


class BudgetedSession:
    """Runs a model's steps within `options.memory_budget`.

    After the first choice, and after each adaptation, `model.memory_report`
    tells what is done.
    """

    def __init__(self, model: keras.Model, options: MemoryOptions):
        self.model: Any = model
        self._options = options
        self._group = agreeing.processes(options)
        strategy = self.model.distribute_strategy
        self._num_replicas = strategy.num_replicas_in_sync
        self._budget = budget_bytes(options)
        self._received = reports.received_budget(
            options.memory_budget, self._budget
        )
        self._verbose = 0
        # What steps were seen to need beyond what was predicted.
        self._less = 0
        # The batch of the step that is taken, as far as it is on the device.
        self._in_hand = 0
        self._in_fit = True
        self._spec: Any = None
        self._buckets: list[Bucket] = []
        self._group_begun: list | None = None
        self._bucket: Bucket | None = None
        self._events: list[str] = []
        self._has_warned = False
        # What was on the model, and what is, by name.
        self._plain: dict[str, Any] = {}
        self._functions: dict[str, Callable] = {}
        self._kept = contextlib.ExitStack()
        # By what does not depend on how many parts train.
        self._inferences: dict[MemoryOptions, BudgetedInference] = {}

    @classmethod
    def of(
        cls, model: keras.Model, options: MemoryOptions, verbose: int = 0
    ) -> "BudgetedSession":
        """The model's session under these options, from an earlier `fit` if
        the model was not compiled again since, nor the device's limit set."""
        key = options, budget_bytes(options), compiled_state(model)
        earlier = vars(model).get(_SESSIONS, {})
        session = earlier.get(key) or cls(model, options)
        session._verbose = verbose
        object.__setattr__(model, _SESSIONS, {key: session})
        return session

    def prepare(self, batch, spec, reserved_bytes: int, reused: bool):
        """Chooses for `fit`, before its input pipeline runs beside. The batch
        is all replicas', as `tf.TensorSpec`s; `spec`, what its graph knows;
        `reserved_bytes`, what the device will hold besides. The search's traces
        may be `reused`."""
        batch = batches.part_of(batch, self._num_replicas)
        if self._covering(batch) is None:
            self._spec = spec
            bucket = self._choose(batch, reserved_bytes)
            if not reused:
                bucket.session.trace_again()

    def prepare_validation(self, batch, examples, reserved_bytes: int) -> None:
        """The same for `fit`'s validation; see `BudgetedInference`."""
        if inference := self._inference(self._buckets[-1]):
            inference.prepare("test", batch, examples, reserved_bytes)

    def _inference(self, bucket: Bucket) -> BudgetedInference | None:
        """What evaluates as a bucket trains; nothing in shards or replicas."""
        session = bucket.session
        if session.options.sharding is not None or self._num_replicas > 1:
            return None
        key = dataclasses.replace(
            session.options, microbatches=None, remat=None
        )
        if key not in self._inferences:
            self._inferences[key] = BudgetedInference(
                *(self.model, self._options),
                {"test": session.test_step},
                self._event,
            )
        return self._inferences[key]

    def install(self, test_step: bool = True, guard: bool = False) -> None:
        """Gives the model a train function that stays within the budget.

        Args:
            test_step: Whether it is `fit` that trains: it validates as well,
                and an input pipeline runs beside.
            guard: Whether it takes itself off, when it raises or is called in
                a later `fit`.
        """
        model = self.model
        self._in_fit = test_step

        def train(iterator: Iterator):
            self._spec = getattr(iterator, "element_spec", None)
            # The data may end after the first one, as in Keras.
            rest = itertools.islice(iterator, model.steps_per_execution - 1)
            for batch in itertools.chain([next(iterator)], rest):
                logs = self._step(batch)
                self._tell_of_parts()
            return logs

        def test(iterator: Iterator):
            inference: Any = self._inference(self._bucket or self._buckets[-1])
            return inference.test(iterator)

        functions: dict[str, Callable] = {"train_function": train}
        if test_step:
            functions["test_function"] = test
        for name, function in functions.items():
            self._plain[name] = getattr(model, name)
            if guard:
                function = patching.guarded(self, name, function)
            self._functions[name] = function
        self._put_on()
        if test_step:
            self._kept.enter_context(patching.kept(model))
        if self._bucket is not None:
            self._enter(self._bucket)

    def _put_on(self) -> None:
        """Gives the model this session's functions."""
        # What evaluates is chosen with what trains, which may be at the first
        # batch. Weights that are in shards are gathered by another function.
        chosen = [self._bucket] if self._bucket else self._buckets[-1:]
        splits = any(map(self._inference, chosen))
        for name, function in self._functions.items():
            if name == "train_function" or splits:
                setattr(self.model, name, function)

    def trains(self) -> bool:
        """Whether this session's function is on the model."""
        function = self._functions.get("train_function")
        return function is not None and self.model.train_function is function

    def remove(self, failed: bool = False) -> None:
        """Gives the model its own functions back. May be called twice."""
        if self._bucket is not None:
            self._bucket.session.remove(failed)
        for name, function in self._functions.items():
            if getattr(self.model, name) is function:
                setattr(self.model, name, self._plain[name])
        self._functions = {}
        self._kept.close()

    def end_group(self) -> None:
        """Applies the last, incomplete group of batches."""
        if self._bucket is not None:
            self._bucket.session.end_group()

    def _step(self, batch):
        """Takes one step, in as many attempts as it needs."""
        share = batches.of_one_replica(self.model, batch)
        self._in_hand = pipeline.in_hand_bytes(share)
        specs = batches.specs_of(share)
        bucket = self._covering(specs) or self._choose_in_training(share)
        if bucket is not self._bucket:
            self._enter(bucket)
        if not bucket.report.is_measured:
            return bucket.step(self._spec)(batch)
        is_alone = self._group.size == 1
        can_undo = is_alone and self._num_replicas == 1
        message = ""
        for number in range(tuning.MAX_ATTEMPTS if can_undo else 1):
            if number > 1:
                own = self._budget - bucket.expected_in_use_bytes
                less = int(tuning.DOUBT * max(own, 0))
                bucket = self._with_less(bucket, less, message)
            state = can_undo and undoing.State(
                bucket.read_state(), self.model.metrics
            )
            with memory.track() as usage:
                logs, message = attempt(bucket.step(self._spec), batch)
            if not message:
                bucket.num_steps += 1
                # Processes have to ask each other.
                if is_alone or bucket.num_steps <= tuning.NUM_STEPS:
                    peak = agreeing.highest(self._group, usage.peak_bytes)
                    self._learn(bucket, peak)
                return logs
            if state:
                state.restore()
                option = reports.describe(bucket.session.options)
                told = f"A step ran out of memory ({option}) and was undone."
                self._event(told)
        reason = reports.NOTHING_LESS if can_undo else reports.NOT_UNDONE
        raise reports.exhausted(reason, message, self._received)

    def _covering(self, batch) -> Bucket | None:
        """What was chosen for such batches, or larger ones."""
        found = (x for x in self._buckets if batches.covers(x.batch, batch))
        return next(found, None)

    def _choose(self, batch, reserved_bytes: int) -> Bucket:
        # The device may have become smaller.
        room = min(self._budget, memory.capacity())
        with self._whole():
            session, report = choosing.choose(
                self.model,
                self._options,
                batch,
                -agreeing.highest(self._group, -room),
                reserved_bytes + self._less,
                self._verbose,
                self._spec if self._num_replicas == 1 else None,
            )
        # What was tried and not chosen would count in the first step.
        gc.collect()
        in_use = report.in_use_bytes + reserved_bytes
        bucket = Bucket(batch, session, report, in_use)
        self._buckets.append(bucket)
        self._show(bucket, budget_bytes=self._budget)
        if self._verbose:
            print(bucket.report.summary())
        return bucket

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Within, the model is not in the shards in which it trains, and has
        no sums of a group's gradients."""
        bucket = self._bucket if self.trains() else None
        if bucket is not None:
            self._leave()
        try:
            yield
        finally:
            if bucket is not None:
                self._enter(bucket)

    def _choose_in_training(self, batch) -> Bucket:
        # A pipeline has to make it ready again. A dry run makes one of its
        # own, beside that which is in memory by now.
        ready = pipeline.ready_bytes(batch) * self._in_fit
        specs = batches.specs_of(batch, examples=True)
        return self._choose(specs, ready - self._in_hand)

    def _with_less(self, bucket: Bucket, less: int, message: str) -> Bucket:
        """Chooses anew for a bucket, so many bytes below what it had.

        Raises:
            tf.errors.ResourceExhaustedError: If nothing needs less.
        """
        self._less += less
        try:
            smaller = self._choose_in_training(bucket.batch)
        except (ValueError, tf.errors.ResourceExhaustedError) as error:
            raise reports.exhausted(
                reports.NOTHING_LESS, message, self._received
            ) from error
        self._buckets.remove(bucket)
        if smaller.session.options.num_parts > 1:
            seen = bucket.report.layers_that_see_parts
            self._show(smaller, layers_that_see_parts=seen)
        self._enter(smaller)
        return smaller

    def _enter(self, bucket: Bucket) -> None:
        """Trains, and validates, as in a bucket from now on."""
        self._leave()
        self._bucket = bucket
        bucket.session.install(self._in_fit)
        if self._group_begun is not None:
            bucket.session.step.go_on(self._group_begun)
            self._group_begun = None
        self._put_on()
        self._show(bucket)

    def _leave(self) -> None:
        """Trains in no bucket; what a group of batches has come to is kept."""
        if self._bucket is None:
            return
        session, self._bucket = self._bucket.session, None
        self._group_begun = session.step.unfinished()
        session.remove()

    def _learn(self, bucket: Bucket, peak_bytes: int) -> None:
        """Takes note of what a step needed."""
        choice = bucket.report.chosen
        if peak_bytes > (choice.measured_peak_bytes or 0):
            choice = dataclasses.replace(choice, measured_peak_bytes=peak_bytes)
            self._show(bucket, chosen=choice)
        excess = peak_bytes - self._budget
        if excess <= 0 or bucket.is_least:
            return
        self._event(
            f"A step needed {format_size(peak_bytes)} ("
            f"{reports.describe(choice.options)}); the next ones take less."
        )
        # What others have taken meanwhile is seen when it is chosen anew.
        taken = memory.current() - bucket.expected_in_use_bytes
        less = max(0, excess - max(0, taken))
        try:
            self._with_less(bucket, agreeing.highest(self._group, less), "")
        except tf.errors.ResourceExhaustedError:
            bucket.is_least = True
            self._event("Nothing that needs less is known.")

    def _tell_of_parts(self) -> None:
        """After a step: says which layers see one micro-batch at a time."""
        bucket: Any = self._bucket
        session = bucket.session
        if bucket.num_steps <= 1:
            session.warn(of_parts=False)
        names = tuple(x.name for x in session.step.layers_that_see_parts)
        if names == bucket.report.layers_that_see_parts:
            return
        self._show(bucket, layers_that_see_parts=names)
        if not self._has_warned:
            self._has_warned = True
            session.step.warn()

    def _event(self, line: str) -> None:
        self._events.append(line)
        if self._bucket is not None:
            self._show(self._bucket)
        if self._verbose:
            print(line)

    def _show(self, bucket: Bucket, **changes: Any) -> None:
        """Changes what is told of a bucket, and tells of it."""
        bucket.report = dataclasses.replace(
            bucket.report, events=tuple(self._events), **changes
        )
        # Not `setattr`: Keras would track it.
        object.__setattr__(self.model, "memory_report", bucket.report)
