"""Lets a second run make again what it makes of variables alone.

Sharded training gathers weights again for a backward pass, and need not run a
layer again for that: what the first run made of its arguments is kept, as in
plain training.
"""

import dataclasses

import tensorflow as tf

from kmem.base import private_tf
from kmem.remat import uses


@dataclasses.dataclass(frozen=True)
class Run:
    """One of the two runs of a function.

    Args:
        ops: Its operations.
        given: What it starts from, but for variables.
    """

    ops: list[tf.Operation]
    given: list[tf.Tensor]

    def computed(self) -> list[tf.Operation]:
        """What is computed from what was given."""
        depends = {tensor.ref() for tensor in self.given}
        found = []
        for op in self.ops:
            if any(tensor.ref() in depends for tensor in op.inputs):
                depends |= {tensor.ref() for tensor in op.outputs}
                found.append(op)
        return found


def keep(first: Run, second: Run, gradient: list[tf.Operation]) -> None:
    """Lets a gradient read what the first run has computed from what it was
    given; what nobody reads in the second run then is not run.

    Where the two are not alike, such as a loop, which has more results once
    it is differentiated, the second run stays.

    Args:
        first: The first run.
        second: The second one.
        gradient: The operations of its gradient.
    """
    kept = {
        repeated.ref(): output
        for one, other in uses.pairs(first.computed(), second.computed())
        for output, repeated in zip(one.outputs, other.outputs, strict=False)
    }
    for op in gradient:
        for index, tensor in enumerate(op.inputs):
            output = kept.get(_source(tensor).ref())
            if output is not None:
                private_tf.replace_input(op, index, output)


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor is a copy of."""
    while tensor.op.type in uses.COPIES:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
