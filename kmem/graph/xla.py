"""Lets XLA run a compiled step in an order that takes little memory.

XLA sees the whole step and chooses an order of its own, in which control
dependencies count for nothing. On the CPU that is breadth first, so that many
threads find something to do: what needs nothing but parameters runs first,
and weight gradients run last, with all that they read kept until then. There
is another, depth first, which a flag selects for the whole process. It goes
by what an operation reads: so here the chain of gradients is made to read
each weight gradient, in a way that leaves every bit as it is. What this
module does not do: choose what XLA fuses, and so recomputes by itself.
"""

import functools
import itertools
import os
import warnings

import tensorflow as tf

from kmem import memory
from kmem.base import private_tf
from kmem.graph import control

_FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


@functools.cache
def prefer_little_memory() -> bool:
    """Selects XLA's order that takes less memory on CPUs, for this process.

    XLA reads its flags when it first compiles. Warns if that was before, and
    leaves the order as it is where `XLA_FLAGS` already says which to take.

    Returns:
        Whether steps are known to be compiled in that order; on a GPU there
        is one order.
    """
    if tf.config.list_logical_devices("GPU"):
        return True
    flags = os.environ.get("XLA_FLAGS")
    if flags is not None and _FLAG in flags:
        return _is_depth_first()
    wanted = f"{flags or ''} --{_FLAG}=false".strip()
    os.environ["XLA_FLAGS"] = wanted
    try:
        took_effect = _is_depth_first()
    finally:
        # It has been read; other processes are none of kmem's business.
        if flags is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = flags
    if not took_effect and memory.is_counted("CPU"):
        warnings.warn(
            "XLA has compiled before kmem could choose an order that takes "
            "little memory, so that budgets may need more recomputation, or "
            "not be kept by a plan that was made elsewhere. Start Python with "
            f"the environment variable XLA_FLAGS='{wanted}'",
            stacklevel=3,
        )
    return took_effect


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


def hold_back(gradients: list) -> None:
    """Orders a backward pass that was just traced, as `ordering.hold_back`.

    The chain reaches a layer through the inputs of the layer's own gradients:
    whatever reads these inputs is made to wait for the gradients that come
    before them. All new dependencies follow the order in which operations
    were created, so they cannot form a cycle.

    Args:
        gradients: Tensors, `IndexedSlices` or `None`, of one graph.
    """
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g
        for g in gradients
        if g is not None
    ]
    if not values:
        return
    graph = values[0].graph
    positions = {op: i for i, op in enumerate(graph.get_operations())}
    tensors = {tensor.op: tensor for tensor in values if tensor.op in positions}
    ordered = sorted(tensors, key=lambda op: positions[op])
    for before, after in itertools.pairwise(ordered):
        chain = {
            tensor.ref(): tensor.consumers()
            for tensor in after.inputs
            if tensor.dtype.is_floating
            and positions.get(tensor.op, -1) > positions[before]
        }
        with graph.as_default():
            delayed = control.delayed(
                [tensors[before]], [key.deref() for key in chain]
            )
        for new, (key, readers) in zip(delayed, chain.items(), strict=True):
            for op in readers:
                for index, read in enumerate(op.inputs):
                    if read is key.deref():
                        private_tf.replace_input(op, index, new)
