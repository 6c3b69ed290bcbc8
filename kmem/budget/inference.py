"""Evaluates and predicts within a memory budget.

A batch that does not fit comes in equal parts, as few as stay within the
budget, which changes no number: losses and metrics are those of the whole
batch (inference_steps.py), and outputs are put together again in host memory.
How many is computed: steps with few examples tell what more of them need, a
line, and what is chosen was measured. A step that runs out of memory all the
same is taken again in smaller parts.

Some models cannot be split, since what they compute of an example depends on
the others. Before the first batch that has to be, a few of its examples are
computed in both ways, and what differs is refused. What this does not do:
split the batches of models that are in shards.
"""

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.base import private_keras
from kmem.base.sizes import format_size
from kmem.budget import tuning
from kmem.budget.inference_steps import COMPARED
from kmem.budget.inference_steps import InferenceSteps
from kmem.budget.inference_steps import joined
from kmem.budget.inference_steps import some_rows
from kmem.budget.report import Choice
from kmem.budget.report import ImpossibleBudget
from kmem.budget.report import exhausted
from kmem.budget.report import received_budget
from kmem.budget.trial import with_count
from kmem.fit import pipeline
from kmem.fit import undoing
from kmem.options import MemoryOptions
from kmem.step import batches

_INFERENCES = "_kmem_inferences"
# The next step that is measured has at most so many times the examples.
_GROWTH = 8
_DOES = {"test": "evaluates", "predict": "predicts"}


@dataclasses.dataclass
class _Bucket:
    """In how many parts batches of some shapes, or smaller ones, come."""

    kind: str
    batch: Any
    count: int
    peak_bytes: int | None
    # Whether it cannot be split further.
    is_least: bool = False

    @property
    def size(self) -> int:
        """The examples of a part."""
        return -(-(batches.num_rows(self.batch) or 1) // self.count)


class BudgetedInference:
    """Runs a model's `test_step` and `predict_step` within a budget.

    Args:
        model: The model.
        options: Those with `memory_budget`.
        steps: By kind, what takes a step with a batch: `"test"`, `"predict"`.
        tell: Gets a line for each choice, and each time that one failed.
    """

    def __init__(
        self,
        model: keras.Model,
        options: MemoryOptions,
        steps: Mapping[str, Callable],
        tell: Callable[[str], None],
    ):
        self.model: Any = model
        self.tell = tell
        self._given: Any = options.memory_budget
        self._budget = budget_bytes(options)
        self._steps = InferenceSteps(model, steps)
        self._buckets: list[_Bucket] = []

    @classmethod
    def of(
        cls, model: Any, options: MemoryOptions, verbose: int = 0
    ) -> "BudgetedInference":
        """The model's under these options, from an earlier call if the model
        was not compiled again since, nor the device's limit set."""
        steps = {"test": model.test_step, "predict": model.predict_step}
        key = (
            *(options, budget_bytes(options), *steps.values()),
            *(model.run_eagerly, model.jit_compile),
            private_keras.loss_tracker(model) if model.compiled else None,
        )
        tell = print if verbose else lambda line: None
        earlier = vars(model).get(_INFERENCES, {})
        inference = earlier.get(key) or cls(model, options, steps, tell)
        inference.tell = tell
        object.__setattr__(model, _INFERENCES, {key: inference})
        return inference

    @contextlib.contextmanager
    def installed(self, kind: str) -> Iterator[None]:
        """Within, the model's function of a kind stays within the budget."""
        name = f"{kind}_function"
        plain = getattr(self.model, name)
        own = self.test if kind == "test" else self.predict
        setattr(self.model, name, own)
        try:
            with private_keras.outputs_in_host_memory():
                yield
        finally:
            if getattr(self.model, name) == own:
                setattr(self.model, name, plain)

    def test(self, iterator: Iterator) -> Any:
        """Keras's `test_function`."""
        # The data may end after the first one, as in Keras.
        rest = itertools.islice(iterator, self.model.steps_per_execution - 1)
        logs = None
        for batch in itertools.chain([next(iterator)], rest):
            logs = self._take("test", batch)
        return logs

    def predict(self, data: list) -> Any:
        """Keras's `predict_function`, whose outputs are NumPy arrays."""
        return joined([self._take("predict", batch) for batch in data])

    def prepare(
        self, kind: str, batch: Any, examples: Any, reserved_bytes: int
    ) -> None:
        """Chooses, before batches come.

        Args:
            kind: `"test"` or `"predict"`.
            batch: The largest, as `tf.TensorSpec`s.
            examples: Some, as tensors; or `None`.
            reserved_bytes: What the device will hold besides.

        Raises:
            ImpossibleBudget: If nothing fits.
            ValueError: If batches have to be split, and cannot be.
        """
        if self._covering(kind, batch) is None:
            self._choose(kind, batch, examples, reserved_bytes)
            # Callbacks may change what a trace has read.
            self._steps.trace_again()

    def _take(self, kind: str, batch: Any) -> Any:
        """Takes a step, in as many attempts as it needs."""
        batch = keras.tree.map_structure(_plain, batch)
        specs = batches.specs_of(batch)
        bucket = self._covering(kind, specs)
        if bucket is None:
            specs = batches.specs_of(batch, examples=True)
            reserved = pipeline.ready_bytes(specs)
            reserved -= pipeline.in_hand_bytes(batch)
            bucket = self._choose(kind, specs, batch, reserved)
        while True:
            metrics = [v for m in self.model.metrics for v in m.variables]
            state = undoing.State(metrics, self.model.metrics)
            with memory.track() as usage:
                results, message = self._steps.take(kind, batch, bucket.count)
            if not message:
                self._learn(bucket, usage.peak_bytes)
                return results
            state.restore()
            if bucket.size == 1:
                raise exhausted(
                    f"A step that {_DOES[kind]} ran out of memory, with one "
                    "example at a time as well.",
                    message,
                    received_budget(self._given, self._budget),
                )
            self._split(bucket, bucket.size // 2)
            self.tell(
                f"A step that {_DOES[kind]} ran out of memory, and is taken "
                f"again in {bucket.count} parts."
            )

    def _covering(self, kind: str, batch: Any) -> _Bucket | None:
        """What was chosen for such batches, or larger ones."""
        mine = (x for x in self._buckets if x.kind == kind)
        return next((x for x in mine if batches.covers(x.batch, batch)), None)

    def _learn(self, bucket: _Bucket, peak_bytes: int) -> None:
        """Takes note of what a step needed."""
        bucket.peak_bytes = max(peak_bytes, bucket.peak_bytes or 0)
        is_least = bucket.is_least or bucket.size == 1
        if peak_bytes > self._budget and not is_least:
            self.tell(
                f"A step that {_DOES[bucket.kind]} needed "
                f"{format_size(peak_bytes)}; the next ones take less."
            )
            less = self._budget / peak_bytes
            try:
                self._split(bucket, int(less * bucket.size))
            except ValueError as error:
                bucket.is_least = True
                self.tell(str(error))

    def _split(self, bucket: _Bucket, size: int) -> None:
        """Makes the parts of a bucket smaller."""
        size = max(1, min(size, bucket.size - 1))
        rows = batches.num_rows(bucket.batch) or 1
        if bucket.count == 1:
            self._check(bucket, None, memory.current())
        bucket.count = -(-rows // size)

    def _choose(
        self, kind: str, batch: Any, examples: Any, reserved_bytes: int
    ) -> _Bucket:
        bucket = _Bucket(kind, batch, 1, None)
        if memory.is_counted():
            gc.collect()
            others = memory.current() + reserved_bytes
            room = min(self._budget, memory.capacity()) - others
            with self._steps.changes.undone():
                self._measure(bucket, int((1 - tuning.MARGIN) * room), others)
            if bucket.count > 1:
                self._check(bucket, examples, others)
            gc.collect()
        self._buckets.append(bucket)
        if bucket.count > 1:
            rows = batches.num_rows(batch)
            self.tell(
                f"memory_budget {format_size(self._budget)}: {_DOES[kind]} "
                f"batches of {rows} in {bucket.count} parts of {bucket.size}"
            )
        return bucket

    def _measure(self, bucket: _Bucket, room: int, others: int) -> None:
        """Finds the fewest parts that fit.

        Args:
            bucket: Gets their number.
            room: What a step may take.
            others: What else is in memory.

        Raises:
            ImpossibleBudget: If nothing fits.
        """
        kind, batch = bucket.kind, bucket.batch
        rows = batches.num_rows(batch) or 1
        whole = batches.num_bytes(batch)

        def taken(size: int, own: float) -> float:
            # The whole batch is there beside one part of it.
            return own if size == rows else own + whole

        size, most = 1, rows
        # What a step with some examples takes, of the last that fitted.
        fitting: list[tuple[int, float]] = []
        for _ in range(2 * tuning.MAX_ATTEMPTS):
            try:
                own = self._steps.needed_bytes(kind, batch, size, 1)
            except ValueError:
                # Made for batches of one size, as a `train_step` may be, too.
                size, own = rows, self._steps.needed_bytes(kind, batch, rows, 1)
            if own is None or taken(size, own) > room:
                if not fitting:
                    peak = None if own is None else others + taken(1, own)
                    raise self._impossible(rows, peak, others)
                most = size - 1
            else:
                fitting.append((size, own))
            (largest, its) = fitting[-1]
            if len(fitting) == 1:
                size = min(2, most)
            else:
                before, least = fitting[-2]
                more = max(its - least, 1) / (largest - before)
                size = most
                if taken(most, its + more * (most - largest)) > room:
                    left = room - taken(largest, its)
                    size = min(largest + int(left / more), most)
                size = min(size, _GROWTH * largest)
                if most < rows and size - largest < tuning.DOUBT * largest:
                    break
            if size <= largest:
                break
        bucket.count = -(-rows // fitting[-1][0])
        # What comes in a loop needs a little more.
        while kind == "test" and 1 < bucket.count < rows:
            own = self._steps.needed_bytes(*(kind, batch, rows, bucket.count))
            if own is not None and own <= room:
                break
            bucket.count = -(-rows // (bucket.size - 1))

    def _impossible(
        self, count: int, peak: float | None, others: int, reason: str = ""
    ) -> ImpossibleBudget:
        options = with_count(MemoryOptions(), count)
        least = None if peak is None else Choice(options, int(peak), 0.0)
        return ImpossibleBudget(
            *(self._given, self._budget, least, others), reason=reason
        )

    def _check(self, bucket: _Bucket, examples: Any, others: int) -> None:
        """Refuses, by an `ImpossibleBudget`, parts that do not give what a
        whole batch does: tried with some examples, or random data."""
        kind, batch = bucket.kind, bucket.batch
        rows = batches.num_rows(batch) or 1
        num_compared = min(COMPARED, rows)
        if examples is None:
            spec = batches.with_rows(batch, num_compared)
            examples = batches.random_data(spec)
        examples = some_rows(examples, 0, num_compared)
        text = self._steps.difference(kind, examples)
        if text:
            with self._steps.changes.undone():
                own = self._steps.needed_bytes(kind, batch, rows, 1)
            raise self._impossible(
                *(1, None if own is None else others + own, others),
                f" A step that {_DOES[kind]} cannot be split, because an "
                "example's results depend on the other examples: a smaller "
                f"`batch_size` needs less. Of {num_compared} examples in two "
                f"parts, {text}.",
            )


def budget_bytes(options: MemoryOptions) -> int:
    """A budget in bytes."""
    budget: Any = options.memory_budget
    if isinstance(budget, float):
        return int(budget * memory.capacity())
    return budget


def _plain(leaf: Any) -> Any:
    """Of a generator's `None` Keras makes an `Optional`."""
    if not isinstance(leaf, tf.experimental.Optional):
        return leaf
    return leaf.get_value() if leaf.has_value() else None
