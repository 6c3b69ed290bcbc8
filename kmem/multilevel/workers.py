"""What computes a batch of a level: a process, its replicas, or several of it.

Each replica of a `tf.distribute` strategy takes equally many examples, and
what a pass gives is the mean over them. Each of several processes takes its
examples of every batch, and a loss counts there with their share of all: the
derivatives, of any order, are those of the sum over the processes. Weights and
the optimizer's variables are in shards, gradients and the vectors of solvers as
well, and a layer gathers its weights when it runs (kmem/sharding). What stays
whole is added up when a pass ends. What this module does not do: give shards to
what looks back at updates, which are `Unrolled` and `SAMA`.
"""

import contextlib
import dataclasses
import itertools
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.multilevel.loss import assign
from kmem.multilevel.loss import read
from kmem.options import Sharding
from kmem.sharding import gathering
from kmem.sharding import refusals
from kmem.sharding import slices
from kmem.sharding import training
from kmem.sharding import units
from kmem.sharding import variables as shards
from kmem.sharding.engine import engine
from kmem.sharding.gathering import LARGE_BYTES
from kmem.sharding.slices import Slices
from kmem.step import accumulation
from kmem.step.parts import Alone
from kmem.step.parts import Slice
from kmem.step.parts import num_rows


class OneProcess(Alone):
    """One process, or the replicas of a strategy."""

    def passing(self, assigned: list, batch: Slice) -> patching.Context:
        """The context of a pass through some examples, in which a loss
        assigns variables."""
        return contextlib.nullcontext()

    def computing(self, backward: bool = True) -> patching.Context:
        """The context in which models are called, and, if `backward`, their
        gradients are computed."""
        return contextlib.nullcontext()

    def total(self, tensors: list, wrt: list) -> list:
        """The sums over all processes of what a pass gives: gradients with
        regard to `wrt`, and what comes after them."""
        return tensors

    def dot(self, a: list, b: list, variables: list) -> tf.Tensor:
        """The inner product of two lists of tensors, one for each variable."""
        return tf.add_n(_products(a, b))

    def apply(self, optimizer, gradients: list, variables: list) -> None:
        """Updates variables by their gradients."""
        # The same on all replicas already.
        with accumulation.without_reduction(optimizer):
            optimizer.apply(gradients, variables)


class SeveralProcesses(Slices, OneProcess):
    """Processes that compute every batch of a level together.

    Args:
        trained: The level's training.
        models: All models of the program.
        keeps: Whether what a layer gathers stays for the backward pass.
    """

    def __init__(
        self, trained: training.ShardedTraining, models: list, keeps: bool
    ):
        super().__init__(engine())
        self._trained = trained
        self._keeps = keeps
        found = (each for model in models for each in units.find(model, None))
        self._units = list(dict.fromkeys(found))
        self._shards = {
            id(variable.shard.local)
            for model in models
            for variable in model.weights
            if isinstance(variable, shards.ShardedVariable)
        }

    @contextlib.contextmanager
    def passing(self, assigned, batch):
        statistics = [v for v in assigned if tf.as_dtype(v.dtype).is_floating]
        before = read(statistics)
        yield
        share = num_rows(batch.data)
        share = tf.cast(share, tf.float64) / num_counted(batch)
        changes = [
            (after - old) * tf.cast(share, old.dtype)
            for old, after in zip(before, read(statistics), strict=True)
        ]
        totals = self.total(changes, [])
        assign(statistics, list(map(tf.add, before, totals)))

    def computing(self, backward=True):
        contexts = [
            units.applied(self._units, self._keeps or not backward),
            slices.synchronized(self._engine),
        ]
        if backward:
            contexts.append(gathering.as_given())
        return patching.together(contexts)

    def total(self, tensors, wrt):
        sums, small = list(tensors), []
        for i, tensor in enumerate(tensors):
            if i < len(wrt) and id(wrt[i]) in self._shards:
                continue
            if tensor.shape.num_elements() * tensor.dtype.size < LARGE_BYTES:
                small.append(i)
            else:
                sums[i] = self._engine.all_reduce(tensor, f"large {i}")
        totals = self._total([sums[i] for i in small], "small")
        for i, total in zip(small, totals, strict=True):
            sums[i] = total
        return sums

    def dot(self, a, b, variables):
        products = list(zip(_products(a, b), variables, strict=True))
        whole = [p for p, v in products if id(v) not in self._shards]
        parts = [p for p, v in products if id(v) in self._shards]
        if parts:
            whole += self._total([tf.add_n(parts)], "dot")
        return tf.add_n(whole)

    def apply(self, optimizer, gradients, variables):
        own = [
            v.shard.layout.cut(g, v.shard.rank)
            if isinstance(v, shards.MirroredVariable)
            else g
            for g, v in zip(gradients, variables, strict=True)
        ]
        with self._trained.updating():
            optimizer.apply(own, variables)


def num_counted(batch: Slice) -> tf.Tensor:
    """The rows of a batch, each as often as it is computed."""
    rows = tf.cast(batch.rows, tf.float64)
    return rows if batch.copies is None else rows * batch.copies


def _products(a: list, b: list) -> list[tf.Tensor]:
    return [tf.reduce_sum(x * y) for x, y in zip(a, b, strict=True)]


def check(program: keras.Model, levels: list, option: Sharding) -> None:
    """Checks whether levels can be trained in shards."""
    plain = Sharding(stage=option.stage, cpu_offload=option.cpu_offload)
    if option != plain:
        raise ValueError(
            "`sharding` of a `Program` must have no other setting than "
            f"`cpu_offload` beside its name. Received: sharding={option}"
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
                "optimizers, which are in shards. "
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
def in_shards(structure: Any, option: Sharding):
    """Within, the processes that TF_CONFIG names train levels together."""
    levels, trained = structure.levels, []
    with contextlib.ExitStack() as stack:
        for level, optimizer in zip(levels, structure.optimizers, strict=True):
            replaced = patching.attribute(level.model, "optimizer", optimizer)
            stack.enter_context(replaced)
            trained.append(
                training.ShardedTraining(
                    level.model, optimizer, option, num_batches=1
                )
            )
        for each in trained:
            each.start()
            stack.push(lambda error, *_, each=each: each.stop(bool(error)))
        _cut_guesses(structure)

        def restore(error, *_):
            if not trained[0].stays(bool(error)):
                _restore_guesses(structure)

        stack.push(restore)
        models = [level.model for level in levels]
        for level, each in zip(levels, trained, strict=True):
            stack.callback(setattr, level, "workers", level.workers)
            level.workers = SeveralProcesses(
                each, models, keeps=option.stage != "full"
            )
        yield


def _cut_guesses(structure: Any) -> None:
    """Cuts what solvers have kept as the weights are cut that it is for."""
    for number, (path, guess) in enumerate(structure.guesses.items()):
        weights = structure.levels[path[-1]].model.trainable_variables
        for i, (weight, own) in enumerate(zip(weights, guess, strict=True)):
            if type(weight) is shards.ShardedVariable:
                shards.shard(own, engine(), f"guess {number}/{i}")


def _restore_guesses(structure: Any) -> None:
    for variable in itertools.chain(*structure.guesses.values()):
        if isinstance(variable, shards.ShardedVariable):
            shards.restore(variable)


def make_whole(structure: Any) -> None:
    """Gathers what a `fit` that failed has left in shards."""
    pairs = zip(structure.levels, structure.optimizers, strict=True)
    for level, optimizer in pairs:
        with patching.attribute(level.model, "optimizer", optimizer):
            training.make_whole(level.model)
    _restore_guesses(structure)


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
