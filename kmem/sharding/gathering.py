"""Makes whole weights of shards, and shards of whole gradients.

The gradient of gathering is the sum over the processes, cut: what every
process gets is the gradient of its own shard. And the gradient of that is
gathering, so that there are derivatives of any order. Large arrays travel
alone, small ones together, as a call costs as much as some hundred kilobytes.

An array is cut flat, in equal lengths, padded with zeros: `[3, 5]` over 4
processes is 15 numbers in rows of 4, the last with one zero more. Every
variable is cut by itself, so that a weight and what an optimizer keeps for it
are cut alike, and an update number by number is the same on the shards as on
the whole.

In a graph TensorFlow would gather all weights at once. So whoever gathers
says what to wait for.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kmem.base import private_tf
from kmem.base.patching import setting
from kmem.base.private_keras import tf_variable
from kmem.graph.names import current_graph
from kmem.sharding.engine import Engine


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shards of an array."""

    shape: tuple[int, ...]
    count: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """The length of a shard."""
        return -(-self.num_elements // self.count)

    def rows(self, whole: tf.Tensor) -> tf.Tensor:
        """The array's shards, as the rows of a matrix."""
        flat = tf.reshape(whole, [-1])
        padding = self.count * self.length - self.num_elements
        if padding:
            flat = tf.pad(flat, [[0, padding]])
        return tf.reshape(flat, [self.count, self.length])

    def whole(self, rows: tf.Tensor) -> tf.Tensor:
        """The array of its shards."""
        flat = tf.reshape(rows, [-1])
        if flat.shape[0] != self.num_elements:
            flat = flat[: self.num_elements]
        return tf.reshape(flat, self.shape)

    def cut(self, whole: tf.Tensor, rank: int) -> tf.Tensor:
        """One shard, in memory of its own."""
        # A slice of rows would keep all of them.
        return tf.raw_ops.DeepCopy(x=self.rows(whole)[rank])


# Arrays of at least so many bytes travel alone.
LARGE_BYTES = 2**18

# What this process's gradients count in the sum; `None` counts them whole.
_weight: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
    "weight", default=None
)
# Whether a value that is given is sent, though it is not what is read now.
_as_given = contextvars.ContextVar("as_given", default=False)
# Takes the weights that are not to be known, in a trace that reads shapes.
_unknown: contextvars.ContextVar[list[tf.Tensor] | None] = (
    contextvars.ContextVar("unknown", default=None)
)


@dataclasses.dataclass(frozen=True)
class Travel:
    """How weights and gradients travel.

    Args:
        gather_dtype: The dtype in which weights do; `None` is their own.
        reduce_dtype: The dtype in which gradients do.
        reduces: Whether a gradient is added up, and cut, as it is made. Else
            it is the whole gradient of this process's rows.
    """

    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    reduces: bool = True


def weighed(get_weight: Callable[[], tf.Tensor | None]):
    """Gradients that are computed within count with a weight in their sum."""
    return setting(_weight, get_weight)


def weight() -> tf.Tensor | None:
    """What a gradient counts that is computed now; `None` is all."""
    get_weight = _weight.get()
    return None if get_weight is None else get_weight()


def as_given():
    """Within, the values of shards may be others than their variables'."""
    return setting(_as_given, True)


@contextlib.contextmanager
def without_values() -> Iterator[list[tf.Tensor]]:
    """Within, nothing is gathered in a graph: weights, which it lists, are not
    a number."""
    unknown: list[tf.Tensor] = []
    with setting(_unknown, unknown):
        yield unknown


class Shard:
    """This process's shard of a variable.

    Args:
        shape: The shape of the whole.
        value: The shard's values, a vector of `layout.length`.
        name: What names the variable in all processes. Not its path, which
            counts the layers that a process has made.
        home: The device that holds the shard; by default it is the usual one.

    Attributes:
        layout: Its shape, and how it is cut.
        local: The shard, a `keras.Variable` of `[layout.length]`.
        home: The device that holds the shard, or `None`.
        stays: Whether it is a shard before and after training too.
    """

    def __init__(
        self,
        engine: Engine,
        variable: keras.Variable,
        shape: tuple[int, ...],
        value: tf.Tensor,
        name: str,
        home: str | None = None,
    ):
        self.engine = engine
        self.path = variable.path
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
        self.local.trainable = variable.trainable

    @property
    def variable(self) -> tf.Variable:
        """The shard in TensorFlow."""
        return tf_variable(self.local)

    @property
    def value(self) -> tf.Tensor:
        """The shard's value, where a step may have put another one."""
        value = self.local.value
        return value if self.local.trainable else tf.stop_gradient(value)

    def read_full(self, travel: Travel | None = None) -> tf.Tensor:
        """The whole array, by default in its own dtype. All processes have to
        call it."""
        travel = travel or dataclasses.replace(self.travel, gather_dtype=None)
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
    travel = travel or shards[0].travel
    engine = shards[0].engine
    layouts = [shard.layout for shard in shards]
    values = [shard.value for shard in shards]
    unknown = _unknown.get()
    if unknown is not None and not tf.executing_eagerly():
        # Never run; but a step may look at its gradients.
        wholes = [
            tf.fill(layout.shape, float("nan") * tf.reduce_sum(value))
            for layout, value in zip(layouts, values, strict=True)
        ]
        unknown += wholes
        return wholes

    def gathered_together(positions):
        own = [values[i] for i in positions]
        cuts = [layouts[i] for i in positions]
        call = f"{name}/{positions[0]}"
        # Those of the graph that is traced.
        graph = current_graph()
        symbolic = filter(tf.is_symbolic_tensor, after)
        before = [tensor for tensor in symbolic if tensor.graph is graph]
        with tf.control_dependencies(before):
            read = [_read(shards[i], values[i]) for i in positions]
            wholes = _joined(engine, cuts, read, call, travel)
        return _with_gradient(wholes, engine, cuts, own, call, travel)

    return _in_calls(layouts, values, gathered_together)


def _read(shard: Shard, value: tf.Tensor) -> tf.Tensor:
    """What is sent of a shard, without a gradient.

    A shard on another device is copied when it is to be sent: a value that
    was read before would be copied at once, and be there, with all others,
    for the whole step.
    """
    if not shard.home or _as_given.get():
        return tf.stop_gradient(value)
    # By itself: it is the value given whose gradient is wanted.
    return tf.raw_ops.ReadVariableOp(
        resource=shard.variable.handle, dtype=value.dtype
    )


def scatter(shard: Shard, gradient: tf.Tensor) -> tf.Tensor:
    """Cuts the sum over the processes of a whole gradient."""
    name = f"{shard.name}/0"
    (own,) = _scattered(
        shard.engine, [shard.layout], [gradient], name, shard.travel
    )
    return own


def _scattered(engine, layouts, gradients, name, travel) -> list[tf.Tensor]:
    gradients = list(map(tf.convert_to_tensor, gradients))
    (dtype,) = {gradient.dtype for gradient in gradients}
    with private_tf.record.stop_recording():
        rows = [
            layout.rows(gradient)
            for layout, gradient in zip(layouts, gradients, strict=True)
        ]
        sent = tf.cast(tf.concat(rows, axis=-1), travel.reduce_dtype or dtype)
        shard = tf.cast(engine.reduce_scatter(sent, f"{name}/scatter"), dtype)
        shards = _split(shard, layouts)
    if not private_tf.record.should_record_backprop(gradients):
        return shards

    def gradient(*of_shards):
        wholes = _joined(engine, layouts, of_shards, name, travel)
        return _with_gradient(wholes, engine, layouts, of_shards, name, travel)

    link: Any = tf.custom_gradient(lambda *_: (shards, gradient))
    return link(*gradients)


def _joined(engine, layouts, shards, name, travel) -> list[tf.Tensor]:
    """The whole arrays of shards of one dtype, without a gradient."""
    dtype = shards[0].dtype
    with private_tf.record.stop_recording():
        sent = tf.concat(shards, axis=-1)
        sent = tf.cast(sent, travel.gather_dtype or dtype)
        rows = engine.gather(sent, f"{name}/gather")
        return [
            tf.cast(layout.whole(row), dtype)
            for layout, row in zip(layouts, _split(rows, layouts), strict=True)
        ]


def _with_gradient(wholes, engine, layouts, values, name, travel) -> list:
    """The whole arrays of some values, with the gradient of gathering."""

    def gradient(*gradients):
        share = weight()
        if share is not None:
            gradients = [
                tf.convert_to_tensor(g) * tf.cast(share, g.dtype)
                for g in gradients
            ]
        if not travel.reduces:
            return gradients
        return _scattered(engine, layouts, gradients, name, travel)

    link: Any = tf.custom_gradient(lambda *_: (wholes, gradient))
    return link(*values)


def _split(joined: tf.Tensor, layouts) -> list[tf.Tensor]:
    return tf.split(joined, [layout.length for layout in layouts], axis=-1)


def _in_calls(layouts, tensors, deed: Callable) -> list[tf.Tensor]:
    """What a deed gives for the positions of arrays that travel together,
    which are of one dtype."""
    alone, together = [], {}
    for i, (layout, tensor) in enumerate(zip(layouts, tensors, strict=True)):
        if layout.num_elements * tensor.dtype.size >= LARGE_BYTES:
            alone.append([i])
        else:
            together.setdefault(tensor.dtype, []).append(i)
    results: dict[int, tf.Tensor] = {}
    for positions in (*alone, *together.values()):
        results |= dict(zip(positions, deed(positions), strict=True))
    return [results[i] for i in range(len(tensors))]


def put(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value, whatever is there now."""
    # `assign` checks its shape against the one that is there.
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
