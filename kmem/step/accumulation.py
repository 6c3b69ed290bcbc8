"""Adds up the gradients of batches and replicas, and applies their mean once.

A group is `steps` batches on every replica of a strategy. Its gradient is the
mean over all of its rows (over what each loss is divided by, in general), as
if it were one batch on one device: denominators are added up like gradients,
then the mean is clipped, checked and applied, once for all replicas.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.graph import releasing
from kmem.graph.names import operations
from kmem.step import updates
from kmem.step.loss_terms import SUM
from kmem.step.microbatch import BatchGradient
from kmem.step.parts import Alone

_UNKNOWN: Any = tf.TensorShape(None)  # type: ignore[arg-type]


def build_optimizer(optimizer, variables: list) -> None:
    """Makes an optimizer's variables, as its first update would."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        with tf.init_scope():
            # An average shares its weight's memory until one of them changes.
            for variable in optimizer.variables if optimizer.use_ema else []:
                variable.assign(tf.raw_ops.DeepCopy(x=variable))


class Updater:
    """Makes one update of every `steps` batches; if `early`, of each variable
    as soon as its gradient is there, which is freed then."""

    def __init__(
        self,
        optimizer,
        steps: int,
        strategy,
        processes: Alone | None = None,
        early: bool = False,
    ):
        self._optimizer = optimizer
        self._steps = steps
        self._strategy = strategy
        self._processes = processes or Alone()
        self._early = early
        self._pending: Any = None  # `_Pending`, from the first batch on.
        self._begun: list = []
        self._flush = releasing.function(
            lambda: strategy.run(self._apply_if_pending, args=(1,))
        )

    def add(self, batch: BatchGradient) -> None:
        """Takes one batch, and applies the group that it completes.

        Called by every replica, in its context.
        """
        if not batch.denominators:
            return
        if self._steps == 1:
            self._apply_batch(batch)
            return
        self.collect(batch)
        pending: Any = self._pending
        pending.count(batch.denominators)
        self._apply_if_pending(self._steps)

    def collect(self, batch: BatchGradient) -> None:
        """Adds a batch's gradients to its group's, and uses them up: `add`
        finds none then, as if it had done so itself."""
        if not batch.gradients:
            return
        if self._pending is None:
            tf.distribute.get_replica_context().merge_call(
                lambda strategy: self._make_pending(strategy, batch)
            )
        pending: Any = self._pending
        pending.add(batch)

    def start(self) -> None:
        """Begins with an empty group."""
        self._begun = []
        if self._pending is not None:
            self._pending.reset()

    def flush(self) -> None:
        """Applies the batches of a group that was not completed, if any."""
        if self._pending is not None and self._pending.num_batches.numpy():
            self._flush()

    def stop(self) -> None:
        """Drops what is pending, and gives its memory back."""
        if self._pending is not None:
            self._pending.free()

    def unfinished(self) -> list | None:
        """What a group has come to, outside of the device; `None` if none has
        begun."""
        if self._pending is None or not int(self._pending.num_batches):
            return None
        return [tf.convert_to_tensor(v).numpy() for v in self._pending.state]

    def go_on(self, group: list) -> None:
        """Goes on with a group that another updater has begun."""
        if self._pending is None:
            self._begun = group
        else:
            self._pending.assign(group)

    def _make_pending(self, strategy, batch: BatchGradient) -> None:
        with tf.init_scope(), strategy.scope():
            # Now, since the update is in a branch of its own.
            build_optimizer(self._optimizer, batch.variables)
            self._pending = _Pending(batch, self._processes)
            self._pending.assign(self._begun)
            self._begun = []

    def _apply_batch(self, batch: BatchGradient) -> None:
        if self._strategy.num_replicas_in_sync == 1:
            (gradients,) = batch.gradients.values()
            variables, first, order = batch.variables, gradients, None
            if self._early:
                order = batch.order
                # Before it sees them in another order.
                build_optimizer(self._optimizer, variables)
                turns = updates.turns(variables)
                gradients = [gradients[turn] for turn in turns]
                variables = [variables[turn] for turn in turns]
                first = [g for g in gradients if g is not None][:1]
            # Keras reduces all gradients at once: each would wait for the last.
            with (
                without_reduction(self._optimizer),
                updates.in_turn(self._optimizer, first, order),
            ):
                self._optimizer.apply(gradients, variables)
            return
        sums = {
            group: [_times(g, group, batch.denominators[group]) for g in each]
            for group, each in batch.gradients.items()
        }
        self._apply_mean(sums, batch.denominators, batch.variables)

    def _apply_if_pending(self, minimum: int) -> None:
        pending = self._pending

        def apply():
            sums, denominators = pending.take()
            num_before = len(operations())
            self._apply_mean(sums, denominators, pending.variables)
            # Not before that is done; in eager mode it is.
            made = operations()[num_before:]
            with tf.control_dependencies([op for op in made if not op.outputs]):
                pending.reset()

        def apply_everywhere(strategy):
            strategy.extended.call_for_each_replica(apply)
            return True

        # A branch that updates mirrored variables is entered by all replicas
        # together, from the context across them.
        tf.distribute.get_replica_context().merge_call(
            lambda strategy: tf.cond(
                pending.num_batches.read_value() >= minimum,
                lambda: apply_everywhere(strategy),
                lambda: False,
            )
        )

    def _apply_mean(self, sums, denominators, variables) -> None:
        replica = tf.distribute.get_replica_context()
        num_replicas = self._strategy.num_replicas_in_sync
        groups = list(sums)
        totals = tf.stack([denominators[group] for group in groups])
        if num_replicas > 1:
            totals = replica.all_reduce(tf.distribute.ReduceOp.SUM, totals)
        # Keras divides every mean by the number of replicas already.
        replicas = tf.constant(num_replicas, tf.float64)
        factors = [
            tf.ones([], tf.float64)
            if group == SUM
            else tf.math.divide_no_nan(replicas, total)
            for group, total in zip(groups, tf.unstack(totals), strict=True)
        ]
        by_variable = [*zip(*sums.values(), strict=True)]
        sums.clear()
        mean = []
        while by_variable:
            # Those that it was made of are freed.
            mean.append(_weighted_sum(by_variable.pop(), factors))
        mean = self._processes.add_up_group(mean[::-1], variables)
        with contextlib.ExitStack() as stack:
            if num_replicas > 1:
                present = [g for g in mean if g is not None]
                reduced = iter(
                    replica.all_reduce(tf.distribute.ReduceOp.SUM, present)
                )
                mean = [None if g is None else next(reduced) for g in mean]
                stack.enter_context(without_reduction(self._optimizer))
            self._optimizer.apply(mean, variables)


class _Pending:
    """The sums of a group's batches so far, on every replica.

    Their variables have no fixed shape, so that they can be emptied while the
    functions that use them stay traced.

    Args:
        batch: Any batch; it is not added.

    Attributes:
        num_batches: The number of batches that were added, a variable.
    """

    def __init__(self, batch: BatchGradient, processes: Alone):
        self.variables = batch.variables
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.num_batches = _accumulator([], tf.int32, first)
        self._shapes = [
            tuple(processes.summed_shape(v)) for v in batch.variables
        ]
        self._sums = {
            group: [
                None if g is None else _accumulator(shape, g.dtype)
                for g, shape in zip(gradients, self._shapes, strict=True)
            ]
            for group, gradients in batch.gradients.items()
        }
        self._denominators = {
            group: _accumulator([], tf.float64) for group in batch.gradients
        }

    def add(self, batch: BatchGradient) -> None:
        """Adds a batch's gradients, each as soon as it is there; they are used
        up, so that each is freed."""
        for group, totals in self._sums.items():
            gradients = batch.gradients.pop(group)
            denominator = batch.denominators[group]
            # The last layer's first, as a backward pass makes them.
            for total in reversed(totals):
                gradient = gradients.pop()
                if total is None:
                    continue
                num_before = len(operations())
                total.assign_add(_times(gradient, group, denominator))
                if batch.order is not None:
                    batch.order.finish(operations()[num_before:])

    def count(self, denominators: dict) -> None:
        """Counts a batch that was added."""
        for group, denominator in denominators.items():
            self._denominators[group].assign_add(denominator)
        self.num_batches.assign_add(1)

    def take(self) -> tuple[dict, dict]:
        """This replica's sums and denominators, by group. The sums are held
        by nobody else then, and can be overwritten: `reset` makes new ones."""
        sums = {
            group: [
                None if v is None else _taken(v, shape)
                for v, shape in zip(totals, self._shapes, strict=True)
            ]
            for group, totals in self._sums.items()
        }
        denominators = {
            group: tf.ensure_shape(variable.read_value(), [])
            for group, variable in self._denominators.items()
        }
        return sums, denominators

    def reset(self) -> None:
        """Begins a group."""
        for variable, shape in self._accumulators():
            variable.assign(releasing.zeros(shape, variable.dtype))
        for variable in self._denominators.values():
            variable.assign(tf.zeros([], variable.dtype))
        self.num_batches.assign(0)

    def free(self) -> None:
        """Empties the sums; `reset` allocates them again."""
        for variable, _ in self._accumulators():
            variable.assign(tf.zeros([0], variable.dtype))
        self.num_batches.assign(0)

    @property
    def state(self) -> list[tf.Variable]:
        """The variables."""
        sums = [variable for variable, _ in self._accumulators()]
        return [*sums, *self._denominators.values(), self.num_batches]

    def assign(self, values: list) -> None:
        """Gives the variables values, or leaves them if there are none."""
        for variable, value in zip(self.state, values, strict=False):
            variable.assign(tf.raw_ops.DeepCopy(x=value))

    def _accumulators(self):
        for totals in self._sums.values():
            for variable, shape in zip(totals, self._shapes, strict=True):
                if variable is not None:
                    yield variable, shape


def _accumulator(shape, dtype, aggregation=None) -> tf.Variable:
    return tf.Variable(
        lambda: tf.zeros(shape, dtype),
        shape=_UNKNOWN,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation or tf.VariableAggregation.SUM,
    )


def _taken(variable: tf.Variable, shape) -> tf.Tensor:
    """A variable's value, after which the variable is empty."""
    value = tf.ensure_shape(variable.read_value(), shape)
    emptied = variable.assign(tf.zeros([0], variable.dtype), read_value=False)
    with tf.control_dependencies([] if emptied is None else [emptied]):
        return tf.identity(value)


def _times(gradient, group: str, denominator):
    """The gradient as a sum over what it is the mean of."""
    if gradient is None or group == SUM:
        return gradient
    gradient = tf.convert_to_tensor(gradient)
    return gradient * tf.cast(denominator, gradient.dtype)


def _weighted_sum(gradients, factors):
    """Adds up a variable's gradients, one a group; `None` if all are."""
    addends = [
        gradient * tf.cast(factor, gradient.dtype)
        for gradient, factor in zip(gradients, factors, strict=True)
        if gradient is not None
    ]
    return tf.add_n(addends) if addends else None


def without_reduction(optimizer) -> patching.Context:
    """Lets the optimizer take its gradients as summed over replicas already.

    Keras reduces after it clips, so that every replica clips its own share.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    name = private_keras.ADD_UP_OVER_REPLICAS
    return patching.method(inner, name, lambda _, gradients: list(gradients))
