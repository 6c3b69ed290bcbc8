"""The gradient of a batch, computed part by part.

The gradient of a mean over rows is the mean of the parts' gradients, weighted
by their rows; losses with another denominator are scaled first (loss_terms).
What layers keep changes once a batch (metrics). What this module does not
do: batch normalization sees one part at a time, and dropout draws anew for
every part.
"""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import keras
import tensorflow as tf

from kmem.base.private_keras import all_layers
from kmem.base.private_keras import is_built
from kmem.graph import host
from kmem.graph import ordering
from kmem.graph import releasing
from kmem.step import batches
from kmem.step import capture
from kmem.step import comparing
from kmem.step import metrics
from kmem.step.loss_terms import ROWS
from kmem.step.loss_terms import SUM
from kmem.step.loss_terms import Loss
from kmem.step.loss_terms import LossTerms
from kmem.step.loss_terms import recording
from kmem.step.parts import Alone
from kmem.step.parts import Parts
from kmem.step.parts import Slice
from kmem.step.parts import spec_of_parts
from kmem.step.updates import squares_rows


@dataclasses.dataclass
class BatchGradient:
    """The gradient of one batch's loss.

    Attributes:
        gradients: `{group: list}`, the loss terms of each group apart; a list
            holds tensors, or `None` where there is no gradient. Empty if the
            step made no update.
        denominators: `{group: float64 scalar}`, what each was divided by.
        variables: The variables they belong to.
        logs: What the step returned, of the whole batch.
        order: That of the backward pass, if it was put in one.
    """

    gradients: dict[str, list]
    denominators: dict[str, tf.Tensor]
    variables: list
    logs: Any
    order: ordering.AnyOrder | None = None


class GradientStep:
    """Computes a batch's gradient with the model's own `train_step`.

    Args:
        optimizer: What the step sees as `model.optimizer`.
        by_group: Whether to tell apart the gradients of loss terms with
            different denominators. Whoever adds up batches needs it.
        ordered: Whether to keep the backward pass from running ahead, which
            is done anyway if there are several parts.
    """

    def __init__(
        self,
        model,
        train_step,
        optimizer,
        num_parts: int,
        by_group: bool,
        ordered: bool,
        processes: Alone | None = None,
    ):
        self._model = model
        self._train_step = train_step
        self._num_parts = num_parts
        self._by_group = by_group
        self._ordered = ordered or num_parts > 1
        self._processes = processes or Alone()
        self._splits = num_parts > 1 or self._processes.split_batches
        several = self._processes.num_processes > 1
        self._adds_up = num_parts > 1 or by_group or several
        self._capturing = functools.partial(
            *(capture.capturing, model, optimizer), adds_up=self._adds_up
        )
        # A `Loss`, once it was looked at: the same in all replicas.
        self._loss: Any = None
        self._state: metrics.LayerState | None = None  # Likewise.
        self._spec: Any = None  # Of a part of a batch.
        self._optimizer = optimizer
        # Variables whose gradients are rows, by their `id`.
        self._in_rows: set[int] = set()

    @property
    def layers_that_see_parts(self) -> list[keras.layers.Layer]:
        """Those whose state depends on the examples of each part of a batch,
        if it comes in parts, once the step was traced or run."""
        layers = self._state.layers_that_see_parts if self._state else []
        if self._num_parts > 1:
            return layers
        if self._processes.num_processes == 1:
            return []
        # These see what all processes have.
        return [x for x in layers if not getattr(x, "synchronized", False)]

    def layers_that_differ(self, spec) -> list[keras.layers.Layer]:
        """Those whose numbers are others if a batch comes in parts: their
        state depends on the examples of each, or they draw for each, or the
        optimizer squares each row of their gradient; the model itself, if its
        loss may compare them."""
        releasing.function(self._count).get_concrete_function(spec, False)
        state: Any = self._state
        layers = [*state.layers_that_see_parts, *state.layers_that_draw]
        if self._in_rows and squares_rows(self._optimizer):
            layers += metrics.innermost(self._model, self._in_rows, "weights")
        may_compare = self._loss.may_compare or self._losses_that_compare()
        return [*layers, self._model] if may_compare else layers

    def warn_of_parts(self) -> None:
        """Says which layers and losses see a part of a batch at a time."""
        names = self._losses_that_compare() if self._adds_up else []
        if names:
            comparing.warn(names)
        metrics.warn_of_parts(
            self.layers_that_see_parts,
            self._num_parts,
            self._processes.num_processes,
        )

    def _losses_that_compare(self) -> list[str]:
        loss: Any = self._loss
        if loss is None or self._processes.num_processes > 1:
            return loss.comparing if loss else []
        take_step = self._run_until_loss
        return comparing.names(self._model, loss, take_step, self._spec)

    def __call__(self, data) -> BatchGradient:
        batch = self._processes.slice(data)
        given = batch.data, self._num_parts, batch.fewest_rows
        parts = Parts(*given, self._adds_up)
        totals, base, apart = {}, ROWS, []
        if self._splits or self._by_group:
            totals = self._count_denominators(parts, batch)
        if self._by_group and self._loss is not None:
            base, apart = self._loss.split()
        with self._processes.sharing_state(self._model, batch):
            sums, part = self._sum_tensors(parts, batch.rows, totals, apart)
        sums = self._processes.add_up(sums, part.variables_of_tensors, batch)
        gradients, logs = part.unpack(sums)
        if part.sums_rows:
            base = SUM
        totals[ROWS] = tf.cast(batch.rows, tf.float64)
        totals[SUM] = tf.ones([], tf.float64)
        by_group = _by_group(gradients, base, apart)
        return BatchGradient(
            gradients=by_group,
            denominators={group: totals[group] for group in by_group},
            variables=part.variables,
            logs=logs,
            # Several are computed in a loop, which is a graph of its own.
            order=part.order if self._num_parts == 1 else None,
        )

    def _sum_tensors(
        self, parts: Parts, batch_rows, totals, apart
    ) -> tuple[list[tf.Tensor], "_Part"]:
        """Runs the step on every part.

        Returns:
            Its tensors, added up, and the part that was run, or traced, last.
        """
        last: Any = None
        state = self._state if self._num_parts > 1 else None
        before = state.values() if state else []

        def run(data, rows, batch_rows, totals, before):
            nonlocal last
            last = self._run(data, rows, batch_rows, totals, apart)
            if not state:
                return last.tensors()
            changes = state.take_changes(before, rows / batch_rows)
            return changes + last.tensors()

        sums = parts.sum_traced(
            *(run, batch_rows, totals, before), order=lambda: last.order
        )
        if state:
            state.change(before, sums[: len(before)])
        return sums[len(before) :], last

    def _run(self, data, rows, batch_rows, totals, apart) -> "_Part":
        """Runs the step on one part, without its update."""
        share = tf.cast(rows, tf.float64) / tf.cast(batch_rows, tf.float64)
        weight = share if self._splits else None
        layers = all_layers(self._model)
        num_rows = batches.num_rows(data)
        updates = []

        @contextlib.contextmanager
        def capturing(dropped=None):
            with (
                recording(LossTerms(weight, totals, dropped), layers),
                self._capturing(rows=num_rows) as update,
                self._processes.weighing(share, update),
            ):
                yield update

        # Before the step proper, so that they draw the same random numbers.
        for group in apart:
            with capture.DiscardedState(), capturing(group) as update:
                self._train_step(data)
            updates.append(update)
        counting = metrics.counting_share(self._model, share)
        with counting as results, capturing() as update:
            logs = ordering.one_by_one(self._train_step, data)
        order = None
        host.read_what_came_back()
        if self._ordered:
            order = ordering.hold_back(update.gradients or [], loss=update.loss)
        updates = [update, *updates]
        return _Part(updates, logs, results, weight, self._processes, order)

    def _count_denominators(
        self, parts: Parts, batch: Slice
    ) -> dict[str, tf.Tensor]:
        """What the batch's counted losses are divided by.

        It takes a forward pass that changes nothing. In a graph only what
        leads to the denominators is run of it (a mask, a sum of weights), and
        in eager mode it is left out once it is known to count nothing.
        """
        self._build(parts)
        count = self._count
        if not tf.executing_eagerly():
            trace = releasing.function(count)
            count = trace.get_concrete_function(parts.spec, True)
        if self._loss is not None and not self._loss.counted:
            return {}
        totals = parts.sum(lambda data, rows: count(data, True))
        totals = self._processes.add_up(totals, [None] * len(totals), batch)
        loss: Any = self._loss
        return dict(zip(loss.counted, totals, strict=True))

    def _build(self, parts: Parts) -> None:
        """Creates the variables of a model that was never called, and those
        of metrics, which processes read before a step.

        Tracing is enough, and runs nothing. Keras does the same, but for
        every step: a variable has to exist before a loop that reads it.
        """
        model = self._model
        # Metrics come after the loss.
        all_of_it = self._processes.split_batches and not all(
            metric.variables for metric in model.metrics
        )
        if is_built(model) and not all_of_it:
            return

        def build(data) -> None:
            self._run_until_loss(data, until_loss=not all_of_it)

        releasing.function(build).get_concrete_function(parts.spec)

    def _run_until_loss(self, data, until_loss=True) -> capture.Update:
        with (
            self._capturing(until_loss=until_loss) as update,
            contextlib.suppress(capture.LossReached),
        ):
            self._train_step(data)
        return update

    def _count(self, data, until_loss: bool) -> list[tf.Tensor]:
        model = self._model
        terms = LossTerms()
        layers = all_layers(model)
        with (
            capture.DiscardedState() as scope,
            recording(terms, layers),
            comparing.looking() as compares,
            self._processes.counting() as unknown,
        ):
            update = self._run_until_loss(data, until_loss)
            pairs = zip(update.variables, update.gradients or [], strict=False)
            in_rows = (v for v, g in pairs if isinstance(g, tf.IndexedSlices))
            self._in_rows = set(map(id, in_rows))
            self._loss = Loss.of(model, terms, compares)
            self._state = metrics.LayerState(model, scope, data)
        self._spec = spec_of_parts(data)
        counted = [terms.denominators[group] for group in self._loss.counted]
        if unknown:
            comparing.check_masks(model, counted, unknown)
        return [tf.cast(each, tf.float64) for each in counted]


class _Part:
    """What came of one part: tensors that add up over the parts."""

    def __init__(
        self,
        updates,
        logs,
        results,
        weight,
        processes: Alone,
        order: ordering.AnyOrder | None,
    ):
        self.order = order
        self.sums_rows = updates[0].sums_rows
        self.variables = updates[0].variables
        split = weight is not None
        self._logs = metrics.Logs(logs, results if split else {}, weight)
        gradient_weight = None if self.sums_rows else weight
        weighs = processes.weighs_gradient
        shape = processes.gradient_shape
        # Rows that occur in several addends add up, so no `IndexedSlices`.
        dense = split or len(updates) > 1
        self._gradients = []
        for update in updates:
            if update.gradients is None:
                continue
            weighted = []
            for v in reversed(update.variables):
                w = None if weighs(v) else gradient_weight
                # Freed once it is weighted.
                g = update.gradients.pop()
                weighted.append(_weighted(g, shape(v), w, dense))
            self._gradients.append(weighted[::-1])
        # Where there are gradients, when those are used up.
        self._are_there = [
            [g is not None for g in gradients] for gradients in self._gradients
        ]

    def tensors(self) -> list[tf.Tensor]:
        """Its tensors, which nobody else holds then."""
        flat = [g for gradients in self._gradients for g in gradients]
        self._gradients = []
        return [g for g in flat if g is not None] + self._logs.tensors

    @property
    def variables_of_tensors(self) -> list:
        """For each of the tensors the variable that it is a gradient of."""
        variables = [
            variable
            for are_there in self._are_there
            for variable in itertools.compress(self.variables, are_there)
        ]
        return variables + [None] * len(self._logs.tensors)

    def unpack(self, sums: list[tf.Tensor]) -> tuple[list[list], Any]:
        """Makes gradients and logs of the sums over all parts."""
        rest = iter(sums)
        gradients = [
            [next(rest) if is_there else None for is_there in are_there]
            for are_there in self._are_there
        ]
        return gradients, self._logs.of_batch(list(rest))


def _weighted(gradient, shape, weight, dense: bool):
    if gradient is None or not dense:
        return gradient
    gradient = tf.convert_to_tensor(gradient)
    gradient = tf.ensure_shape(gradient, shape)
    if weight is None:
        return gradient
    return gradient * tf.cast(weight, gradient.dtype)


def _by_group(gradients: list[list], base: str, apart: list[str]):
    if not gradients:
        return {}
    whole, *without = gradients
    by_group = {
        group: _minus(whole, rest)
        for group, rest in zip(apart, without, strict=True)
    }
    for gradient in by_group.values():
        whole = _minus(whole, gradient)
    return {base: whole, **by_group}


def _minus(minuend: list, subtrahend: list) -> list:
    return [
        a if a is None or b is None else tf.subtract(a, b)
        for a, b in zip(minuend, subtrahend, strict=True)
    ]
