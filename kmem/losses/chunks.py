"""Cross-entropy of a matrix product, in chunks of tokens.

The logits of a token are `hidden @ weight + bias`: as many numbers as there
are classes. Those of all tokens are the largest tensor of a language model,
and only sums over them are needed: the loss, and the gradients of the hidden
states and of the weight. Here they exist for one chunk of tokens at a time
(Wijmans et al., Cut Your Losses, arXiv 2411.09009; Hsu et al., Liger Kernel,
arXiv 2410.10989). Where it is known how much each token counts, the gradient is
computed in the same pass as the loss, and costs no logits a second time.
Else, for one loss a token, the backward pass computes them again.

A chunk's logits are as large as the hidden states or, up to some tokens, as the
gradient of the weight. What it adds to a larger gradient is made for some rows
at a time, and added in place. Sums over tokens are kept in float32 where the
logits have 16 bits.

What this module does not do: derivatives of the gradient. They are refused.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kmem.graph.releasing import zeros

# For so many tokens a product takes longer than to read the weight, and to add
# to its gradient: it has twice as many operations for each number of these.
_ENOUGH_TOKENS = 256
# Of rows of a gradient: old, new, and what is added.
_NUM_COPIES = 3

# Makes a number a token of labels and logits, `(tokens,)`.
TokenMetric = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """What is computed of the tensors.

    Attributes:
        num_classes: How many logits a token has.
        biased: Whether the last of the weights is added to each.
        multiply: Gives the logits of hidden states and the other weights.
        axis: That of the classes in the one matrix of a plain product.
        compute_dtype: What logits are computed in.
        loss_dtype: What the loss is computed in.
        label_smoothing: The share of a label that goes to all classes.
        soft_cap: Logits are `soft_cap * tanh(logits / soft_cap)`.
        z_loss: The factor of the squared log of the softmax's denominator.
    """

    num_classes: int
    biased: bool = False
    multiply: Callable[..., Any] = tf.matmul
    axis: int | None = None
    compute_dtype: str = "float32"
    loss_dtype: str = "float32"
    label_smoothing: float = 0.0
    soft_cap: float | None = None
    z_loss: float = 0.0


@dataclasses.dataclass
class Tokens:
    """What comes one for each token, in one order.

    Attributes:
        hidden: `(tokens, features)`.
        labels: `(tokens,)` integers, or `(tokens, classes)`.
        coefficients: How much the loss of each token counts, `(tokens,)`. The
            label of one that does not count is not looked at.
    """

    hidden: tf.Tensor
    labels: tf.Tensor
    coefficients: tf.Tensor


def weighted_sum(
    tokens: Tokens,
    weights: Sequence[tf.Tensor],
    form: Form,
    metrics: Sequence[TokenMetric] = (),
    differentiate: bool = True,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The sum of the tokens' losses, times their coefficients.

    Args:
        weights: What has a gradient, besides the hidden states.
        metrics: What to compute of each token's logits besides.
        differentiate: Whether to compute a gradient along with it, which is
            needed if there will be a backward pass.

    Returns:
        A scalar, and `(tokens,)` of each of the metrics.
    """

    @tf.custom_gradient
    def compute(hidden, *weights):
        # Relative ones, so that their products with 16 bits do not underflow.
        largest = tf.reduce_max(tf.abs(tokens.coefficients))
        relative = tf.math.divide_no_nan(tokens.coefficients, largest)
        scaled = dataclasses.replace(
            tokens, hidden=hidden, coefficients=relative
        )
        sums, found = _run(scaled, weights, form, metrics, differentiate)

        def gradient(upstream, *_):
            scale = largest * tf.cast(upstream, largest.dtype)
            return sums.gradient(scale, [hidden, *weights])

        return (sums.loss * largest, *found), gradient

    computed: Any = compute(tokens.hidden, *weights)
    total, *found = computed
    return total, [tf.stop_gradient(each) for each in found]


def token_losses(
    tokens: Tokens, weights: Sequence[tf.Tensor], form: Form
) -> tf.Tensor:
    """The loss of each token, `(tokens,)`, times its coefficient. Its gradient
    computes the logits again."""

    @tf.custom_gradient
    def compute(hidden, *weights):
        given = dataclasses.replace(tokens, hidden=hidden)
        sums, _ = _run(given, weights, form, (), False)

        def gradient(upstream):
            weighted = dataclasses.replace(
                given,
                coefficients=given.coefficients
                * tf.cast(upstream, given.coefficients.dtype),
            )
            sums, _ = _run(weighted, weights, form, (), True)
            one = tf.ones([], form.loss_dtype)
            return sums.gradient(one, [hidden, *weights])

        return sums.losses, gradient

    losses: Any = compute(tokens.hidden, *weights)
    return losses


def tokens_in_chunk(
    num_tokens, num_features: int, num_classes: int, hidden_bytes: int
):
    """How many tokens a chunk has, so that its float32 logits are at most as
    large as hidden states, or the weight's gradient: a quarter of a large one.

    Args:
        num_tokens: An int64 scalar, or an int.
        hidden_bytes: Of one element of the hidden states.
    """
    as_hidden = num_tokens * (num_features * hidden_bytes) // (num_classes * 4)
    as_weight = min(num_features, max(num_features // 4, _ENOUGH_TOKENS))
    size = tf.maximum(as_hidden, max(1, as_weight))
    # As many chunks, of equal sizes but for less than a token each.
    count = tf.maximum(-(-num_tokens // size), 1)
    return tf.maximum(-(-num_tokens // count), 1), count


def coefficients_of(
    reduce: Callable[[tf.Tensor], Any], tokens: tf.Tensor, dtype: str
) -> tf.Tensor:
    """How much the loss of each token counts in what a reduction makes.

    Keras's reductions are linear in the tokens' losses, so that it is their
    gradient, whatever weights and masks they have, and whatever scales them.

    Args:
        reduce: Takes losses, `tokens.shape[:-1]`, and gives a loss.
        tokens: Hidden states.

    Returns:
        A tensor of the shape of the losses.
    """
    with tf.GradientTape() as tape:
        losses = tf.zeros(tf.shape(tokens)[:-1], dtype)
        losses = tf.ensure_shape(losses, tokens.shape[:-1])
        tape.watch(losses)
        reduced = reduce(losses)
    # A group of losses that is left out of a pass has none.
    zero = tf.UnconnectedGradients.ZERO
    gradient = tape.gradient(reduced, losses, unconnected_gradients=zero)
    return tf.convert_to_tensor(gradient)


@dataclasses.dataclass
class _Sums:
    """What came of all tokens: the loss, that of each, and gradients."""

    loss: tf.Tensor
    losses: tf.Tensor
    gradients: list[tf.Tensor]

    def gradient(self, scale: tf.Tensor, sources: list) -> list[tf.Tensor]:
        """The gradients, times a scalar, in the dtypes of the sources."""
        scaled = [
            tf.cast(tf.cast(g, scale.dtype) * scale, source.dtype)
            for g, source in zip(self.gradients, sources, strict=True)
        ]
        return once_differentiable(scaled, sources, "cross-entropy")


def _run(
    tokens: Tokens, weights: Sequence, form: Form, metrics, differentiate: bool
) -> tuple[_Sums, list[tf.Tensor]]:
    """Goes over the chunks, and adds up."""
    dtype, loss_dtype = form.compute_dtype, tf.as_dtype(form.loss_dtype)
    # What is not watched is not kept by a tape in eager mode.
    weights = [tf.stop_gradient(each) for each in weights]
    hidden = tf.cast(tf.stop_gradient(tokens.hidden), dtype)
    num_features = hidden.shape[-1]
    num_tokens = tf.shape(hidden, tf.int64)[0]
    size, count = tokens_in_chunk(
        num_tokens, num_features, form.num_classes, hidden.dtype.size
    )
    computed = [tf.cast(each, dtype) for each in weights]
    bias = [computed.pop()] if form.biased else []
    chunked = [
        _chunked(each, size, count)
        for each in (
            hidden,
            tf.stop_gradient(tokens.labels),
            tf.stop_gradient(tokens.coefficients),
        )
    ]
    count = tf.cast(count, tf.int32)
    # One number a token: the loss, and each of the metrics.
    columns = [
        tf.TensorArray(loss_dtype, count, element_shape=[None])
        for _ in range(1 + len(metrics))
    ]
    states, sums, num_slices = [], [], 1
    # Without a graph a sum is copied whole to change a part.
    if form.axis is not None and not tf.executing_eagerly():
        num_slices = _NUM_COPIES * min(4, num_features // _ENOUGH_TOKENS) or 1
    if differentiate:
        states = [
            tf.TensorArray(dtype, count, element_shape=[None, num_features])
        ]
        sums = [zeros(tf.shape(each), loss_dtype) for each in weights]

    def slopes_of(i):
        """The chunk's columns, its loss's slope in each logit, and what makes
        gradients of such slopes."""
        h, labels, coefficients = (each[i] for each in chunked)
        counts = tf.not_equal(coefficients, 0)
        sources = [h] if num_slices > 1 else [h, *computed]
        recorded: Any = tf.GradientTape(watch_accessed_variables=False)
        with recorded as tape:
            tape.watch(sources)
            product = raw = form.multiply(h, *computed)
        differentiated = functools.partial(
            tape.gradient, product, sources, unconnected_gradients="zero"
        )
        if bias:
            raw += bias[0]
        if form.soft_cap is not None:
            raw = form.soft_cap * tf.tanh(raw / form.soft_cap)
        # Before the loss, which may take the logits' place.
        found = [tf.cast(metric(labels, raw), loss_dtype) for metric in metrics]
        with tf.control_dependencies(found):
            logits = tf.cast(raw, loss_dtype)
        if len(labels.shape) == 1:
            labels = tf.where(counts, labels, 0)
        losses, slopes = _losses(logits, labels, form, differentiate)
        losses = tf.where(counts, losses * coefficients, 0)
        if form.soft_cap is not None and differentiate:
            slopes *= 1 - tf.square(logits / form.soft_cap)
        return coefficients, [losses, *found], slopes, differentiated

    def body(i, total, columns, states, sums):
        # What is as large as the logits goes when it was used.
        coefficients, found, slopes, differentiated = slopes_of(i)
        columns = [
            column.write(i, tf.reshape(each, [-1]))
            for column, each in zip(columns, found, strict=True)
        ]
        total += tf.reduce_sum(found[0])
        if differentiate:
            slopes = tf.cast(slopes * coefficients[:, None], dtype)
            moved, *addends = differentiated(output_gradients=slopes)
            states = [states[0].write(i, moved)]
            if bias:
                addends.append(tf.reduce_sum(tf.cast(slopes, loss_dtype), 0))
            cut = []
            if num_slices > 1:
                factors = (chunked[0][i], slopes)[:: 1 if form.axis else -1]
                cut = [_with_product(*factors, total=sums[0], count=num_slices)]
            rest = zip(sums[len(cut) :], addends, strict=True)
            sums = cut + [each + tf.cast(x, loss_dtype) for each, x in rest]
        return i + 1, total, columns, states, sums

    _, total, columns, states, sums = tf.while_loop(
        lambda i, *_: i < count,
        body,
        (tf.constant(0), tf.zeros([], loss_dtype), columns, states, sums),
        parallel_iterations=1,
        maximum_iterations=count,
    )
    losses, *found = (column.concat()[:num_tokens] for column in columns)
    gradients = [each.concat()[:num_tokens] for each in states] + sums
    return _Sums(total, losses, gradients), found


def _with_product(left, right, *, total, count: int):
    """Adds `transpose(left) @ right`, some of its rows after others."""
    bounds = [left.shape[-1] * i // count for i in range(count + 1)]
    for begin, end in itertools.pairwise(bounds):
        with tf.control_dependencies([total]):
            rows = tf.matmul(left[:, begin:end], right, transpose_a=True)
            total = tf.raw_ops.TensorStridedSliceUpdate(
                input=total,
                begin=[begin],
                end=[end],
                strides=[1],
                value=total[begin:end] + tf.cast(rows, total.dtype),
            )
    return total


def _chunked(tensor, size, count):
    """`(chunks, tokens of a chunk, ...)`, with zeros at the end."""
    missing = size * count - tf.shape(tensor, tf.int64)[0]
    rest = [[0, 0]] * (len(tensor.shape) - 1)
    padded = tf.pad(tensor, [[0, missing], *rest])
    shape = tf.concat([[count, size], tf.shape(tensor, tf.int64)[1:]], 0)
    chunks = tf.reshape(padded, shape)
    return tf.ensure_shape(chunks, [None, None, *tensor.shape[1:]])


def _losses(logits, labels, form: Form, differentiate: bool):
    """The tokens' losses, and what they are to each logit."""
    if len(labels.shape) > 1:
        labels = tf.cast(labels, logits.dtype)
        smoothing = form.label_smoothing
        if smoothing:
            labels = labels * (1 - smoothing) + smoothing / labels.shape[-1]
        return tf.raw_ops.SoftmaxCrossEntropyWithLogits(
            features=logits, labels=labels
        )
    losses, slopes = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
        features=logits, labels=labels
    )
    if not (form.label_smoothing or form.z_loss):
        return losses, slopes
    chosen = tf.gather(logits, labels, axis=1, batch_dims=1)
    log_sum = losses + chosen
    smoothing, num_classes = form.label_smoothing, logits.shape[-1]
    losses += form.z_loss * tf.square(log_sum)
    losses += smoothing * (chosen - tf.reduce_mean(logits, -1))
    if differentiate:
        one_hot = tf.one_hot(labels, num_classes, dtype=logits.dtype)
        factor = 2 * form.z_loss * log_sum[:, None]
        slopes += factor * (slopes + one_hot)
        slopes += smoothing * (one_hot - 1 / num_classes)
    return losses, slopes


def once_differentiable(gradients: list, sources: list, name: str) -> list:
    """The gradients, of which a gradient is an error.

    Else what a function of its own gradient has forgotten would count as
    constant.

    Args:
        sources: What the gradients depend on.
        name: What has been differentiated.
    """

    @tf.custom_gradient
    def compute(*tensors):
        def refuse(*_):
            raise ValueError(
                f"The gradient of a {name} in chunks must not be "
                "differentiated: what it was computed from is gone. Leave "
                "chunks out where second derivatives are taken. Received: a "
                "second gradient"
            )

        given = tensors[: len(gradients)]
        return tuple(tf.identity(each) for each in given), refuse

    return list(compute(*gradients, *sources))
