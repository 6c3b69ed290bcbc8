"""Functions with gradients of their own, which look for variables."""

import keras
import tensorflow as tf

from kmem import remat


def reads_variables(function):
    """Has a gradient of its own, which gets the variables that are read."""

    @tf.custom_gradient
    def run(x):
        def gradient(known, variables):
            with tf.GradientTape() as tape:
                tape.watch([x, variables])
                value = function(x)
            return tape.gradient(
                value, [x, variables], output_gradients=3 * known
            )

        return function(x), gradient

    return run


def within_and_around(function):
    return keras.remat(remat.recompute(keras.remat(function)))


LOOKS_FOR_VARIABLES = [
    keras.remat,
    tf.recompute_grad,
    reads_variables,
    within_and_around,
]
