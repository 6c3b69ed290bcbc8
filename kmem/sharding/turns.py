"""When units gather their weights: while the one before them runs.

No unit has to wait for its own then, neither in the forward pass nor in the
backward pass, where the one before is the next layer.

But for the model's first layer in the backward pass: by then all gradients are
there, and memory is at its peak.
"""

import tensorflow as tf

from kmem import remat
from kmem.sharding import gathering


class Line:
    """Units in the order in which they run forward."""

    def __init__(self):
        self._inputs: list[tf.Tensor] = []
        self._last: Turn | None = None

    def next(self, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """The inputs of the unit before this one; its own of the first."""
        before, self._inputs = self._inputs or inputs, inputs
        return before

    def turn(self) -> "Turn":
        """Another one, after all others."""
        self._last = Turn(self._last)
        return self._last


class Turn:
    """A run of a unit whose backward pass gathers its weights again.

    Args:
        before: The turn before, which is the next one in the backward pass.
    """

    def __init__(self, before: "Turn | None"):
        self._before = before
        self._shards: gathering.Shards | None = None
        self._fetched: list[tf.Tensor] | None = None

    def gather(
        self, shards: gathering.Shards, after: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Makes whole weights, of this turn and in the backward pass of the
        next one, after some tensors in a graph."""
        if not remat.is_repeating():
            self._shards = shards
            return shards.gather(after)
        fetched, self._fetched = self._fetched, None
        wholes = shards.gather(after, fetched)
        if self._before is not None:
            self._before.fetch(after)
        return wholes

    def fetch(self, after: list[tf.Tensor]) -> None:
        """Gathers the weights that the backward pass will need."""
        if self._before is None or self._shards is None:
            return
        # Eager operations end before the next one begins.
        if gathering.symbolic(self._shards.values):
            self._fetched = self._shards.fetch(after)
