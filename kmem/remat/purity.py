"""Tells whether a function may run twice.

A second run must not do anything a second time: what it may not contain are
operations with effects of their own, as opposed to Keras's variables, whose
assignments are held back (state.py). TensorFlow marks such operations as
stateful; the functions of a loop or a branch are looked into.
"""

from collections.abc import Iterable
from collections.abc import Iterator

import tensorflow as tf

from kmem.base import private_tf

# Stateful for TensorFlow, since they must not be merged or left out, but a
# second run of them is harmless: reads, messages, and collectives, which all
# replicas run again together. cuDNN's kernels are given no dropout by Keras.
_HARMLESS = tuple(
    "Assert Collective CudnnRNN Nccl LookupTableFind LookupTableSize Print "
    "ReadVariableOp ResourceGather Timestamp VariableShape".split()
)


class NotRecomputable(ValueError):
    """A function that cannot run twice with the same results."""


def not_recomputable(fn, reason: str) -> NotRecomputable:
    name = getattr(fn, "name", None) or getattr(fn, "__name__", repr(fn))
    return NotRecomputable(
        "`recompute` needs a function that may run twice with the same "
        f"results. Received: fn={name}, which {reason}"
    )


def effects(operations: Iterable[tf.Operation]) -> list[str]:
    """Names the operations that have an effect of their own."""
    descriptions = {
        f"{op.type} ('{op.name}')"
        for op in _inner_operations(operations)
        if op.op_def is not None
        and op.op_def.is_stateful
        and not op.type.startswith(_HARMLESS)
    }
    return sorted(descriptions)


def may_refuse(operations: Iterable[tf.Operation]) -> bool:
    """Whether some of them check what they are given."""
    return any(op.type == "Assert" for op in _inner_operations(operations))


def _inner_operations(operations) -> Iterator[tf.Operation]:
    """The operations, with functions replaced by what is in them."""
    waiting, visited = list(operations), set()
    while waiting:
        op = waiting.pop()
        names = [
            value.name
            for attr in op.op_def.attr
            if attr.type in ("func", "list(func)")
            for value in tf.nest.flatten(op.get_attr(attr.name))
        ]
        if not names:
            yield op
        for name in names:
            function = private_tf.function_in(op.graph, name)
            if function is None:
                # Such as one that was loaded: its operations are not known.
                yield op
            elif name not in visited:
                visited.add(name)
                waiting += function.graph.get_operations()
