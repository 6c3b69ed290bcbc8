"""What a step computes of a batch, and how the rest comes to it.

Here one process computes all of it. Processes that train together
(kmem/sharding) take part of the rows each, and add up what came of them.
"""

import contextlib
import dataclasses
from typing import Any

import tensorflow as tf

from kmem.step.parts import num_rows


@dataclasses.dataclass(frozen=True)
class Slice:
    """The rows of a batch that this process computes.

    Attributes:
        data: The rows.
        rows: The rows of the whole batch, an int32 scalar.
        fewest_rows: The fewest that a process computes, or `None`.
        copies: How many processes compute each row, a float64 scalar, or
            `None` for one.
    """

    data: Any
    rows: tf.Tensor
    fewest_rows: tf.Tensor | None = None
    copies: tf.Tensor | None = None


class Alone:
    """One process, which computes whole batches.

    Attributes:
        split_batches: Whether it computes part of a batch only.
        num_processes: How many compute a batch.
    """

    split_batches = False
    num_processes = 1

    def slice(self, data) -> Slice:
        """The part of a batch that is this process's."""
        return Slice(data, num_rows(data))

    def add_up(self, tensors: list, variables: list, batch: Slice) -> list:
        """Adds up tensors over the processes.

        Args:
            tensors: What came of the slice.
            variables: For each the variable that it is a gradient of, or
                `None`.
            batch: The slice.
        """
        return tensors

    def add_up_group(self, gradients: list, variables: list) -> list:
        """Adds up, before an update, what `add_up` left for later.

        Args:
            gradients: Sums over batches, or `None`.
            variables: The variables they belong to.
        """
        return gradients

    def summed_shape(self, variable):
        """The shape of a variable's gradient after `add_up`."""
        return variable.shape

    def sharing_state(self, model, batch: Slice):
        """A context: what changes the model's state within is added up."""
        return contextlib.nullcontext()

    def weighing(self, share, update):
        """A context: gradients within count `share`, where processes add them
        up as they are made; unless `update.sums_rows`."""
        return contextlib.nullcontext()

    def counting(self):
        """A context in which nobody asks for a weight's value."""
        return contextlib.nullcontext()

    def weighs_gradient(self, variable) -> bool:
        """Whether a variable's gradient has its weight when it is made."""
        return False

    def gradient_shape(self, variable):
        """The shape of a variable's gradient when it is made."""
        return variable.shape
