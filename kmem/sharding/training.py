"""A model's training in shards: begun, and ended again.

While it lasts the model's weights, frozen ones too, and the optimizer's
variables are shards. Scalars, what layers assign themselves, and the smallest
weights stay whole: to gather a bias takes about as long as to gather a kernel.
When it ends they are gathered, one after another, and every process has the
whole model.

Validation and prediction run in every process on all rows, a layer's weights
at a time: any metric is exact then, and every process has every prediction.
They take as long as in one process.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from collections.abc import Iterator

import keras
import tensorflow as tf

from kmem.options import Sharding
from kmem.sharding import replicas
from kmem.sharding import seeds
from kmem.sharding import units
from kmem.sharding import updating
from kmem.sharding import variables
from kmem.sharding.engine import engine
from kmem.sharding.gathering import Travel
from kmem.sharding.slices import Slices
from kmem.sharding.variables import MirroredVariable
from kmem.sharding.variables import ShardedVariable
from kmem.step.accumulation import build_optimizer
from kmem.step.capture import all_layers
from kmem.step.patching import attribute

# Of what a process holds, what may be whole.
_WHOLE = 0.005


class ShardedTraining:
    """A model's training under `kmem.Sharding`.

    Args:
        model: A compiled, built model.
        optimizer: The optimizer that trains it.
        option: How it is sharded.
        num_batches: The batches of an update.

    Attributes:
        slices: How batches are divided.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer,
        option: Sharding,
        num_batches: int,
    ):
        self._model = model
        self._optimizer = optimizer
        self._option = option
        self._engine = engine()
        self._home = self._engine.host if option.cpu_offload else None
        self._units = units.find(model, option.units)
        self._most_whole = _most_whole(_weights(model), self._engine.size)
        self._during = contextlib.ExitStack()
        self._travel = Travel(
            option.gather_dtype,
            option.reduce_dtype,
            reduces=option.accumulate == "sharded",
        )
        later = num_batches > 1 and not self._travel.reduces
        self.slices = Slices(self._engine, later)

    def start(self) -> None:
        """Makes shards of what process 0 has. All processes have to call it."""
        make_whole(self._model)
        seeds.agree(self._engine)
        mirrored = self._option.stage == "optimizer"
        weights = self._cut(_weights(self._model))
        for number, variable in enumerate(weights):
            if not isinstance(variable, ShardedVariable):
                name = f"weight {number}"
                variables.shard(
                    variable,
                    self._engine,
                    name,
                    mirrored,
                    self._home,
                    self._travel,
                )
            variable.shard.travel = self._travel
            variable.shard.local.trainable = variable.trainable
        self._shard_optimizer()
        slots = self._cut(self._optimizer.variables)
        known = {id(v) for v in (*weights, *slots)}
        rest = [*self._model.variables, *self._optimizer.variables]
        for number, variable in enumerate(rest):
            if id(variable) not in known:
                value = tf.convert_to_tensor(variable.value)
                name = f"state {number}"
                variable.assign(self._engine.broadcast(value, name))
        self._during.enter_context(seeds.turned(self._model, self._engine))
        self._during.enter_context(self._finalizing())

    def stop(self, failed: bool = False) -> None:
        """Makes the model whole again. All processes have to call it.

        Args:
            failed: Whether an error ended the training; see `is_left`.
        """
        self._during.close()
        if not self.is_left(failed):
            make_whole(self._model)

    def is_left(self, failed: bool) -> bool:
        """Whether the model keeps its shards, as an error ended the training
        and others may be gone with theirs: who reads it takes part in
        gathering it."""
        return failed and self._engine.size > 1

    def watched(self, function: Callable) -> Callable:
        """A model's function, which may not wait for others for too long."""
        return self._engine.watched(function, self._model.steps_per_execution)

    @contextlib.contextmanager
    def forward(self, training: bool) -> Iterator[None]:
        """Within, the model's layers gather their weights as they run."""
        keeps = not training or self._option.stage != "full"
        with (
            units.applied(self._units, keeps),
            replicas.synchronized(self._engine),
        ):
            yield

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Within, the optimizer is given shards."""
        apply = self._optimizer.apply

        def apply_to_shards(grads, trainable_variables=None):
            grads = list(grads)
            weights = trainable_variables or self._model.trainable_variables
            pairs = zip(grads, weights, strict=True)
            known = [(g, v) for g, v in pairs if g is not None]
            with (
                updating.of_all(
                    self._optimizer, self._engine, [v for _, v in known]
                ),
                self._updated([g for g, _ in known]),
            ):
                apply(grads, trainable_variables)

        with (
            variables.as_shards(),
            attribute(self._optimizer, "apply", apply_to_shards),
            self._at_home(),
        ):
            yield

    def _updated(self, after=()):
        """A context: weights that stay whole are made anew of shards."""
        mirrored = [
            variable
            for variable in self._model.trainable_variables
            if isinstance(variable, MirroredVariable)
        ]
        return variables.updated(mirrored, "publish", after)

    def _at_home(self):
        """A context: operations run where the shards are."""
        return tf.device(self._home) if self._home else contextlib.nullcontext()

    def _finalizing(self):
        """Lets Keras put averages in the place of weights, at the end."""
        optimizer = self._model.optimizer
        finalize = optimizer.finalize_variable_values

        def finalize_shards(weights):
            with self.updating(), self._updated():
                finalize(weights)

        return attribute(optimizer, "finalize_variable_values", finalize_shards)

    def _cut(self, variables: list) -> list:
        """Those that are shards while the model is trained."""
        return [
            variable
            for variable in variables
            if isinstance(variable, ShardedVariable)
            or math.prod(variable.shape) > self._most_whole
        ]

    def _shard_optimizer(self) -> None:
        optimizer = self._optimizer
        if optimizer.built:
            for number, variable in enumerate(self._cut(optimizer.variables)):
                if not isinstance(variable, ShardedVariable):
                    name = f"slot {number}"
                    variables.shard(
                        variable, self._engine, name, home=self._home
                    )
            return
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        make = inner.add_variable_from_reference
        made = []

        def make_shard(reference_variable, *args, **kwargs):
            variable = make(reference_variable, *args, **kwargs)
            if isinstance(reference_variable, ShardedVariable):
                made.append((variable, reference_variable.shard))
            return variable

        with (
            variables.as_shards(),
            self._at_home(),
            attribute(inner, "add_variable_from_reference", make_shard),
        ):
            build_optimizer(optimizer, self._model.trainable_variables)
        for number, (variable, reference) in enumerate(made):
            name = f"slot {number}"
            variables.adopt(variable, reference, name, self._home)


def make_whole(model: keras.Model) -> None:
    """Gathers what a `fit` has cut, one variable after another.

    Nothing, before the next `fit`, unless an error ended that one.
    """
    optimizer = getattr(model, "optimizer", None)
    slots = optimizer.variables if optimizer else []
    for variable in (*slots, *_weights(model)):
        if isinstance(variable, ShardedVariable) and not variable.shard.stays:
            variables.restore(variable)


def check_whole(model: keras.Model) -> None:
    """Checks that each process can train a model by itself.

    Raises:
        ValueError: If it was built in shards.
    """
    if any(isinstance(variable, ShardedVariable) for variable in model.weights):
        raise ValueError(
            "A model that was built under `kmem.ShardedStrategy` must be "
            "trained with `sharding`. Received: sharding=None"
        )


def stored(variables: list) -> list:
    """What holds the values of Keras variables: shards, of those that are cut,
    which each process can read and assign by itself."""
    found = []
    for variable in variables:
        if not isinstance(variable, ShardedVariable):
            found.append(variable)
            continue
        if isinstance(variable, MirroredVariable):
            found.append(variable)
        # After the whole, which would be written to it with fewer digits.
        if variable.holds_shard:
            found.append(variable.shard.local)
    return found


def _weights(model) -> list:
    """The weights of layers, frozen ones too.

    `_trainable_variables` is private in Keras: the weights of a layer itself,
    whether it is frozen or not. test_sharding.py fails if it moves.
    """
    found = {
        id(variable): variable
        for layer in all_layers(model)
        for variable in layer._trainable_variables
    }
    return list(found.values())


def _most_whole(weights: list, size: int) -> int:
    """The number of elements up to which arrays stay whole in each process.

    They are half a percent of a shard, together, at the most; slots have the
    shapes of weights. What was built in shards stays in them.
    """
    if any(isinstance(v, ShardedVariable) for v in weights):
        return 1
    counts = sorted(math.prod(v.shape) for v in weights)
    most, total = 1, 0
    for count, same in itertools.groupby(counts):
        total += sum(same)
        if total > _WHOLE * sum(counts) / size:
            break
        most = max(most, count)
    return most
