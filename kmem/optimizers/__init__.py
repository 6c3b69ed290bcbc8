"""Optimizers whose state takes less memory, at other numbers.

AdamW with both moments in 8 bits (Dettmers et al., arXiv 2110.02861).

The moments are most of what AdamW keeps: 8 bytes a weight in float32, here 2
and a scale for every 256 weights. They are read, updated in float32 and
written again a piece at a time, so that those of a large variable are never
whole in memory. A number is the nearest of 256 shares of the largest of its 256
("dynamic tree quantization", arXiv 1511.04561, by blocks). What this does not
do: compute what AdamW does, to the bit.
"""

import functools
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base import private_keras

BLOCK = 256
_DECADES = 7
# Below, 8 bits save nothing to speak of (bitsandbytes' limit as well).
_SMALLEST = 4096
# Numbers that are updated at a time: a multiple of a block.
_PIECE = 2**20
_MAX_PIECES = 64


@keras.saving.register_keras_serializable(package="kmem")
class AdamW8bit(keras.optimizers.AdamW):
    """AdamW whose moments take 2.03 bytes a weight instead of 8.

    It changes numbers, so that nothing but `compile` chooses it. Variables of
    fewer than 4,096 numbers, and those named as embeddings, whose gradients
    are rare and large, keep their moments in float32. Weights are updated in
    float32 as by `keras.optimizers.AdamW`. Source: Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861.

    Args:
        learning_rate: As in `keras.optimizers.AdamW`; so are the others.
        weight_decay: The share of a weight, times the learning rate, that a
            step takes off.
        beta_1: The decay of the first moment.
        beta_2: The decay of the second.
        epsilon: Is added to the root of the second moment.
        **kwargs: What else `keras.optimizers.AdamW` takes, without `amsgrad`.

    Raises:
        ValueError: If `amsgrad` is set: there are no 8 bits for a maximum.

    Example:

    ```python
    import keras
    import numpy as np

    import kmem

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile(kmem.optimizers.AdamW8bit(1e-3, weight_decay=0.01), "mse")
    x = np.ones((8, 64), "float32")
    model.fit(x, x, verbose=0)
    ```
    """

    def __init__(
        self,
        learning_rate=0.001,
        weight_decay=0.004,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-7,
        name="adamw8bit",
        **kwargs,
    ):
        if kwargs.pop("amsgrad", False):
            raise ValueError(
                "`AdamW8bit` has no `amsgrad`: use `keras.optimizers.AdamW`. "
                "Received: amsgrad=True"
            )
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            name=name,
            **kwargs,
        )

    def build(self, variables):
        """Makes the moments of the variables: codes and scales, or float32.

        Args:
            variables: What is to be updated.
        """
        if self.built:
            return
        keras.optimizers.Optimizer.build(self, variables)
        # Of each variable the codes and scales of its first moment, and of
        # its second; or the two moments.
        self._moments = [self._make_moments(v) for v in variables]

    def _make_moments(self, variable) -> list:
        size = math.prod(variable.shape)
        if size < _SMALLEST or "embeddings" in variable.name:
            return [
                self.add_variable_from_reference(variable, name)
                for name in ("momentum", "velocity")
            ]
        return [
            self.add_variable(shape, "zeros", dtype, name=f"{name}_{part}")
            for name in ("momentum", "velocity")
            for part, shape, dtype in (
                ("codes", (size,), "uint8"),
                ("scales", (num_blocks(size),), "float32"),
            )
        ]

    def update_step(self, gradient, variable, learning_rate):
        """Updates a variable and its moments.

        Args:
            gradient: The variable's, or `IndexedSlices` of it.
            variable: The variable.
            learning_rate: A scalar.
        """
        index = getattr(self, private_keras.INDEX)
        moments = self._moments[index(variable)]
        rate = tf.cast(learning_rate, tf.float32)
        iterations: Any = self.iterations
        step = tf.cast(iterations + 1, tf.float32)
        beta_1, beta_2 = (
            tf.constant(float(beta)) for beta in (self.beta_1, self.beta_2)
        )
        rate *= tf.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)

        def moved(gradient, first, second):
            first += (gradient - first) * (1 - beta_1)
            second += (tf.square(gradient) - second) * (1 - beta_2)
            change = first * rate / (tf.sqrt(second) + self.epsilon)
            return first, second, change

        values = [tf.convert_to_tensor(each) for each in moments]
        if len(moments) == 2:
            first, second, change = moved(
                gradient, *(tf.cast(v, tf.float32) for v in values)
            )
            new = [first, second]
        else:
            *new, change = _in_pieces(moved, gradient, values)
            change = tf.reshape(change, variable.shape)
        for moment, value in zip(moments, new, strict=True):
            self.assign(moment, value)
        self.assign_sub(variable, change)

    def get_config(self):
        """The arguments that an equal optimizer is made with."""
        config = super().get_config()
        config.pop("amsgrad")
        return config


def _in_pieces(moved, gradient, values: list) -> list[tf.Tensor]:
    """The new codes and scales of two moments, and a variable's change."""
    gradient = tf.reshape(gradient, [-1])
    (size,) = values[0].shape
    fewest = -(-size // _MAX_PIECES)
    length = max(_PIECE, num_blocks(fewest) * BLOCK)
    pieces = []
    last: list[tf.Tensor] = []
    for start in range(0, size, length):
        numbers = slice(start, min(start + length, size))
        blocks = slice(start // BLOCK, num_blocks(numbers.stop))
        # One after another: a graph would make all of them at once.
        with tf.control_dependencies(last):
            first = decode(values[0][numbers], values[1][blocks], signed=True)
            second = decode(values[2][numbers], values[3][blocks], signed=False)
            first, second, change = moved(gradient[numbers], first, second)
            last = [
                *encode(first, signed=True),
                *encode(second, signed=False),
                change,
            ]
        pieces.append(last)
    return [tf.concat(each, axis=0) for each in zip(*pieces, strict=True)]


@functools.cache
def shares(signed: bool) -> np.ndarray:
    """The 256 shares of a scale that a code may stand for, in order."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2**decade if signed else 2 ** (decade + 1)
        edges = np.linspace(0.1, 1.0, steps + 1)
        middles = 10.0 ** (decade - _DECADES + 1) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(values, np.float32))


def num_blocks(size: int) -> int:
    """How many scales that many numbers have."""
    return -(-size // BLOCK)


def encode(values: tf.Tensor, signed: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Codes and scales of numbers.

    Args:
        values: A float32 vector of a known length.
        signed: Whether there may be negative numbers. Where there may not,
            a positive one is never taken for zero: something may be divided
            by its root.
    """
    size = int(values.shape[0])  # type: ignore[arg-type]
    blocks = tf.reshape(
        tf.pad(values, [[0, -size % BLOCK]]) if size % BLOCK else values,
        [-1, BLOCK],
    )
    scales = tf.reduce_max(tf.abs(blocks), axis=1)
    parts = tf.math.divide_no_nan(blocks, scales[:, None])
    parts = tf.reshape(parts, [-1])[:size]
    levels = shares(signed)
    codes = tf.searchsorted((levels[1:] + levels[:-1]) / 2, parts)
    if not signed:
        codes = tf.maximum(codes, tf.cast(values > 0, codes.dtype))
    return tf.cast(codes, tf.uint8), scales


def decode(codes: tf.Tensor, scales: tf.Tensor, signed: bool) -> tf.Tensor:
    """The numbers that codes and scales stand for."""
    parts = tf.gather(shares(signed), tf.cast(codes, tf.int32))
    (size,) = codes.shape
    return parts * tf.repeat(scales, BLOCK)[:size]
