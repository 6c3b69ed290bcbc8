"""Keras variables of which this process holds a shard.

A `keras.Variable` that exists is given another class: every layer and every
optimizer that knows it goes on as before. It has two faces. Outside of an
update it is the whole array: who reads it takes part in gathering it, so all
processes have to. Within `as_shards` it is this process's shard, a vector:
Keras's own optimizers then update the shard, and what they make for it is a
vector too.

Its TensorFlow variable keeps its identity, for the functions that were traced
with it, but no memory; `restore` gives it its values back.
"""

import contextlib
import contextvars
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import tensorflow as tf

from kmem.base import private_keras
from kmem.base import private_tf
from kmem.base.patching import setting
from kmem.base.private_keras import whole_of
from kmem.sharding.engine import Engine
from kmem.sharding.gathering import Layout
from kmem.sharding.gathering import Shard
from kmem.sharding.gathering import Travel
from kmem.sharding.gathering import gathered
from kmem.sharding.gathering import put

_shards = contextvars.ContextVar("shards", default=False)
# The whole arrays of the layers that are running, by the variables' `id`.
_prepared: contextvars.ContextVar[dict[int, tf.Tensor]] = (
    contextvars.ContextVar("prepared", default={})  # noqa: B039
)


def as_shards():
    """Within, sharded variables are their shards."""
    return setting(_shards, True)


def prepared(variables: Iterable["ShardedVariable"], wholes: list[tf.Tensor]):
    """Within, who reads these variables is given these tensors."""
    values = dict(zip(map(id, variables), wholes, strict=True))
    return setting(_prepared, _prepared.get() | values)


class ShardedVariable(private_keras.Variable):
    """A variable that is a shard in memory, made by `shard` of one that
    exists."""

    shard: Shard

    @property
    def held(self):
        if _shards.get():
            return self.shard.variable
        whole = _prepared.get().get(id(self))
        if whole is None:
            return self.read_whole()
        # So that custom gradients find what they read: the shard.
        tf.convert_to_tensor(self.shard.local.value)
        return whole

    def read_whole(self):
        return self.shard.read_full()

    @property
    def held_shape(self):
        layout = self.shard.layout
        return (layout.length,) if _shards.get() else layout.shape

    @property
    def holds_shard(self) -> bool:
        """Whether the shard is there between the steps."""
        return True

    @property
    def numbers(self) -> tf.Tensor:
        """The shard's numbers, a vector, whatever it is now."""
        return tf.convert_to_tensor(self.shard.variable)

    @property
    def value(self):
        # Not the value that a `StatelessScope` has: it has the shard's.
        value = self.autocast_value(self.held)
        # Optimizers know a variable by it.
        private_tf.set_identity(value, private_tf.identity_of(whole_of(self)))
        return value

    @property
    def handle(self):
        return self.shard.variable.handle

    def assign(self, value):
        if self.trainable and id(self) in _prepared.get():
            raise ValueError(
                "`sharding` gathers a layer's weights before it is called, "
                "and cannot train one that assigns them in its `call`, as "
                '`SpectralNormalization` does: use `sharding="optimizer"`. '
                f"Received: an assignment to {self.path}"
            )
        return super().assign(value)

    def put(self, value):
        value = tf.cast(value, self.shard.variable.dtype)
        if _shards.get():
            self.shard.variable.assign(value)
        else:
            self.shard.write_full(value)

    def __repr__(self):
        # Without the value, which takes all processes.
        return (
            f"<ShardedVariable path={self.path}, shape={self.shape}, "
            f"dtype={self.dtype}, shard={self.shard.rank} of "
            f"{self.shard.layout.count}>"
        )


class MirroredVariable(ShardedVariable):
    """A variable that is whole in every process, and a shard in `updated`.

    It has the shard all the time if the whole is rounded as it travels.
    """

    def read_whole(self):
        return whole_of(self)

    @property
    def value(self):
        if _shards.get():
            return self.held
        return super(ShardedVariable, self).value

    @property
    def handle(self):
        return (self.shard.variable if _shards.get() else whole_of(self)).handle

    @property
    def numbers(self):
        if self.holds_shard:
            return super().numbers
        whole = whole_of(self)
        # Less than all of it may go to the shard's home.
        with tf.device(whole.device):
            return self.shard.layout.cut(whole, self.shard.rank)

    @property
    def holds_shard(self) -> bool:
        # It has digits that the whole has not.
        return self.shard.travel.gather_dtype is not None

    def put(self, value):
        if _shards.get() or self.holds_shard:
            super().put(value)
        if not _shards.get():
            whole_of(self).assign(value)


def shard(
    variable,
    engine: Engine,
    name: str,
    mirrored: bool = False,
    home: str | None = None,
    travel: Travel | None = None,
) -> None:
    """Makes a Keras variable a sharded one, with the values of process 0.

    Args:
        variable: A `keras.Variable` that has a value.
        name: What names it in all processes.
        mirrored: Whether it stays whole.
    """
    whole = whole_of(variable)
    value = engine.broadcast(tf.convert_to_tensor(whole), f"{name}/broadcast")
    # Functions that were traced in an earlier `fit` know that one's shard.
    shards = vars(variable).setdefault("_kmem_shards", {})
    own = shards.get(home)
    if own is None:
        shape = tuple(whole.shape)
        cut = Layout(shape, engine.size).cut(value, engine.rank)
        own = Shard(engine, variable, shape, cut, name, home)
        # Optimizers know a variable by it.
        identity = private_tf.identity_of(whole)
        private_tf.set_identity(own.variable, identity)
        shards[home] = own
    else:
        own.write_full(value)
    own.travel = travel or Travel()
    variable.shard = own
    variable.__class__ = MirroredVariable if mirrored else ShardedVariable
    if not mirrored:
        _empty(whole)
        return
    whole.assign(value)
    if not variable.holds_shard:
        _empty(own.variable)


def adopt(
    variable, reference: Shard, name: str, home: str | None = None
) -> None:
    """Makes a Keras variable that was made `as_shards` a sharded one.

    Args:
        variable: A `keras.Variable`, a vector.
        reference: The shard that it was made for.
    """
    shape = reference.layout.shape
    vector = whole_of(variable)
    values = tf.convert_to_tensor(vector)
    own = Shard(reference.engine, variable, shape, values, name, home)
    own.stays = reference.stays
    whole = tf.Variable(
        tf.zeros(shape, vector.dtype), trainable=False, name=variable.name
    )
    _empty(whole)
    private_keras.replace_whole(variable, whole)
    vars(variable).update(shard=own, _kmem_shards={home: own})
    variable.__class__ = ShardedVariable


@contextlib.contextmanager
def updated(mirrored: list, after: Sequence[tf.Tensor] = ()) -> Iterator[None]:
    """Within, mirrored variables have shards; of them they are made anew.

    Args:
        mirrored: The variables, which all processes give in one order.
        after: Tensors to wait for, in a graph.
    """
    for variable in mirrored:
        if not variable.holds_shard:
            with tf.control_dependencies(after):
                put(variable.shard.variable, variable.numbers)
    yield
    if not mirrored:
        return
    wholes = gathered([variable.shard for variable in mirrored], "publish")
    for variable, whole in zip(mirrored, wholes, strict=True):
        whole_of(variable).assign(whole)
        if not variable.holds_shard:
            _empty(variable.shard.variable)


def holders(variable) -> list[tf.Variable]:
    """The `tf.Variable`s that hold the value of a variable, Keras's or
    TensorFlow's: of replicas and shards too."""
    shards = vars(variable).get("_kmem_shards", {}).values()
    if isinstance(variable, keras.Variable):
        variable = whole_of(variable)
    replicas = getattr(variable, "values", [variable])
    return [*replicas, *(each.variable for each in shards)]


def restore(variable) -> None:
    """Makes a sharded variable a plain one; all processes have to."""
    whole = whole_of(variable)
    if variable.holds_shard:
        put(whole, variable.shard.read_full())
    variable.__class__ = keras.Variable
    _empty(variable.shard.variable)


def _empty(variable: tf.Variable) -> None:
    """Frees a variable's memory, whatever functions were traced with it."""
    nothing = tf.zeros([0], variable.dtype)
    # A graph would see that it is no value for this variable.
    put(variable, tf.raw_ops.PlaceholderWithDefault(input=nothing, shape=None))
