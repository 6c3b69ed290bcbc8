"""Dot-product attention for some queries at a time.

The scores of attention are as many numbers as pairs of a query and a key. Here
they exist for a block of queries at a time, and so do their softmax and its
gradient (Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, arXiv
2112.05682): the backward pass computes the scores of each block again, as
FlashAttention does (Dao et al., arXiv 2205.14135). A block has all keys of its
queries, so that the softmax of a row is computed as ever, and needs no running
sums; it has as few queries as make its scores at most half as large as all
queries are, so that the peak is linear in the length. Random numbers are drawn
for each block from the seed and its number, and are the same in the gradient.

What this module does not do: derivatives of the gradient, which are refused,
and biases that are added to scores.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmem.graph.releasing import zeros
from kmem.losses.chunks import once_differentiable

# What Keras writes in the place of scores that do not count.
_NEVER = -0.7 * 3.38953e38


@dataclasses.dataclass(frozen=True)
class Scores:
    """What happens to the scores.

    Attributes:
        scale: What they are multiplied by.
        masks: Which of them count: tensors that broadcast to `(batch, heads,
            queries, keys)`, all of rank 4.
        causal: Whether a query sees only keys up to its own place.
        rate: The share of probabilities that is dropped.
        seed: A pair of integers, which decides which; `None` drops none.
    """

    scale: Any
    masks: tuple[tf.Tensor, ...] = ()
    causal: bool = False
    rate: float = 0.0
    seed: tf.Tensor | None = None


def attention(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, scores: Scores
) -> tf.Tensor:
    """Softmax attention, a block of queries at a time.

    Args:
        query: `(batch, queries, heads, features)`.
        key: `(batch, keys, key heads, features)`; as many heads attend to
            each key head as there are more of them.
        value: `(batch, keys, key heads, value features)`.

    Returns:
        `(batch, queries, heads, value features)`.
    """

    def blocks_of(tensors):
        return _Blocks(*map(tf.stop_gradient, tensors), scores=scores)

    @tf.custom_gradient
    def compute(*tensors):
        def gradient(upstream):
            blocks = blocks_of(tensors)
            gradients = blocks.backward(tf.stop_gradient(upstream))
            return once_differentiable(
                gradients, [*tensors, upstream], "attention"
            )

        return blocks_of(tensors).forward(), gradient

    attended: Any = compute(query, key, value)
    return attended


class _Blocks:
    """Queries in blocks, and what they attend to."""

    def __init__(self, query: Any, key: Any, value: Any, scores: Scores):
        self._scores = scores
        self._dtype = query.dtype
        self._wide = tf.float64 if query.dtype == tf.float64 else tf.float32
        self._batch = query.shape[0] or tf.shape(query)[0]
        self._num_heads, self._features = query.shape[2], query.shape[3]
        self._key_heads: int = key.shape[2]
        self._value_features: int = value.shape[3]
        self._groups = self._num_heads // self._key_heads
        length, num_keys = tf.shape(query)[1], tf.shape(key)[1]
        size = tf.maximum(length * self._features // (2 * num_keys), 1)
        self._count = tf.maximum(-(-length // size), 1)
        self._size = tf.maximum(-(-length // self._count), 1)
        self._length, self._num_keys = length, num_keys
        # (batch, key heads, keys, features)
        self._key, self._value = (
            tf.transpose(each, (0, 2, 1, 3)) for each in (key, value)
        )
        self._query = self._in_blocks(query)
        self._masks = [self._by_key_head(each) for each in scores.masks]

    def forward(self) -> tf.Tensor:
        def body(i, outputs):
            probabilities = self._dropped(i, self._probabilities(i))
            output = tf.matmul(tf.cast(probabilities, self._dtype), self._value)
            return i + 1, outputs.write(i, output)

        array = tf.TensorArray(self._dtype, self._count)
        _, outputs = self._loop(body, (tf.constant(0), array))
        return self._in_order(outputs.stack(), self._value_features)

    def backward(self, upstream) -> list[tf.Tensor]:
        upstream = self._in_blocks(upstream)

        def slopes_of(i):
            probabilities = self._probabilities(i)
            dropped = tf.cast(self._dropped(i, probabilities), self._dtype)
            for_value = tf.matmul(dropped, upstream[i], transpose_a=True)
            slopes = tf.matmul(upstream[i], self._value, transpose_b=True)
            slopes = self._dropped(i, tf.cast(slopes, self._wide))
            mean = tf.reduce_sum(slopes * probabilities, -1, keepdims=True)
            slopes = (slopes - mean) * probabilities
            if self._masks:
                # A query that sees no key sees all alike, whatever they are.
                slopes = self._masked(i, slopes, 0.0)
            scale = tf.cast(self._scores.scale, self._wide)
            return for_value, tf.cast(slopes * scale, self._dtype)

        def body(i, for_queries, for_key, for_value):
            addend, slopes = slopes_of(i)
            for_value += tf.cast(addend, self._wide)
            for_queries = for_queries.write(i, tf.matmul(slopes, self._key))
            addend = tf.matmul(slopes, self._query[i], transpose_a=True)
            for_key += tf.cast(addend, self._wide)
            return i + 1, for_queries, for_key, for_value

        sums = [
            zeros(tf.shape(each), self._wide)
            for each in (self._key, self._value)
        ]
        array = tf.TensorArray(self._dtype, self._count)
        _, for_queries, *sums = self._loop(body, (tf.constant(0), array, *sums))
        by_query = self._in_order(for_queries.stack(), self._features)
        by_key, by_value = (
            tf.cast(tf.transpose(each, (0, 2, 1, 3)), self._dtype)
            for each in sums
        )
        return [by_query, by_key, by_value]

    def _loop(self, body: Callable, state: tuple) -> Any:
        return tf.while_loop(
            lambda i, *_: i < self._count,
            body,
            state,
            parallel_iterations=1,
            maximum_iterations=self._count,
        )

    def _in_blocks(self, tensor) -> tf.Tensor:
        """Queries as `(blocks, batch, key heads, heads of one and queries of
        a block, features)`."""
        missing = self._size * self._count - self._length
        padded = tf.pad(tensor, [[0, 0], [0, missing], [0, 0], [0, 0]])
        features = tensor.shape[-1]
        batch, size, count = self._batch, self._size, self._count
        shape = [batch, count, size, self._key_heads, self._groups, features]
        blocks = tf.reshape(padded, shape)
        blocks = tf.transpose(blocks, (1, 0, 3, 4, 2, 5))
        shape = [count, batch, self._key_heads, self._groups * size, features]
        return tf.reshape(blocks, shape)

    def _in_order(self, blocks, features: int) -> tf.Tensor:
        """What `_in_blocks` was given."""
        batch, size, count = self._batch, self._size, self._count
        shape = [count, batch, self._key_heads, self._groups, size, features]
        ordered = tf.transpose(tf.reshape(blocks, shape), (1, 0, 4, 2, 3, 5))
        shape = [batch, count * size, self._num_heads, features]
        ordered = tf.reshape(ordered, shape)[:, : self._length]
        return tf.ensure_shape(ordered, [None, None, self._num_heads, features])

    def _probabilities(self, i) -> tf.Tensor:
        scores = tf.matmul(self._query[i], self._key, transpose_b=True)
        scores = tf.cast(scores, self._wide)
        scores *= tf.cast(self._scores.scale, self._wide)
        if self._masks or self._scores.causal:
            scores = self._masked(i, scores, _NEVER)
        return tf.nn.softmax(scores)

    def _dropped(self, i, probabilities):
        if self._scores.seed is None:
            return probabilities
        seed = tf.random.experimental.stateless_fold_in(self._scores.seed, i)
        return tf.nn.experimental.stateless_dropout(
            probabilities, self._scores.rate, seed
        )

    def _masked(self, i, scores, otherwise: float) -> tf.Tensor:
        """Scores, and another number where they do not count."""
        size, counts = self._size, []
        shape = [self._batch, self._key_heads, self._groups, size, -1]
        rows = tf.range(size) + i * size
        for mask in self._masks:
            if mask.shape[3] != 1:
                last = tf.shape(mask)[3] - 1
                mask = tf.gather(mask, tf.minimum(rows, last), axis=3)
            counts.append(mask)
        if self._scores.causal:
            counts.append(rows[:, None] >= tf.range(self._num_keys))
        everywhere = functools.reduce(tf.logical_and, counts)
        scores = tf.reshape(scores, shape)
        scores = tf.where(everywhere, scores, otherwise)
        shape = [self._batch, self._key_heads, self._groups * size, -1]
        return tf.reshape(scores, shape)

    def _by_key_head(self, mask) -> tf.Tensor:
        """`(batch, key heads, heads of one, queries, keys)`, or ones."""
        if mask.shape[1] == 1:
            return mask[:, :, None]
        shape = tf.shape(mask)
        heads = [self._key_heads, self._groups]
        by_head = tf.reshape(mask, tf.concat([shape[:1], heads, shape[2:]], 0))
        return tf.ensure_shape(
            by_head, [mask.shape[0], *heads, *mask.shape[2:]]
        )
