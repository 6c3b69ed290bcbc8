"""Each process computes its rows of a batch; sums over all make it the batch.

All processes are given the same batch, as in one process. Rank r of N takes
rows r*B//N to (r+1)*B//N. To the rest of kmem these are like a micro-batch:
their losses count with their share of the rows, or of what they are divided
by, so that gradients, logs and metrics add up. A batch with
fewer rows than there are processes is computed by each of them, and counts
1/N there.

What a step changes besides the weights is added up as well, as changes: those
of a metric's state, of which each is a sum over rows, and the mean of those
of statistics, such as batch normalization's. So every process has the same
state after every step. Random seeds are the exception. A layer's dropout has
to differ between processes, as it would between the rows of one batch; but
TensorFlow's own seed, with which Keras shuffles, is one in all of them.
"""

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.base import private_tf
from kmem.sharding import gathering
from kmem.sharding.engine import Engine
from kmem.sharding.variables import MirroredVariable
from kmem.sharding.variables import ShardedVariable
from kmem.step.parts import Alone
from kmem.step.parts import Slice
from kmem.step.parts import num_rows
from kmem.step.parts import slice_rows

# How far apart the seeds of two processes are.
_STEP = 0x9E3779B1


class Slices(Alone):
    """The processes that compute a batch together. They may add up whole
    gradients `later`: before an update only, not after every batch."""

    split_batches = True

    def __init__(self, engine: Engine, later: bool = False):
        self._engine = engine
        self._later = later
        self.num_processes = engine.size

    def slice(self, data):
        size, rank = self._engine.size, self._engine.rank
        rows = num_rows(data)
        data = self._checked(data, rows)
        enough = rows >= size
        start = tf.where(enough, rows * rank // size, 0)
        stop = tf.where(enough, rows * (rank + 1) // size, rows)
        return Slice(
            slice_rows(data, start, stop - start),
            rows,
            fewest_rows=tf.where(enough, rows // size, rows),
            copies=tf.cast(tf.where(enough, 1, size), tf.float64),
        )

    def _checked(self, data, rows):
        """The batch, once it is known to be that of the other processes."""
        if self._engine.size == 1:
            return data
        tensors = tf.nest.flatten(data, expand_composites=True)
        sums = [_checksum(each) for each in tensors if each is not None]
        own = tf.stack([tf.cast(rows, tf.int64), *sums])
        highest = self._engine.all_reduce(
            tf.concat([own, -own], axis=0), "batch", "Max"
        )
        highest, negated_lowest = tf.split(highest, 2)
        same = tf.reduce_all(highest == -negated_lowest)
        check = tf.debugging.Assert(
            same,
            [
                "All processes must be given the same batches, in the same "
                "order. Received: batches that differ. Seed what shuffles "
                "the data alike in all processes, and give each of them all "
                "of the data: every one takes its rows of a batch by itself."
            ],
        )
        with tf.control_dependencies([] if check is None else [check]):
            return tf.nest.map_structure(
                lambda each: None if each is None else tf.identity(each),
                data,
                expand_composites=True,
            )

    def add_up(self, tensors, variables, batch):
        is_cut = [isinstance(v, ShardedVariable) for v in variables]
        small = [t for t, cut in zip(tensors, is_cut, strict=True) if not cut]
        totals = iter(self._total(small, "logs"))
        sums = [
            tensor if cut else next(totals)
            for tensor, cut in zip(tensors, is_cut, strict=True)
        ]
        if not self._later:
            sums = self._cut(sums, variables)
        return [_divided(tensor, batch.copies) for tensor in sums]

    def add_up_group(self, gradients, variables):
        return self._cut(gradients, variables) if self._later else gradients

    def _cut(self, gradients, variables) -> list:
        """Of whole gradients the sums over all processes, cut."""
        pairs = list(zip(gradients, variables, strict=True))
        # The last layer's first, as a backward pass makes them: a graph sends
        # them in this order, and can then free them as they are made.
        shards = [
            gathering.scatter(variable.shard, gradient)
            if gradient is not None and self._is_whole(variable)
            else gradient
            for gradient, variable in reversed(pairs)
        ]
        return shards[::-1]

    @contextlib.contextmanager
    def sharing_state(self, model, batch):
        statistics = [
            variable
            for variable in model.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
            and not isinstance(variable, ShardedVariable)
        ]
        before = {
            id(variable): tf.identity(variable.value)
            for variable in (*statistics, *model.metrics_variables)
        }
        assigned: dict[int, Any] = {}

        def noted(variable, assign, value):
            assigned[id(variable)] = variable
            assign(value)

        with patching.together(
            patching.method(
                each, private_keras.ASSIGN, functools.partial(noted, each)
            )
            for each in statistics
        ):
            yield
        own = num_rows(batch.data)
        share = tf.cast(own, tf.float64) / tf.cast(batch.rows, tf.float64)
        changed = [(v, share) for v in assigned.values()]
        changed += [(v, 1) for v in model.metrics_variables]
        olds = [tf.cast(before[id(v)], tf.float64) for v, _ in changed]
        changes = [
            (tf.cast(v.value, tf.float64) - old) * weight
            for (v, weight), old in zip(changed, olds, strict=True)
        ]
        totals = self._total(changes, "state")
        for (v, _), old, total in zip(changed, olds, totals, strict=True):
            v.assign(tf.cast(old + total / batch.copies, v.dtype))

    def weighing(self, share, update):
        return gathering.weighed(lambda: None if update.sums_rows else share)

    def counting(self):
        return gathering.without_values()

    def weighs_gradient(self, variable):
        return type(variable) is ShardedVariable

    def gradient_shape(self, variable):
        if not isinstance(variable, ShardedVariable):
            return variable.shape
        layout = variable.shard.layout
        return layout.shape if self._is_whole(variable) else (layout.length,)

    def summed_shape(self, variable):
        if self._later:
            return self.gradient_shape(variable)
        return variable.shape

    def _is_whole(self, variable) -> bool:
        """Whether processes add up a gradient after it was made."""
        if not isinstance(variable, ShardedVariable):
            return False
        mirrored = isinstance(variable, MirroredVariable)
        return mirrored or not variable.shard.travel.reduces

    def _total(self, tensors: list, name: str) -> list:
        """The sums of small tensors, in one call."""
        if not tensors or self._engine.size == 1:
            return tensors
        tensors = list(map(tf.convert_to_tensor, tensors))
        flat = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in tensors]
        total = self._engine.all_reduce(tf.concat(flat, axis=0), name)
        totals = tf.split(total, [np.prod(t.shape, dtype=int) for t in tensors])
        return [
            tf.cast(tf.reshape(total, t.shape), t.dtype)
            for total, t in zip(totals, tensors, strict=True)
        ]


def synchronized(engine: Engine) -> patching.Context:
    """Within, layers add up over the processes, as over a strategy's replicas.

    Keras's synchronized batch normalization, and layers of one's own, ask
    `tf.distribute.get_replica_context()` for that. The gradient of a sum is
    the sum of the gradients that the processes have for it, each with its
    share of the batch.
    """

    def total(tensor):
        def gradient(of_sum):
            weight = gathering.weight()
            if weight is None:
                return link(of_sum)
            weight = tf.cast(weight, of_sum.dtype)
            # The weights' gradients will count with this process's own.
            return link(of_sum * weight) / weight

        return engine.all_reduce(tensor, "replicas"), gradient

    link: Any = tf.custom_gradient(total)

    def all_reduce(reduce_op, value, options=None):
        is_mean = reduce_op in (tf.distribute.ReduceOp.MEAN, "MEAN")
        scale = engine.size if is_mean else 1
        return tf.nest.map_structure(
            lambda tensor: link(tf.convert_to_tensor(tensor)) / scale, value
        )

    # The one that there is without a strategy.
    replica = tf.distribute.get_replica_context()
    return patching.attribute(replica, "all_reduce", all_reduce)


def agree_on_seed(engine: Engine) -> None:
    """Sets TensorFlow's seed to that of process 0, unless all have it."""
    if engine.size == 1:
        return
    own = private_tf.global_seed()
    seeds = engine.gather(tf.constant([-1 if own is None else own]), "seed")
    values = set(seeds.numpy().ravel())
    if len(values) > 1 or -1 in values:
        drawn = tf.constant([random.randrange(2**31)])
        tf.random.set_seed(int(engine.broadcast(drawn, "seed")[0]))


@contextlib.contextmanager
def seeded(model, engine: Engine) -> Iterator[None]:
    """Within, layers draw other random numbers in each process."""
    _turn(model, engine.rank * _STEP)
    try:
        yield
    finally:
        _turn(model, -engine.rank * _STEP)


def _turn(model, step: int) -> None:
    for variable in model.variables if step else ():
        # Of a `keras.random.SeedGenerator`: a seed, and how often it was used.
        if variable.name == "seed_generator_state":
            value = variable.numpy().astype(np.int64)
            value[0] += step
            variable.assign(value.astype(variable.dtype))


def _divided(tensor, copies):
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) / copies, tensor.dtype)
    return tensor / tf.cast(copies, tensor.dtype)


def _checksum(tensor: tf.Tensor) -> tf.Tensor:
    """A number that depends on every row, and on the order of the rows."""
    if tensor.dtype == tf.string:
        tensor = tf.strings.to_hash_bucket_fast(tensor, 2**31)
    elif tensor.dtype.is_floating:
        # The bits: sums of integers do not round.
        kinds = {2: tf.int16, 4: tf.int32, 8: tf.int64}
        tensor = tf.bitcast(tensor, kinds[tensor.dtype.size])
    tensor = tf.cast(tensor, tf.int64 if tensor.dtype.size == 8 else tf.int32)
    axes = tf.range(1, tf.maximum(tf.rank(tensor), 1))
    rows = tf.reshape(tf.cast(tf.reduce_sum(tensor, axes), tf.int64), [-1])
    positions = tf.range(1, tf.size(rows, tf.int64) + 1, dtype=tf.int64)
    # Small enough to be negated, for any sums.
    return tf.reduce_sum(rows * positions) // 2
