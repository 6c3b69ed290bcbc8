"""A process's shard of a variable, and whole arrays of several of them."""

import contextlib
import dataclasses
from collections.abc import Sequence

import keras
import tensorflow as tf

from kmem.sharding import gathering
from kmem.sharding.engine import Engine
from kmem.sharding.gathering import Travel
from kmem.sharding.layout import Layout


class Shard:
    """This process's shard of a variable.

    Args:
        engine: The processes.
        path: The variable's path.
        shape: Its shape.
        value: The shard's values, a vector of `layout.length`.
        trainable: Whether a gradient is wanted.
        name: What names the variable in all processes. Not its path, which
            counts the layers that a process has made.
        home: The device that holds the shard; by default it is the usual one.

    Attributes:
        path: The variable's path.
        layout: Its shape, and how it is cut.
        rank: Which shard this is.
        local: The shard, a `keras.Variable` of `[layout.length]`.
        travel: The dtypes in which it travels.
        home: The device that holds the shard, or `None`.
        stays: Whether it is a shard before and after training too.
    """

    def __init__(
        self,
        engine: Engine,
        path: str,
        shape: tuple[int, ...],
        value: tf.Tensor,
        trainable: bool,
        name: str,
        home: str | None = None,
    ):
        self.engine = engine
        self.path = path
        self.layout = Layout(shape, engine.size)
        self.rank = engine.rank
        self.name = name
        self.home = home
        self.travel = Travel()
        self.stays = False
        with tf.device(home) if home else contextlib.nullcontext():
            self.local = keras.Variable(
                tf.identity(value),
                dtype=value.dtype.name,
                autocast=False,
                name="shard",
            )
        # To TensorFlow it is trainable in any case: layers are unfrozen.
        self.local.trainable = trainable

    @property
    def variable(self) -> tf.Variable:
        """The shard in TensorFlow."""
        # Private in Keras; see `kmem.step.capture.DiscardedState`.
        return self.local._value

    @property
    def value(self) -> tf.Tensor:
        """The shard's value, where a step may have put another one."""
        value = self.local.value
        return value if self.local.trainable else tf.stop_gradient(value)

    def read_full(self) -> tf.Tensor:
        """The whole array, in its own dtype. All processes have to call it."""
        travel = dataclasses.replace(self.travel, gather_dtype=None)
        try:
            (whole,) = gathered([self], self.name, travel=travel)
        except tf.errors.DeadlineExceededError as error:
            raise RuntimeError(
                "A variable that is in shards must be read by all processes "
                "together; so must a model that is saved or called. Received: "
                f"{self.path} in process {self.rank}, without some of the "
                "others. All processes have to be started again"
            ) from error
        return whole

    def write_full(self, whole: tf.Tensor) -> None:
        """Takes its part of a whole array, which all processes are given."""
        put(self.variable, self.layout.cut(whole, self.rank))


def gathered(
    shards: Sequence[Shard],
    name: str,
    after: Sequence[tf.Tensor] = (),
    travel: Travel | None = None,
) -> list[tf.Tensor]:
    """The whole arrays, whose gradients are those of the shards.

    Args:
        shards: The shards, of variables that all processes give in one order.
        name: What names the calls in all processes.
        after: Tensors to wait for, in a graph.
        travel: The dtypes to send; by default those of the shards.
    """
    first = shards[0]
    return gathering.Shards(
        first.engine,
        [shard.layout for shard in shards],
        [shard.value for shard in shards],
        name,
        travel or first.travel,
        [shard.variable for shard in shards] if first.home else None,
    ).gather(after)


def put(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value, whatever is there now."""
    # `assign` checks its shape against the one that is there.
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
