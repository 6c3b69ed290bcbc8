"""Makes operations wait for others, by control dependencies and in XLA.

Left alone, a graph's executor runs a recomputation as soon as its inputs are
there, which is at once. A control dependency holds it back until the gradient
that needs it. XLA drops those, and merges a recomputation with the forward
pass, even across its own optimization barrier on the CPU: so there the inputs
are made to depend on the gradient, in a way that leaves every bit as it is. In
eager mode nothing runs early.

XLA sees the whole step and chooses an order of its own, in which control
dependencies count for nothing. On the CPU that is breadth first, so that many
threads find something to do: what needs nothing but parameters runs first,
and weight gradients run last, with all that they read kept until then. There
is another, depth first, which a flag selects for the whole process. It goes
by what an operation reads: so the chain of gradients is made to read each
weight gradient, in the same way. What this module does not do: choose what
XLA fuses, and so recomputes by itself.
"""

import contextlib
import functools
import itertools
import os
import warnings

import tensorflow as tf

from kmem import memory
from kmem.base import private_tf
from kmem.graph import fusion
from kmem.graph import names


def after(
    gradients: list[tf.Tensor],
    tensors: list[tf.Tensor],
    weights: list[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Copies tensors into new ones that are there after the gradients.

    Args:
        gradients: What to wait for.
        tensors: What a recomputation starts from.
        weights: The same, but left out where a copy takes memory. What is
            computed from these alone may be merged then.
    """
    if private_tf.in_xla():
        return delayed(gradients, tensors), [tf.identity(w) for w in weights]
    with behind(gradients):
        return list(map(_copy, tensors)), list(map(_copy, weights))


def behind(gradients: list[tf.Tensor]) -> contextlib.AbstractContextManager:
    """Within, operations wait for gradients; not in XLA."""
    waited: list = gradients
    if not tf.executing_eagerly():
        waited = [op for each in gradients for op in fusion.addends(each.op)]
    return tf.control_dependencies(waited)


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    """A copy that TensorFlow does not cast before it waits: the cast would be
    that of the forward pass, and stay."""
    return fusion.lasting(names.copy(tensor))


def delayed(
    gradients: list[tf.Tensor], tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The tensors, such that XLA cannot compute them before the gradients."""
    if not tensors:
        return []
    never = tf.reduce_any([_never(gradient) for gradient in gradients])
    # A zero of the tensor's shape would be computed when XLA compiles.
    return [tf.where(never, tf.zeros([], t.dtype), t) for t in tensors]


def _never(gradient: tf.Tensor) -> tf.Tensor:
    """False, computed from a gradient such that no compiler can tell.

    From all of it: XLA would compute a single element of it by itself, and
    again wherever that is read, and keep what it needs for that.
    """
    if gradient.dtype.is_complex:
        gradient = tf.math.real(gradient)
    # No number's sign is 2, and a comparison with NaN is false.
    return tf.reduce_any(tf.sign(gradient) > 2)


def before(gradients: list, results: list) -> list:
    """Makes `results` wait for `gradients`, in a graph.

    The executor would else follow the chain of input gradients first, while
    the weight gradients, and all they need, stay pending (see ordering.py).

    Args:
        gradients: Tensors, `IndexedSlices` or `None`.
        results: The same.
    """
    if tf.executing_eagerly() or private_tf.in_xla():
        return results
    ops = [fusion.maker(g) for g in gradients if g is not None]
    with tf.control_dependencies(
        [earlier for op in ops for earlier in fusion.known_before(op)]
    ):
        return [None if r is None else _identity(r) for r in results]


def kept(readers: list[tf.Operation], gradients: list) -> list:
    """Makes one of some gradients wait for operations, so that they run."""
    if not readers or private_tf.in_xla():
        return gradients
    for i, gradient in enumerate(gradients):
        if gradient is not None and not fusion.is_joined_later(
            fusion.maker(gradient)
        ):
            with tf.control_dependencies(readers):
                copied = _identity(gradient)
            return [*gradients[:i], copied, *gradients[i + 1 :]]
    return gradients


def _identity(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _identity(gradient.values), gradient.indices, gradient.dense_shape
        )
    return names.copy(gradient)


_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


@functools.cache
def prefer_little_memory() -> bool:
    """Selects XLA's order that takes less memory on CPUs, for this process.

    XLA reads its flags when it first compiles. Leaves the order as it is if
    that was before, or where `XLA_FLAGS` already says which to take.

    Returns:
        Whether steps are known to be compiled in that order; on a GPU there
        is one order.
    """
    if tf.config.list_logical_devices("GPU"):
        return True
    flags = os.environ.get("XLA_FLAGS")
    if flags is not None and _FLAG in flags:
        return _is_depth_first()
    os.environ["XLA_FLAGS"] = _wanted_flags()
    try:
        return _is_depth_first()
    finally:
        # It has been read; other processes are none of kmem's business.
        if flags is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = flags


@functools.cache
def order_for_plans() -> bool:
    """`prefer_little_memory`, and warns if XLA had compiled something."""
    took_effect = prefer_little_memory()
    if (
        not took_effect
        and memory.is_counted("CPU")
        and _FLAG not in os.environ.get("XLA_FLAGS", "")
    ):
        warnings.warn(
            "XLA compiled something before kmem could select the order of "
            "operations that takes little memory. Plans may recompute more, "
            "and saved plans may exceed their budget. Start Python with "
            f"the environment variable XLA_FLAGS='{_wanted_flags()}'",
            stacklevel=3,
        )
    return took_effect


def _wanted_flags() -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} --{_FLAG}=false".strip()


def _is_depth_first() -> bool:
    """Whether each of some wide products is read before the next is made."""
    if not memory.is_counted("CPU"):
        return False
    width, count = 4096, 8

    @tf.function(jit_compile=True)
    def probe(x):
        wide = [x @ tf.fill([16, width], float(i)) for i in range(count)]
        return [w @ tf.ones([width, 16]) for w in wide]

    x = tf.ones([64, 16])
    probe(x)
    with memory.track("CPU") as usage:
        probe(x)
    all_bytes = count * 64 * width * 4
    return usage.peak_bytes - usage.start_bytes < all_bytes // 2


class Guards:
    """Orders a backward pass that was just traced, as `ordering.hold_back`.

    The chain reaches a layer through the inputs of the layer's own gradients:
    whatever reads these inputs is made to wait for the gradients that come
    before them. All new dependencies follow the order in which operations
    were created, so they cannot form a cycle; nor can those of `finish`, on
    what was made of one of the gradients and of nothing that waits for it.

    Args:
        gradients: Tensors, `IndexedSlices` or `None`, of one graph.
    """

    def __init__(self, gradients: list):
        # By what makes a gradient: the operations that wait for it.
        self._guards: dict[tf.Operation, list[tf.Operation]] = {}
        values = [
            g.values if isinstance(g, tf.IndexedSlices) else g
            for g in gradients
            if g is not None
        ]
        graph = values[0].graph if values else tf.Graph()
        positions = {op: i for i, op in enumerate(graph.get_operations())}
        tensors = {t.op: t for t in values if t.op in positions}
        ordered = sorted(tensors, key=lambda op: positions[op])
        for before, after in itertools.pairwise(ordered):
            chain = {
                tensor.ref(): tensor.consumers()
                for tensor in after.inputs
                if tensor.dtype.is_floating
                and positions.get(tensor.op, -1) > positions[before]
            }
            held = [key.deref() for key in chain]
            with graph.as_default():
                copies = delayed([tensors[before]], held)
            self._guards[before] = [copy.op for copy in copies]
            for old, new in zip(held, copies, strict=True):
                private_tf.read_instead(chain[old.ref()], old, new)
        self._known = set(graph.get_operations())

    def finish(
        self, ops: list[tf.Operation], ends: list[tf.Operation] | None = None
    ) -> None:
        """Makes the pass wait for what uses up a gradient, which is freed then.

        Args:
            ops: What was traced after the pass.
            ends: Those of them whose results to wait for.
        """
        for end in ends or [op for op in ops if not op.outputs]:
            gradients = self._gradients_of(end)
            if len(gradients) == 1:
                never = _never(_result(end))
                for guard in self._guards[gradients.pop()]:
                    private_tf.read_instead([guard], guard.inputs[0], never)

    def _gradients_of(self, op: tf.Operation) -> set[tf.Operation]:
        """The gradients that an operation was made of after the pass."""
        found, waiting = set(), [op]
        while waiting:
            op = waiting.pop()
            if op not in self._known:
                waiting += [tensor.op for tensor in op.inputs]
            elif op in self._guards:
                found.add(op)
        return found


def _result(op: tf.Operation) -> tf.Tensor:
    """What an operation made, be it in a variable."""
    if op.outputs:
        return op.outputs[0]
    with tf.control_dependencies([op]):
        return tf.raw_ops.ReadVariableOp(
            resource=op.inputs[0], dtype=op.inputs[1].dtype
        )
