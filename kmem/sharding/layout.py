"""How an array is cut into shards: flat, in equal lengths, padded with zeros.

`[3, 5]` over 4 processes is 15 numbers in rows of 4; the last row has one
zero more. Every variable is cut by itself, so that a weight and what an
optimizer keeps for it are cut alike, and an update number by number is the
same on the shards as on the whole.
"""

import dataclasses
import math

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shards of an array.

    Args:
        shape: The array's shape.
        count: The number of shards.
    """

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
