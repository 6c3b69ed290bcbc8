"""What TensorFlow leaves out of second derivatives, put back.

`tf.nn.moments` takes the mean in its variance for constant. The derivative of
that is right, for deviations add up to zero, and the derivative of the
derivative is not: products with the Hessian of a net with batch, layer or
group normalization are wrong, by tens of percent in small nets. What this
module does not do: moments that a strategy synchronizes, and what the user's
own code takes for constant.
"""

import tensorflow as tf

from kmem.base import patching


def exact() -> patching.Context:
    """Within, moments have derivatives of any order."""
    return patching.attribute(tf.nn, "moments", _moments)


def _moments(x, axes, shift=None, keepdims=False, name=None):
    """The mean and the variance, as `tf.nn.moments` gives them."""
    dtype = x.dtype
    if dtype == tf.float16:
        x = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(x, axes, keepdims=True)
    squares = tf.math.squared_difference(x, mean)
    variance = tf.reduce_mean(squares, axes, keepdims=True)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return tf.cast(mean, dtype), tf.cast(variance, dtype)
