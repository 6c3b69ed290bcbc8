"""Adds up the gradients of batches and replicas, and applies their mean once.

A group is `steps` batches on every replica of a strategy. Its gradient is the
mean over all of its rows (over what each loss is divided by, in general), as
if it were one batch on one device: denominators are added up like gradients,
then the mean is clipped, checked and applied, once for all replicas.
"""

import contextlib

import keras
import tensorflow as tf

from kmem import capture
from kmem.loss_terms import SUM
from kmem.microbatch import BatchGradient


class Updater:
    """Makes one update of every group of batches.

    Args:
        optimizer: The optimizer that applies the gradients.
        steps: The number of batches in a group.
        strategy: The model's `tf.distribute` strategy.
    """

    def __init__(self, optimizer, steps: int, strategy):
        self._optimizer = optimizer
        self._steps = steps
        self._strategy = strategy
        self._variables: list = []
        self._sums: dict[str, list] | None = None
        self._denominators: dict[str, tf.Variable] = {}
        self._num_pending: tf.Variable | None = None
        self._flush = None

    def add(self, batch: BatchGradient) -> None:
        """Takes one batch, and applies the group that it completes.

        Called by every replica, in its context.
        """
        if not batch.gradients:
            return
        if self._steps == 1:
            self._apply_batch(batch)
            return
        if self._sums is None:
            self._make_accumulators(batch)
        for group in batch.gradients:
            gradients = _times_denominator(batch, group)
            for total, gradient in zip(
                self._sums[group], gradients, strict=True
            ):
                if total is not None:
                    total.assign_add(gradient)
            self._denominators[group].assign_add(batch.denominators[group])
        self._num_pending.assign_add(1)
        self._apply_if_pending(self._steps)

    def flush(self) -> None:
        """Applies the batches of a group that was not completed, if any."""
        if self._sums is None:
            return
        if self._flush is None:
            self._flush = tf.function(
                lambda: self._strategy.run(self._apply_if_pending, args=(1,)),
                autograph=False,
            )
        self._flush()

    def _apply_batch(self, batch: BatchGradient) -> None:
        if (
            self._strategy.num_replicas_in_sync == 1
            and len(batch.gradients) == 1
        ):
            (gradients,) = batch.gradients.values()
            self._optimizer.apply(gradients, batch.variables)
            return
        sums = {g: _times_denominator(batch, g) for g in batch.gradients}
        self._apply_mean(sums, batch.denominators, batch.variables)

    def _apply_if_pending(self, minimum: int) -> None:
        def apply():
            sums = {
                group: [None if v is None else v.read_value() for v in totals]
                for group, totals in self._sums.items()
            }
            denominators = {
                group: variable.read_value()
                for group, variable in self._denominators.items()
            }
            self._apply_mean(sums, denominators, self._variables)
            for variable in tf.nest.flatten([self._sums, self._denominators]):
                if variable is not None:
                    variable.assign(tf.zeros_like(variable))
            self._num_pending.assign(0)

        # A branch that updates mirrored variables is entered by all replicas
        # together, from the context across them.
        def across_replicas(strategy):
            def apply_everywhere():
                strategy.extended.call_for_each_replica(apply)
                return True

            tf.cond(
                self._num_pending.read_value() >= minimum,
                apply_everywhere,
                lambda: False,
            )

        tf.distribute.get_replica_context().merge_call(across_replicas)

    def _apply_mean(self, sums, denominators, variables) -> None:
        replica = tf.distribute.get_replica_context()
        num_replicas = self._strategy.num_replicas_in_sync
        groups = list(sums)
        totals = tf.stack([denominators[group] for group in groups])
        if num_replicas > 1:
            totals = replica.all_reduce(tf.distribute.ReduceOp.SUM, totals)
        # Keras divides every mean by the number of replicas already.
        factors = {
            group: tf.ones([], tf.float64)
            if group == SUM
            else tf.math.divide_no_nan(
                tf.constant(num_replicas, tf.float64), total
            )
            for group, total in zip(groups, tf.unstack(totals), strict=True)
        }
        mean = [
            _add_up(
                [
                    gradient * tf.cast(factors[group], gradient.dtype)
                    for group, gradient in zip(groups, of_variable, strict=True)
                    if gradient is not None
                ]
            )
            for of_variable in zip(*sums.values(), strict=True)
        ]
        with contextlib.ExitStack() as stack:
            if num_replicas > 1:
                present = [g for g in mean if g is not None]
                reduced = iter(
                    replica.all_reduce(tf.distribute.ReduceOp.SUM, present)
                )
                mean = [None if g is None else next(reduced) for g in mean]
                stack.enter_context(_without_reduction(self._optimizer))
            self._optimizer.apply(mean, variables)

    def _make_accumulators(self, batch: BatchGradient) -> None:
        def zeros(shape, dtype):
            return tf.Variable(
                tf.zeros(shape, dtype),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        def make(strategy):
            with tf.init_scope(), strategy.scope():
                if not self._optimizer.built:
                    with keras.name_scope(self._optimizer.name):
                        self._optimizer.build(batch.variables)
                self._sums = {
                    group: [
                        None if g is None else zeros(v.shape, g.dtype)
                        for g, v in zip(gradients, batch.variables, strict=True)
                    ]
                    for group, gradients in batch.gradients.items()
                }
                self._denominators = {
                    group: zeros([], tf.float64) for group in batch.gradients
                }
                self._num_pending = tf.Variable(
                    0,
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )
            self._variables = batch.variables

        tf.distribute.get_replica_context().merge_call(make)


def _times_denominator(batch: BatchGradient, group: str) -> list:
    """The gradient as a sum over what it is the mean of."""
    denominator = batch.denominators[group]
    gradients = batch.gradients[group]
    return [
        g
        if g is None or group == SUM
        else tf.convert_to_tensor(g) * tf.cast(denominator, g.dtype)
        for g in gradients
    ]


def _add_up(tensors: list):
    return tf.add_n(tensors) if tensors else None


@contextlib.contextmanager
def _without_reduction(optimizer):
    """Lets the optimizer take its gradients as summed over replicas already.

    Private in Keras: it reduces after it clips, so that every replica clips
    its own share. tests/test_mirrored.py fails if the name moves.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with capture.attribute(inner, "_all_reduce_sum_gradients", list):
        yield
