"""A model in shards: while it is trained, or from when it is built.

While training lasts the model's weights, frozen ones too, and the optimizer's
variables are shards. Scalars, what layers assign themselves, and the smallest
weights stay whole: to gather a bias takes about as long as to gather a kernel.
When it ends they are gathered, one after another, and every process has the
whole model.

Validation and prediction run in every process on all rows, a layer's weights
at a time: any metric is exact then, and every process has every prediction.
They take as long as in one process.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable

import keras
import tensorflow as tf

from kmem.base import private_keras
from kmem.base.patching import Context
from kmem.base.patching import attribute
from kmem.base.patching import together
from kmem.options import Sharding
from kmem.sharding import slices
from kmem.sharding import units
from kmem.sharding import variables
from kmem.sharding.engine import engine
from kmem.sharding.gathering import Travel
from kmem.sharding.slices import Slices
from kmem.sharding.updating import ShardedOptimizer
from kmem.sharding.variables import MirroredVariable
from kmem.sharding.variables import ShardedVariable
from kmem.step.mechanism import Mechanism

# Of what a process holds, what may be whole.
_WHOLE = 0.005


class ShardedTraining(Mechanism):
    """A model's training under `kmem.Sharding`: it changes the model's
    variables, and how its layers come to their weights."""

    kinds = ("train", "test", "predict")
    between_steps = True

    def __init__(
        self, model: keras.Model, optimizer, option: Sharding, num_batches: int
    ):
        self._model = model
        self._optimizer = optimizer
        self._option = option
        self._engine = engine()
        self._home = self._engine.host if option.cpu_offload else None
        self._updates = ShardedOptimizer(
            optimizer, model, self._engine, self._home
        )
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
        slices.agree_on_seed(self._engine)
        mirrored = self._option.stage == "optimizer"
        weights = self._cut(_weights(self._model))
        for number, variable in enumerate(weights):
            if not isinstance(variable, ShardedVariable):
                variables.shard(
                    *(variable, self._engine, f"weight {number}"),
                    *(mirrored, self._home, self._travel),
                )
            variable.shard.travel = self._travel
            variable.shard.local.trainable = variable.trainable
        self._updates.cut(self._cut)
        slots = self._cut(self._optimizer.variables)
        cut = {id(v) for v in (*weights, *slots)}
        rest = [*self._model.variables, *self._optimizer.variables]
        for number, variable in enumerate(rest):
            if id(variable) not in cut:
                value = tf.convert_to_tensor(variable.value)
                name = f"state {number}"
                variable.assign(self._engine.broadcast(value, name))
        self._during.enter_context(slices.seeded(self._model, self._engine))
        self._during.enter_context(self._updates.finalizing())

    def stop(self, failed: bool = False) -> None:
        """Makes the model whole again. All processes have to call it."""
        self._during.close()
        if not self.stays(failed):
            make_whole(self._model)

    def stays(self, failed: bool) -> bool:
        """Whether the model keeps its shards, as an error ended the training
        and others may be gone with theirs: who reads it takes part in
        gathering it."""
        return failed and self._engine.size > 1

    def wrapped(self, function: Callable) -> Callable:
        """A model's function, which may not wait for others for too long."""
        return self._engine.watching(self._model.steps_per_execution)(function)

    def computing(self, training: bool) -> Context:
        """Within, the model's layers gather their weights as they run."""
        keeps = not training or self._option.stage != "full"
        gathering = units.applied(self._units, keeps)
        return together((gathering, slices.synchronized(self._engine)))

    def updating(self):
        """A context: the optimizer is given shards."""
        return self._updates.updating()

    def _cut(self, variables: list) -> list:
        """Those that are shards while the model is trained."""
        return [
            variable
            for variable in variables
            if isinstance(variable, ShardedVariable)
            or math.prod(variable.shape) > self._most_whole
        ]


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
    """Checks that each process can train a model by itself."""
    if any(isinstance(variable, ShardedVariable) for variable in model.weights):
        raise ValueError(
            "A model that was built under `kmem.ShardedStrategy` must be "
            "trained with `sharding`. Received: sharding=None"
        )


def stored(variables: list) -> list:
    """What holds the values of Keras variables: shards, of those that are cut,
    which each process can read and assign by itself."""
    holders = []
    for variable in variables:
        is_cut = isinstance(variable, ShardedVariable)
        if not is_cut or isinstance(variable, MirroredVariable):
            holders.append(variable)
        # After the whole, which would be written to it with fewer digits.
        if is_cut and variable.holds_shard:
            holders.append(variable.shard.local)
    return holders


def _weights(model) -> list:
    """The weights of layers, frozen ones too."""
    weights = {
        id(variable): variable
        for layer in private_keras.all_layers(model)
        for variable in private_keras.own_weights(layer)
    }
    return list(weights.values())


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


class ShardedStrategy:
    """Processes that hold the shards of one model (FSDP, ZeRO).

    Making one joins the processes that TF_CONFIG names, so it comes before
    TensorFlow's first operation; processes that `kmem launch` has started have
    joined before. A model that is built in its scope is divided as
    it is built: a process holds its shards, and one layer's weight at a time.
    It stays in shards after `fit`. Reading a weight, calling the model and
    saving it take all processes then.

    A model that is made as usual needs no scope: it is divided when `fit`
    begins, and whole again when `fit` ends.

    Attributes:
        num_processes: The number of processes.
        rank: This one's number.

    Example:

    ```python
    import keras

    import kmem

    strategy = kmem.ShardedStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = keras.random.normal((64, 8)), keras.random.normal((64, 1))
    kmem.wrap(model).fit(x, y, sharding="full", verbose=0)
    ```
    """

    def __init__(self):
        self._engine = engine()
        self.num_processes = self._engine.size
        self.rank = self._engine.rank
        self._num_weights = 0

    def scope(self) -> Context:
        """Within, layers cut their weights as they make them.

        A model that is built later, by its first batch, is cut then, if that
        comes within the scope too.
        """
        add_weight = keras.layers.Layer.add_weight

        @functools.wraps(add_weight)
        def add_shard(layer, *args, **kwargs):
            variable = add_weight(layer, *args, **kwargs)
            has_values = private_keras.whole_of(variable) is not None
            if variable.trainable and has_values and len(variable.shape) > 0:
                name = f"weight {self._num_weights}"
                self._num_weights += 1
                variables.shard(variable, self._engine, name)
                variable.shard.stays = True
            return variable

        return attribute(keras.layers.Layer, "add_weight", add_shard)
