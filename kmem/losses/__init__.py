"""Cross-entropy without the logits of all tokens at once.

Here is `LinearCrossEntropy`, for layers and steps of one's own.
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from kmem.base.checks import is_integer
from kmem.base.checks import is_real
from kmem.base.checks import must_be
from kmem.base.private_keras import loss as keras_loss
from kmem.base.private_keras import mask_of
from kmem.losses import chunks

__all__ = ["LinearCrossEntropy"]

_REDUCTIONS = "sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"


class LinearCrossEntropy:
    """Cross-entropy of hidden states times a matrix, in chunks of tokens.

    It is what `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`
    gives of `hidden @ weight + bias`, weighted, masked and reduced as there,
    but the logits of all tokens never exist at once: its peak is that of the
    hidden states and the weight's gradient. The gradient is computed together
    with the loss.

    Args:
        reduction: One of Keras's, or `None` for one loss a token, whose
            gradient computes the logits a second time.
        ignore_class: A label whose tokens do not count.
        label_smoothing: From 0 to 1, the share of each label that goes to all
            classes.
        soft_cap: A positive number that logits do not exceed: they are
            `soft_cap * tanh(logits / soft_cap)`.
        z_loss: A factor of the square of the log of the softmax's
            denominator, which is added to each token's loss.
        transposed: Whether the weight is `(classes, features)`, as that of an
            embedding.
        dtype: What losses and sums are computed in.

    Raises:
        ValueError: If an argument is not of this form. In its gradient, if
            that is differentiated again.

    Example:

    ```python
    import keras
    import tensorflow as tf

    import kmem

    hidden = tf.Variable(keras.random.normal((2, 16, 8)))
    weight = tf.Variable(keras.random.normal((8, 1000)))
    labels = keras.random.randint((2, 16), 0, 1000)
    loss = kmem.losses.LinearCrossEntropy()
    with tf.GradientTape() as tape:
        value = loss(labels, hidden, weight)
    gradients = tape.gradient(value, [hidden, weight])
    ```
    """

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        ignore_class: int | None = None,
        label_smoothing: float = 0.0,
        soft_cap: float | None = None,
        z_loss: float = 0.0,
        transposed: bool = False,
        dtype: str = "float32",
    ):
        known = f"one of {', '.join(_REDUCTIONS)}, or None"
        is_known = reduction in (*_REDUCTIONS, "none", None)
        must_be(is_known, reduction, "reduction", known)
        share, kind = label_smoothing, "a number from 0 to 1"
        must_be(
            share == 0 or is_real(share, 0, 1), share, "label_smoothing", kind
        )
        is_cap = soft_cap is None or is_real(soft_cap, 1e-30, 1e30)
        must_be(is_cap, soft_cap, "soft_cap", "a positive number, or None")
        is_factor = z_loss == 0 or is_real(z_loss, 0, 1e30)
        must_be(is_factor, z_loss, "z_loss", "0 or a positive number")
        is_label = ignore_class is None or is_integer(ignore_class)
        must_be(is_label, ignore_class, "ignore_class", "an integer, or None")
        self._reduction: Any = None if reduction == "none" else reduction
        self._ignore_class = ignore_class
        self._transposed = transposed
        self._form = functools.partial(
            chunks.Form,
            multiply=functools.partial(tf.matmul, transpose_b=transposed),
            axis=0 if transposed else 1,
            loss_dtype=dtype,
            label_smoothing=float(label_smoothing),
            soft_cap=soft_cap,
            z_loss=float(z_loss),
        )

    def __call__(
        self,
        labels: Any,
        hidden: Any,
        weight: Any,
        bias: Any = None,
        sample_weight: Any = None,
        mask: Any = None,
    ) -> tf.Tensor:
        """The loss.

        Args:
            labels: Integers, `(...)`, `(..., 1)`, or as many in one axis.
            hidden: Hidden states, `(..., features)`. Logits are computed in
                their dtype.
            weight: A tensor or variable `(features, classes)`.
            bias: `(classes,)`, or `None`.
            sample_weight: As Keras's losses take it.
            mask: `(...)`, of the tokens that count. By default that of Keras
                on the hidden states.

        Returns:
            A scalar, or without a reduction a tensor `(...)`.

        Raises:
            ValueError: If the last axes of `hidden` and `weight` are not
                known, or a shape does not fit.
        """
        mask = mask_of(hidden) if mask is None else mask
        hidden = tf.convert_to_tensor(hidden)
        weight = tf.convert_to_tensor(weight)
        biases = [] if bias is None else [tf.convert_to_tensor(bias)]
        dtype = keras.backend.standardize_dtype(hidden.dtype)
        shape = weight.shape[::-1] if self._transposed else weight.shape
        last = hidden.shape[-1] if hidden.shape.rank else None
        if shape.rank != 2 or last is None or last != shape[0]:
            raise ValueError(
                "`weight` must be (features, classes), or with "
                "`transposed=True` (classes, features), for hidden states "
                f"(..., features). Received: shapes {weight.shape} and "
                f"{hidden.shape}, transposed={self._transposed}"
            )
        features, classes = shape
        form = self._form(classes, bias is not None, compute_dtype=dtype)
        labels = tf.cast(tf.convert_to_tensor(labels), tf.int64)
        lead = hidden.shape[:-1]
        _check_shape("labels", labels, lead, [*lead, 1], [lead.num_elements()])
        for each in biases:
            _check_shape("bias", each, [classes])
        if mask is not None:
            _check_shape("mask", tf.convert_to_tensor(mask), lead)
        labels = tf.reshape(labels, tf.shape(hidden)[:-1])
        if self._ignore_class is not None:
            counts = tf.not_equal(labels, self._ignore_class)
            mask = counts if mask is None else tf.cast(mask, "bool") & counts

        def reduce(losses):
            return keras_loss.reduce_weighted_values(
                losses, sample_weight, mask, self._reduction, form.loss_dtype
            )

        coefficients = chunks.coefficients_of(reduce, hidden, form.loss_dtype)
        tokens = chunks.Tokens(
            tf.reshape(hidden, [-1, features]),
            tf.reshape(labels, [-1]),
            tf.reshape(coefficients, [-1]),
        )
        if self._reduction is None:
            losses = chunks.token_losses(tokens, [weight, *biases], form)
            return tf.reshape(losses, tf.shape(hidden)[:-1])
        return chunks.weighted_sum(tokens, [weight, *biases], form)[0]


def _check_shape(name: str, tensor: tf.Tensor, *shapes: Any) -> None:
    if not any(tensor.shape.is_compatible_with(shape) for shape in shapes):
        known = " or ".join(str(tf.TensorShape(shape)) for shape in shapes)
        raise ValueError(
            f"`{name}` must have the shape {known}. Received: {tensor.shape}"
        )
