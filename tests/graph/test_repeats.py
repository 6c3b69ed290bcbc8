"""Repeated numbers are computed once, and no bit is another one.

Each function is compared with TensorFlow's own gradient in a graph, where its
graph optimizer has its say. No count of elements is a power of two, by which
division is exact.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import ancestors
from keras import layers
from peaks import least_peak_bytes

from kmem import remat
from kmem.graph import ordering
from kmem.graph import repeats

SHAPE = (6, 5, 7, 8)


def normalized(layer):
    layer.build(SHAPE)
    return lambda x: layer(x, training=True)


def several_means(x):
    rows, channels = (
        tf.reduce_mean(x, axis=axis, keepdims=True) for axis in (0, 3)
    )
    return x * rows + tf.square(x - channels) / rows


def mean_of(name):
    function = getattr(keras.activations, name)
    return lambda x: x * tf.reduce_mean(function(x), (1, 2), keepdims=True)


FUNCTIONS = {
    "batch_normalization": normalized(layers.BatchNormalization()),
    "layer_normalization": normalized(layers.LayerNormalization()),
    "group_normalization": normalized(layers.GroupNormalization(4)),
    "several_means": several_means,
    "variance": lambda x: x * tf.math.reduce_variance(x),
    "product_of_products": lambda x: (
        x + tf.reduce_mean(tf.nn.silu(x), axis=(1, 2), keepdims=True)
    ),
    **{
        name: mean_of(name)
        for name in ("exponential", "gelu", "hard_silu", "softplus")
    },
    "scaled": lambda x: (
        x
        + tf.reduce_mean(
            tf.tanh(x) * tf.reduce_max(x, (0, 1, 2)), (1, 2), keepdims=True
        )
    ),
    "of_one_length": lambda x: tf.broadcast_to(
        tf.math.rsqrt(tf.reduce_sum(x * x, 3, keepdims=True))
        * tf.reduce_mean(x, 3, keepdims=True),
        tf.shape(x),
    ),
    "sum_of_sums": lambda x: x + 3.0 * (x - tf.reduce_mean(x)) + tf.tanh(x),
}


def gradient(function, spec, made_once=True):
    """A function of an argument and the gradient of the result, in a graph."""

    @tf.function(input_signature=[spec, spec], autograph=False)
    def step(x, of_result):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        found = tape.gradient(y, x, output_gradients=of_result)
        if made_once:
            found = repeats.once(ordering.needed(x.graph, {found.op}))(found)
        return found

    return step


@pytest.mark.parametrize("rows", [SHAPE[0], None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_is_the_same_to_the_bit(name, rows):
    spec = tf.TensorSpec((rows, *SHAPE[1:]))
    x, of_result = tf.random.stateless_uniform((2, *SHAPE), (1, 2), 0.5, 2.0)

    want = gradient(FUNCTIONS[name], spec, made_once=False)(x, of_result)
    got = gradient(FUNCTIONS[name], spec)(x, of_result)

    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows", [SHAPE[0], None])
@pytest.mark.parametrize("name", ["batch_normalization", "layer_normalization"])
def test_nothing_is_repeated_for_all_elements(name, rows):
    spec = tf.TensorSpec((rows, *SHAPE[1:]))

    def num_repeated(made_once):
        step = gradient(FUNCTIONS[name], spec, made_once)
        (result,) = step.get_concrete_function().outputs
        made = [
            op.outputs[0]
            for op in {result.op} | ancestors(result.op)
            if op.type in ("BroadcastTo", "Tile")
        ]
        return sum(t.shape.as_list() == spec.shape.as_list() for t in made)

    assert num_repeated(made_once=False) == 2
    assert num_repeated(made_once=True) == 0


@pytest.mark.parametrize("rows", [60, None])
def test_batch_normalization_needs_less(native_library, rows):
    shape = (60, 12, 12, 64)
    x, of_result = tf.ones(shape), tf.ones(shape)
    layer = layers.BatchNormalization()
    layer.build(shape)

    def peak_bytes(made_once):
        step = gradient(
            lambda x: layer(x, training=True),
            tf.TensorSpec((rows, *shape[1:])),
            made_once,
        )
        return least_peak_bytes(step, x, of_result)

    array_bytes = 4 * np.prod(shape)
    assert peak_bytes(True) < peak_bytes(False) - 0.9 * array_bytes


def test_what_a_sum_of_sums_adds_first_stays():
    x = tf.TensorSpec(SHAPE)
    step = gradient(FUNCTIONS["sum_of_sums"], x).get_concrete_function()

    assert any(op.type == "AddN" for op in step.graph.get_operations())


def test_what_runs_again_within_what_runs_again_is_made_anew_once():
    """Else what was made anew first would be again. Nobody reads that, but the
    graph optimizer does not take it out, and it holds arrays until it runs."""
    layer = layers.BatchNormalization()
    normalize = normalized(layer)
    nested = remat.recompute(remat.recompute(normalize))

    step = gradient(nested, tf.TensorSpec(SHAPE), made_once=False)
    graph = step.get_concrete_function().graph

    made_anew = {op for op in graph.get_operations() if "/once" in op.name}
    (result,) = (tensor.op for tensor in graph.outputs)
    assert made_anew
    assert made_anew <= {result} | ancestors(result)
