"""Makes a recomputation wait for the gradient that needs it.

Left alone, a graph's executor runs it as soon as its inputs are there, which
is at once, and XLA finds that it computes what the forward pass did, and
merges the two. A control dependency holds the executor back; XLA drops those,
and merges even across its own optimization barrier on the CPU, so there the
inputs are made to depend on the gradient, in a way that leaves every bit as
it is. In eager mode nothing runs early.
"""

import tensorflow as tf

from kmem.base import private_tf
from kmem.graph import fusion
from kmem.graph import names


def in_xla() -> bool:
    """Whether what is traced now will be compiled by XLA."""
    return not tf.executing_eagerly() and private_tf.in_xla()


def after(
    gradients: list[tf.Tensor],
    tensors: list[tf.Tensor],
    weights: list[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Copies tensors into new ones that are there after the gradients.

    Args:
        gradients: What to wait for.
        tensors: What a recomputation starts from.
        weights: The same, but left out where a copy takes memory. What is
            computed from these alone may be merged then.
    """
    if in_xla():
        return delayed(gradients, tensors), [tf.identity(w) for w in weights]
    if tf.executing_eagerly():
        gradients = []
    with tf.control_dependencies(gradients):
        return list(map(names.copy, tensors)), list(map(names.copy, weights))


def delayed(
    gradients: list[tf.Tensor], tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The tensors, such that XLA cannot compute them before the gradients."""
    if not tensors:
        return []
    never = tf.reduce_any([_never(gradient) for gradient in gradients])
    # A zero of the tensor's shape would be computed when XLA compiles.
    return [tf.where(never, tf.zeros([], t.dtype), t) for t in tensors]


def _never(gradient: tf.Tensor) -> tf.Tensor:
    """False, computed from a gradient such that no compiler can tell.

    From all of it: XLA would compute a single element of it by itself, and
    again wherever that is read, and keep what it needs for that.
    """
    if gradient.dtype.is_complex:
        gradient = tf.math.real(gradient)
    # No number's sign is 2, and a comparison with NaN is false.
    return tf.reduce_any(tf.sign(gradient) > 2)


def before(gradients: list, results: list) -> list:
    """Makes `results` wait for `gradients`, in a graph.

    The executor would else follow the chain of input gradients first, while
    the weight gradients, and all they need, stay pending (see ordering.py).

    Args:
        gradients: Tensors, `IndexedSlices` or `None`.
        results: The same.
    """
    if tf.executing_eagerly() or in_xla():
        return results
    ops = [fusion.maker(g) for g in gradients if g is not None]
    with tf.control_dependencies(
        [earlier for op in ops for earlier in fusion.known_before(op)]
    ):
        return [None if r is None else _identity(r) for r in results]


def kept(readers: list[tf.Operation], gradients: list) -> list:
    """Makes one of some gradients wait for operations, so that they run."""
    if not readers or in_xla():
        return gradients
    for i, gradient in enumerate(gradients):
        if gradient is not None and not fusion.is_joined_later(
            fusion.maker(gradient)
        ):
            with tf.control_dependencies(readers):
                copied = _identity(gradient)
            return [*gradients[:i], copied, *gradients[i + 1 :]]
    return gradients


def _identity(gradient):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _identity(gradient.values),
            gradient.indices,
            gradient.dense_shape,
        )
    return names.copy(gradient)
