"""Makes whole weights of shards, and shards of whole gradients.

The gradient of gathering is the sum over the processes, cut: what every
process gets is the gradient of its own shard. Large arrays travel alone,
small ones together, as a call costs as much as some hundred kilobytes.

In a graph TensorFlow would gather all weights at once. So whoever gathers
says what to wait for.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kmem.sharding.engine import Engine
from kmem.sharding.layout import Layout

# Arrays of at least so many bytes travel alone.
_LARGE_BYTES = 2**18

# What this process's gradients count in the sum; `None` counts them whole.
_weight: contextvars.ContextVar[Callable | None] = contextvars.ContextVar(
    "weight", default=None
)
# Whether weights are not to be known: a trace that reads shapes only.
_unknown = contextvars.ContextVar("unknown", default=False)


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


@contextlib.contextmanager
def weighed(get_weight: Callable[[], tf.Tensor | None]):
    """Gradients that are computed within count with a weight in their sum."""
    token = _weight.set(get_weight)
    try:
        yield
    finally:
        _weight.reset(token)


def weight() -> tf.Tensor | None:
    """What a gradient counts that is computed now; `None` is all."""
    get_weight = _weight.get()
    return None if get_weight is None else get_weight()


@contextlib.contextmanager
def without_values():
    """Within, nothing is gathered in a graph: weights are not a number."""
    token = _unknown.set(True)
    try:
        yield
    finally:
        _unknown.reset(token)


def gather(
    engine: Engine,
    layouts: Sequence[Layout],
    shards: Sequence[tf.Tensor],
    name: str,
    travel: Travel,
    after: Sequence[tf.Tensor] = (),
    fetched: "Fetched | None" = None,
) -> list[tf.Tensor]:
    """Makes whole arrays of every process's shards.

    Args:
        engine: The processes.
        layouts: How each array is cut.
        shards: This process's shards.
        name: What names the call in all processes.
        travel: The dtypes to send.
        after: Tensors to wait for, in a graph.
        fetched: Where the shards are, if that is another device.
    """
    if _unknown.get() and not tf.executing_eagerly():
        return [
            tf.fill(layout.shape, tf.constant(float("nan"), shard.dtype))
            for layout, shard in zip(layouts, shards, strict=True)
        ]
    wholes: dict[int, tf.Tensor] = {}
    for together in _calls(layouts, shards):
        call = _Call(
            engine,
            [layouts[i] for i in together],
            f"{name}/{together[0]}",
            travel,
            _symbolic(after),
            fetched.of(together) if fetched else None,
        )
        link: Any = tf.custom_gradient(call.gather)
        found = link(*[shards[i] for i in together])
        found = found if len(together) > 1 else [found]
        wholes |= dict(zip(together, found, strict=True))
    return [wholes[i] for i in range(len(shards))]


def scatter(
    engine: Engine,
    layouts: Sequence[Layout],
    gradients: Sequence[tf.Tensor],
    name: str,
    travel: Travel,
) -> list[tf.Tensor]:
    """Cuts the sums over the processes of whole gradients."""
    shards: dict[int, tf.Tensor] = {}
    for together in _calls(layouts, gradients):
        found = _scattered(
            engine,
            [layouts[i] for i in together],
            [gradients[i] for i in together],
            f"{name}/{together[0]}",
            travel,
        )
        shards |= dict(zip(together, found, strict=True))
    return [shards[i] for i in range(len(gradients))]


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Shards on another device, which are copied when they are to be read.

    A value that was read before would be copied at once, and be there, with
    all others, for the whole step.

    Args:
        variables: What holds the shards.
        after: Tensors to wait for, in a graph.
    """

    variables: Sequence[tf.Variable]
    after: Sequence[tf.Tensor]

    def of(self, positions: Sequence[int]) -> "Fetched":
        """Those of some of the shards."""
        return Fetched([self.variables[i] for i in positions], self.after)

    def read(self) -> list[tf.Tensor]:
        """The shards' values."""
        with tf.control_dependencies(_symbolic(self.after)):
            # By itself: it is the value given whose gradient is wanted.
            return [
                tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype)
                for v in self.variables
            ]


class _Call:
    """Arrays of one dtype that travel together."""

    def __init__(self, engine, layouts, name, travel, after, fetched):
        self._engine = engine
        self._layouts = layouts
        self._name = name
        self._travel = travel
        self._after = after
        self._fetched = fetched

    def gather(self, *shards):
        lengths = [layout.length for layout in self._layouts]
        dtype = shards[0].dtype
        if self._fetched is not None:
            shards = self._fetched.read()
        sent_dtype = self._travel.gather_dtype or dtype
        with tf.control_dependencies(self._after):
            sent = tf.cast(_joined(list(shards)), sent_dtype)
            rows = self._engine.gather(sent, f"{self._name}/gather")
        rows = [rows] if len(lengths) == 1 else tf.split(rows, lengths, axis=1)
        wholes = [
            tf.cast(layout.whole(row), dtype)
            for layout, row in zip(self._layouts, rows, strict=True)
        ]

        def gradient(*gradients):
            own = weight()
            gradients = [_weighted(g, own) for g in gradients]
            if not self._travel.reduces:
                return gradients
            return _scattered(
                self._engine,
                self._layouts,
                gradients,
                self._name,
                self._travel,
            )

        return wholes if len(wholes) > 1 else wholes[0], gradient


def _scattered(engine, layouts, gradients, name, travel) -> list[tf.Tensor]:
    (dtype,) = {gradient.dtype for gradient in gradients}
    sent = tf.cast(
        _joined(
            [
                layout.rows(tf.convert_to_tensor(gradient))
                for layout, gradient in zip(layouts, gradients, strict=True)
            ]
        ),
        travel.reduce_dtype or dtype,
    )
    shard = tf.cast(engine.reduce_scatter(sent, f"{name}/scatter"), dtype)
    if len(layouts) == 1:
        return [shard]
    return tf.split(shard, [layout.length for layout in layouts])


def _symbolic(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Those of the graph that is traced."""
    return [
        t
        for t in tensors
        if tf.is_symbolic_tensor(t)
        and t.graph is tf.compat.v1.get_default_graph()
    ]


def _weighted(gradient, own):
    if own is None:
        return gradient
    return tf.convert_to_tensor(gradient) * tf.cast(own, gradient.dtype)


def _joined(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=-1)


def _calls(layouts, tensors) -> list[list[int]]:
    """Which arrays travel together: positions, of one dtype."""
    alone, together = [], {}
    for i, (layout, tensor) in enumerate(zip(layouts, tensors, strict=True)):
        if layout.num_elements * tensor.dtype.size >= _LARGE_BYTES:
            alone.append([i])
        else:
            together.setdefault(tensor.dtype, []).append(i)
    return [*alone, *together.values()]
