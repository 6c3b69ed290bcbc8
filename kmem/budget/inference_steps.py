"""The steps that evaluate and predict, each with a batch in equal parts.

`test_step` gets them in one graph, in a loop. Each part's loss terms count by
their share of what the whole batch divides them by, as in a gradient
(step/microbatch.py); metrics add up by themselves, and what else a step returns
is averaged over the parts. The outputs of `predict_step` leave the device one
part after another, and are put together in host memory. What this does not do:
see what a step computes from several examples at once, as a layer does that
normalizes by them. `InferenceSteps.difference` tells.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem import memory
from kmem.base import patching
from kmem.base import private_tf
from kmem.base.private_keras import all_layers
from kmem.budget import dry_run
from kmem.fit import undoing
from kmem.graph import releasing
from kmem.sharding.engine import Engine
from kmem.step import batches
from kmem.step import capture
from kmem.step import metrics
from kmem.step.loss_terms import LossTerms
from kmem.step.loss_terms import recording
from kmem.step.parts import Parts

# How many examples are computed in both ways, in two parts that differ.
COMPARED = 3
# By how much two ways to compute one number may differ, of the largest: sums
# in another order, and those of 16 bits.
_ROUNDING, _ROUNDING_IN_16_BITS = 1e-3, 5e-2


class InferenceSteps:
    """A model's steps, `"test"` and `"predict"`, for batches of any size."""

    def __init__(self, model: keras.Model, steps: Mapping[str, Callable]):
        self._model: Any = model
        self._steps = steps
        self._functions: dict[tuple, tuple[Any, Callable]] = {}
        self.changes = _Changes(model, optimizer=None)

    def take(self, kind: str, batch: Any, count: int) -> tuple[Any, str]:
        """Takes a step with a batch in so many parts; returns what came of
        it, and why memory ran out if it did."""
        return attempt(self._run, kind, batch, count)

    def needed_bytes(
        self, kind: str, batch: Any, rows: int, count: int
    ) -> int | None:
        """What a step takes besides what is in memory, with so many rows of a
        batch (`tf.TensorSpec`s); `None` if it ran out of memory."""
        before = memory.current()
        data = batches.random_data(batches.with_rows(batch, rows))
        measured = dry_run.measured(
            lambda: self._run(kind, data, count), Engine()
        )
        return None if measured is None else measured.peak_bytes - before

    def difference(self, kind: str, examples: Any) -> str:
        """In what examples that come in two parts give other results than at
        once, or leave another state; "" if in nothing, or if that cannot be
        told for want of memory."""
        model, found = self._model, []
        for count in (1, 2):
            with self.changes.undone():
                for metric in model.metrics:
                    metric.reset_state()
                results, message = self.take(kind, examples, count)
                state = [v.numpy() for v in model.non_trainable_variables]
            if message:
                return ""
            found.append({"results": results, "state": state})
        return _difference(*found)

    def trace_again(self) -> None:
        """Has steps traced anew."""
        self._functions.clear()

    def _run(self, kind: str, batch: Any, count: int) -> Any:
        if kind == "test":
            return self._function(kind, batch, count)(batch)
        rows = batches.num_rows(batch) or 1
        size = -(-rows // count)
        function = self._function(kind, batch, 1)
        parts: Iterable = [batch]
        if count > 1:
            starts = range(0, rows, size)
            parts = (some_rows(batch, start, size) for start in starts)
        return joined([_in_host_memory(function(part)) for part in parts])

    def _function(self, kind: str, batch: Any, count: int) -> Callable:
        """Takes a step with a batch of any number of examples."""
        spec = batches.with_rows(batches.specs_of(batch), None)
        # Where none are recorded, a graph has no operations that write them.
        writes = bool(tf.summary.should_record_summaries())
        kinds = keras.tree.map_structure(
            lambda leaf: leaf and (leaf.dtype, leaf.shape.rank), spec
        )
        key = kind, count, repr(kinds), writes
        traced, function = self._functions.get(key, (spec, None))
        if spec != traced:
            # As in Keras, the second length stands for all others too.
            spec = keras.tree.map_structure(_covering, traced, spec)
        if function is None or spec != traced:
            function = self._new_function(kind, spec, count)
            self._functions[key] = spec, function
        return function

    def _new_function(self, kind: str, spec: Any, count: int) -> Callable:
        model, step, name = self._model, self._steps[kind], f"{kind}_function"
        if count > 1:
            step = EvaluationStep(model, step, count)
        plain = getattr(model, name)

        def take_step(data):
            with undoing.variables_at_once():
                results = step(data)
            self.changes.look()
            return results

        try:
            with patching.attribute(model, f"{kind}_step", take_step):
                getattr(model, f"make_{name}")(force=True)
            take = getattr(model, name)
        finally:
            setattr(model, name, plain)

        run = batches.of_leaves(
            lambda data: take([data] if kind == "predict" else iter([data])),
            spec,
        )
        specs = batches.leaves(spec)
        if not model.run_eagerly:
            run = releasing.function(run, input_signature=specs)

        def call(batch):
            # `test_on_batch` gives NumPy arrays.
            return run(*map(batches.as_tensor, batches.leaves(batch), specs))

        return call


class _Changes(undoing.Changes):
    """What steps change that do not train."""

    @property
    def named(self) -> list:
        owned = [v for metric in self._model.metrics for v in metric.variables]
        return owned + self._model.non_trainable_variables

    def build(self, batch=None) -> None:
        """Leaves the optimizer as it is."""


class EvaluationStep:
    """A model's own `test_step`, which gets a batch in parts."""

    def __init__(self, model: keras.Model, test_step: Callable, num_parts: int):
        self._model = model
        self._test_step = test_step
        self._num_parts = num_parts
        # The groups of loss terms whose denominators are counted, once known.
        self._counted: list[str] | None = None

    def __call__(self, data) -> Any:
        parts = Parts(data, self._num_parts)
        totals = self._count_denominators(parts)
        last: Any = None

        def run(data, rows, batch_rows, totals):
            nonlocal last
            last = self._run(data, rows, batch_rows, totals)
            return list(last.tensors)

        sums = parts.sum_traced(run, parts.rows, totals)
        return last.of_batch(sums)

    def _run(self, data, rows, batch_rows, totals) -> metrics.Logs:
        """Takes the step with one part."""
        model = self._model
        share = tf.cast(rows, tf.float64) / tf.cast(batch_rows, tf.float64)
        with (
            recording(LossTerms(share, totals), all_layers(model)),
            metrics.counting_share(model, share) as results,
        ):
            logs = self._test_step(data)
        return metrics.Logs(logs, results, share)

    def _count_denominators(self, parts: Parts) -> dict[str, tf.Tensor]:
        """What the batch's counted losses are divided by, as in a gradient.

        Its trace makes the variables of metrics as well, which have to exist
        before a loop that reads them.
        """
        count: Any = self._count
        if not tf.executing_eagerly():
            count = releasing.function(count).get_concrete_function(parts.spec)
        if self._counted == []:
            return {}
        totals = parts.sum(lambda data, rows: count(data))
        return dict(zip(self._counted or [], totals, strict=True))

    def _count(self, data) -> list[tf.Tensor]:
        terms = LossTerms()
        layers = all_layers(self._model)
        with capture.DiscardedState(), recording(terms, layers):
            self._test_step(data)
        counts = terms.denominators
        self._counted = [g for g, count in counts.items() if count is not None]
        return [tf.cast(counts[group], tf.float64) for group in self._counted]


def attempt(step: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Takes a step; returns what came of it, and why it failed if it did."""
    try:
        with private_tf.refusals():
            results = step(*arguments)
            # Waits for a GPU.
            keras.tree.map_structure(np.asarray, results)
    except tf.errors.ResourceExhaustedError as error:
        # Without the error, whose frames hold tensors.
        return None, error.message
    return results, ""


def some_rows(data: Any, start: int, size: int) -> Any:
    """Some rows of a batch, as tensors."""
    return keras.tree.map_structure(
        lambda leaf: leaf[start : start + size] if np.ndim(leaf) else leaf, data
    )


def joined(parts: list) -> Any:
    """The outputs of a batch, of those of its parts."""
    if len(parts) == 1:
        return parts[0]
    return keras.tree.map_structure(
        lambda *arrays: (
            np.concatenate(arrays) if np.ndim(arrays[0]) else np.stack(arrays)
        ),
        *parts,
    )


def _covering(one: tf.TensorSpec | None, other: Any) -> Any:
    """The most specific spec that both are of."""
    return one and one.most_specific_common_supertype([other])


def _in_host_memory(outputs: Any) -> Any:
    """A copy: an array of a CPU's tensor shares its memory."""
    return keras.tree.map_structure(
        lambda leaf: np.array(leaf) if isinstance(leaf, tf.Tensor) else leaf,
        outputs,
    )


def _difference(whole: Any, in_parts: Any) -> str:
    """In what two results differ by more than rounding; "" if in nothing.

    Args:
        whole: Arrays that were computed of some examples at once.
        in_parts: The same, of these in parts.
    """
    names = [
        "/".join(map(str, path)) or "the output"
        for path, _ in keras.tree.flatten_with_path(whole)
    ]
    pairs = zip(
        keras.tree.flatten(whole), keras.tree.flatten(in_parts), strict=True
    )
    for name, (one, other) in zip(names, pairs, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape:
            return f"{name} of shape {one.shape} became {other.shape}"
        if one.dtype.kind not in "fiub" and one.dtype.itemsize != 2:
            continue
        tolerance = (
            _ROUNDING_IN_16_BITS if one.dtype.itemsize == 2 else _ROUNDING
        )
        one, other = one.astype("float64"), other.astype("float64")
        largest = np.max(np.abs(one), initial=0.0, where=np.isfinite(one))
        differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore"):
            error = np.max(np.abs(one - other), initial=0.0, where=differs)
        # NaN where only one of them is.
        if not error <= tolerance * largest + 1e-6:
            return f"{name} became another by {error:.3g} of {largest:.3g}"
    return ""
