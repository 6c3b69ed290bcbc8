"""Estimates what a traced function needs, from its graph.

Its operations are replayed in the order in which they were traced, but for
those that were put in later: they come right before who reads them. A result
is there from the operation that makes it to the last one that reads it. That
is what an executor does that runs one operation at a time. What it does not
do: know the workspace of an operation, results that take over the memory of
an argument, or several operations that run side by side.
"""

import math
from typing import Any

import tensorflow as tf

from kmem.base import private_tf
from kmem.graph import ordering

# Their result is their argument, shown differently.
_SAME_MEMORY = frozenset(
    "ExpandDims Identity IdentityN PreventGradient Reshape Squeeze "
    "StopGradient".split()
)
# Their results are in memory all the time.
_RESIDENT = frozenset("Const Placeholder ReadVariableOp".split())


def temporary_bytes(graph: Any) -> int:
    """The most that a graph's results take at a time.

    Args:
        graph: That of a concrete function, of known shapes.
    """
    wanted = [*(t.op for t in graph.outputs), *graph.control_outputs]
    ops = ordering.needed(graph, wanted)
    last_reads: dict[Any, int] = {}
    for position, op in enumerate(ops):
        # A mere copy is made as soon as it can be.
        for tensor in op.inputs if op.type not in _SAME_MEMORY else ():
            last_reads[_memory(tensor)] = position
    for tensor in graph.outputs:
        last_reads[_memory(tensor)] = len(ops)
    current, peak = 0, 0
    ends: dict[int, int] = {}
    for position, op in enumerate(ops):
        made = 0
        for tensor in op.outputs:
            key = _memory(tensor)
            if key == tensor.ref() and op.type not in _RESIDENT:
                size = _num_bytes(tensor)
                made += size
                last = last_reads.get(key, position)
                ends[last] = ends.get(last, 0) + size
        current += made
        peak = max(peak, current + _within(op))
        current -= ends.get(position, 0)
    return peak


def _memory(tensor: tf.Tensor) -> Any:
    """The tensor whose memory a tensor shows."""
    while tensor.op.type in _SAME_MEMORY:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.ref()


def _within(op: tf.Operation) -> int:
    """What the functions that an operation calls need."""
    functions = [
        private_tf.function_in(op.graph, value.name)
        for attr in op.op_def.attr
        if attr.type == "func"
        for value in [op.get_attr(attr.name)]
    ]
    return max(
        (temporary_bytes(f.graph) for f in functions if f is not None),
        default=0,
    )


def _num_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    # A dimension that is not known is that of a part's rows.
    shape = tensor.shape.as_list() if tensor.shape.rank is not None else []
    return math.prod(size or 1 for size in shape) * tensor.dtype.size
