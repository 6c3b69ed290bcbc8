"""What computes a batch of a level: a process, its replicas, or several of it.

Each replica of a `tf.distribute` strategy takes equally many examples, and
what a pass gives is the mean over them. Each of several processes takes its
examples of every batch, and what a pass gives is added up over all of them:
losses, gradients and products with second derivatives are the whole batch's
in every process. Weights and the optimizer's variables are in shards between
passes (kmem/sharding); a pass reads whole weights, which are gathered when it
begins. What this module does not do: gather weights layer by layer, as single
models can. A second derivative would have to go through the gathering, whose
gradient is cut.
"""

import contextlib
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.multilevel.loss import assign
from kmem.multilevel.loss import read
from kmem.options import Sharding
from kmem.sharding import refusals
from kmem.sharding import training
from kmem.sharding import variables as shards
from kmem.sharding.engine import engine
from kmem.sharding.gathering import LARGE_BYTES
from kmem.sharding.gathering import gathered
from kmem.sharding.slices import Slices
from kmem.step import accumulation
from kmem.step.parts import Alone
from kmem.step.parts import Slice
from kmem.step.parts import num_rows


class OneProcess(Alone):
    """One process, or the replicas of a strategy."""

    def passing(self, assigned: list, batch: Slice):
        """The context of a pass through some examples, in which a loss
        assigns variables."""
        return contextlib.nullcontext()

    def total(self, tensors: list, batch: Slice) -> list:
        """The sums over all processes of what a pass gives."""
        return tensors

    def apply(self, optimizer, gradients: list, variables: list) -> None:
        """Updates variables by their whole gradients."""
        # The same on all replicas already.
        with accumulation.without_reduction(optimizer):
            optimizer.apply(gradients, variables)


class SeveralProcesses(Slices, OneProcess):
    """Processes that compute every batch of a level together.

    Args:
        weights: All variables of the program.
    """

    def __init__(self, trained: training.ShardedTraining, weights: list):
        super().__init__(engine())
        self._trained = trained
        self._weights = weights

    @contextlib.contextmanager
    def passing(self, assigned, batch):
        statistics = [v for v in assigned if tf.as_dtype(v.dtype).is_floating]
        before = read(statistics)
        with self._gathered():
            yield
        share = tf.cast(num_rows(batch.data), tf.float64)
        share /= tf.cast(batch.rows, tf.float64)
        changes = [
            (after - old) * tf.cast(share, old.dtype)
            for old, after in zip(before, read(statistics), strict=True)
        ]
        totals = self.total(changes, batch)
        assign(statistics, list(map(tf.add, before, totals)))

    def total(self, tensors, batch):
        is_large = [
            t.shape.num_elements() * t.dtype.size >= LARGE_BYTES
            for t in tensors
        ]
        small = [t for t, it in zip(tensors, is_large, strict=True) if not it]
        totals = iter(self._total(small, "small"))
        sums = [
            self._engine.all_reduce(t, f"large {i}") if it else next(totals)
            for i, (t, it) in enumerate(zip(tensors, is_large, strict=True))
        ]
        copies: Any = batch.copies
        return [t / tf.cast(copies, t.dtype) for t in sums]

    def apply(self, optimizer, gradients, variables):
        own = [
            v.shard.layout.cut(g, v.shard.rank)
            if isinstance(v, shards.ShardedVariable)
            else g
            for g, v in zip(gradients, variables, strict=True)
        ]
        with self._trained.updating():
            optimizer.apply(own, variables)

    def _gathered(self):
        """Within, weights that are in shards are whole."""
        cut = [v for v in self._weights if type(v) is shards.ShardedVariable]
        if not cut:
            return contextlib.nullcontext()
        wholes = gathered([variable.shard for variable in cut], "weights")
        return shards.prepared(cut, wholes)


def check(program: keras.Model, levels: list, option: Sharding) -> None:
    """Checks whether levels can be trained in shards."""
    plain = Sharding(stage=option.stage, cpu_offload=option.cpu_offload)
    if option.stage == "full" or option != plain:
        raise ValueError(
            '`sharding` of a `Program` must be "gradients" or "optimizer", '
            "with no other setting than `cpu_offload`: second derivatives "
            'need whole weights, which "full" never has. '
            f"Received: sharding={option}"
        )
    if program.jit_compile:
        raise ValueError(
            "`sharding` sends weights between operators, and XLA cannot: call "
            "`program.compile(jit_compile=False)`. Received: jit_compile=True"
        )
    for level in levels:
        if level.start is not None or level.kept_steps:
            raise ValueError(
                "Under `sharding` a level must not have a `start`, "
                "`Unrolled()` or `SAMA()`: they need whole weights and "
                "optimizers, which are in shards between passes. "
                f"Received: level '{level.name}'"
            )
        remat = level.options.remat
        if remat is not None and not remat.plan and engine().size > 1:
            raise ValueError(
                "`remat` of a level must be a `kmem.Plan`, or the path of "
                "one, if several processes train together: what each of them "
                "measures would make plans that differ. "
                f"Received: level '{level.name}' with remat={remat}"
            )
        options = dataclasses.replace(level.options, sharding=option)
        with patching.attribute(level.model, "optimizer", level.optimizer):
            refusals.check(level.model, options)


@contextlib.contextmanager
def in_shards(levels: list, optimizers: list, option: Sharding):
    """Within, the processes that TF_CONFIG names train levels together."""
    weights = [v for level in levels for v in level.model.weights]
    with contextlib.ExitStack() as stack:
        trained = []
        for level, optimizer in zip(levels, optimizers, strict=True):
            replaced = patching.attribute(level.model, "optimizer", optimizer)
            stack.enter_context(replaced)
            trained.append(
                training.ShardedTraining(
                    level.model, optimizer, option, num_batches=1
                )
            )
        for level, each in zip(levels, trained, strict=True):
            each.start()
            stack.push(lambda error, *_, each=each: each.stop(bool(error)))
            stack.callback(setattr, level, "workers", level.workers)
            level.workers = SeveralProcesses(each, weights)
        yield


def make_whole(levels: list, optimizers: list) -> None:
    """Gathers what a `fit` that failed has left in shards."""
    for level, optimizer in zip(levels, optimizers, strict=True):
        with patching.attribute(level.model, "optimizer", optimizer):
            training.make_whole(level.model)
            training.check_whole(level.model)


def num_replicas() -> int:
    """Of the strategy that is in use here."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def mean_over_replicas(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """The mean over replicas, which have equally many examples."""
    if num_replicas() == 1:
        return tensors
    replica = tf.distribute.get_replica_context()
    means: dict[int, tf.Tensor] = {}
    # Those of one dtype are sent together.
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        numbers = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        sent = [tensors[i] for i in numbers]
        reduced = replica.all_reduce(tf.distribute.ReduceOp.MEAN, sent)
        means |= dict(zip(numbers, reduced, strict=True))
    return [means[i] for i in range(len(tensors))]
