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


@dataclasses.dataclass(frozen=True)
class Shards:
    """This process's shards of some weights.

    Args:
        engine: The processes.
        layouts: How each weight is cut.
        values: The shards.
        name: What names the calls in all processes.
        travel: The dtypes to send.
        variables: What holds the shards, if that is on another device. They
            are copied when they are to be sent: a value that was read before
            would be copied at once, and be there, with all others, for the
            whole step.
    """

    engine: Engine
    layouts: Sequence[Layout]
    values: Sequence[tf.Tensor]
    name: str
    travel: Travel
    variables: Sequence[tf.Variable] | None = None

    def gather(self, after: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        """Makes whole weights of every process's shards.

        Args:
            after: Tensors to wait for, in a graph.
        """
        if _unknown.get() and not tf.executing_eagerly():
            return [
                tf.fill(layout.shape, tf.constant(float("nan"), value.dtype))
                for layout, value in zip(self.layouts, self.values, strict=True)
            ]

        def whole(together):
            return self._linked(together, self._fetched(together, after))

        return _in_calls(self.layouts, self.values, whole)

    def _fetched(self, positions: list[int], after) -> list[tf.Tensor]:
        """The whole weights, without a gradient."""
        with tf.control_dependencies(_symbolic(after)):
            values = self._read(positions)
            dtype = values[0].dtype
            sent_dtype = self.travel.gather_dtype or dtype
            sent = tf.cast(_joined(values), sent_dtype)
            name = f"{self.name}/{positions[0]}/gather"
            rows = self.engine.gather(sent, name)
        layouts = [self.layouts[i] for i in positions]
        return [
            tf.cast(layout.whole(row), dtype)
            for layout, row in zip(
                layouts, _split(rows, layouts, axis=1), strict=True
            )
        ]

    def _read(self, positions: list[int]) -> list[tf.Tensor]:
        if self.variables is None:
            return [tf.stop_gradient(self.values[i]) for i in positions]
        # By itself: it is the value given whose gradient is wanted.
        return [
            tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype)
            for v in (self.variables[i] for i in positions)
        ]

    def _linked(
        self, positions: list[int], wholes: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The whole weights, whose gradients are those of the shards."""
        layouts = [self.layouts[i] for i in positions]

        def gradient(*gradients):
            own = weight()
            gradients = [_weighted(g, own) for g in gradients]
            if not self.travel.reduces:
                return gradients
            name = f"{self.name}/{positions[0]}"
            return _scattered(
                self.engine, layouts, gradients, name, self.travel
            )

        link: Any = tf.custom_gradient(lambda *_: (wholes, gradient))
        return link(*[self.values[i] for i in positions])


def scatter(
    engine: Engine,
    layouts: Sequence[Layout],
    gradients: Sequence[tf.Tensor],
    name: str,
    travel: Travel,
) -> list[tf.Tensor]:
    """Cuts the sums over the processes of whole gradients."""

    def scattered(together):
        return _scattered(
            engine,
            [layouts[i] for i in together],
            [gradients[i] for i in together],
            f"{name}/{together[0]}",
            travel,
        )

    return _in_calls(layouts, gradients, scattered)


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
    return _split(shard, layouts, axis=0)


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


def _split(joined: tf.Tensor, layouts, axis: int) -> list[tf.Tensor]:
    lengths = [layout.length for layout in layouts]
    return tf.split(joined, lengths, axis) if len(lengths) > 1 else [joined]


def _in_calls(layouts, tensors, deed: Callable) -> list[tf.Tensor]:
    """What a deed finds for the positions of each call, in their order."""
    found: dict[int, tf.Tensor] = {}
    for together in _calls(layouts, tensors):
        found |= dict(zip(together, deed(together), strict=True))
    return [found[i] for i in range(len(tensors))]


def _calls(layouts, tensors) -> list[list[int]]:
    """Which arrays travel together: positions, of one dtype."""
    alone, together = [], {}
    for i, (layout, tensor) in enumerate(zip(layouts, tensors, strict=True)):
        if layout.num_elements * tensor.dtype.size >= _LARGE_BYTES:
            alone.append([i])
        else:
            together.setdefault(tensor.dtype, []).append(i)
    return [*alone, *together.values()]
