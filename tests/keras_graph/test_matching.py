import keras
import pytest
import tensorflow as tf
from keras import layers

from kmem.keras_graph import applying
from kmem.keras_graph.profiling import measure
from kmem.keras_graph.profiling import record_batch


def record(*block, rows=4):
    model = keras.Sequential([keras.Input((6,)), *block])
    return record_batch(model, tf.TensorSpec((rows, 6)))


def dense(units=6):
    return layers.Dense(units)


@pytest.fixture(scope="module")
def network():
    return measure(record(dense(), dense()), "flops").network


def test_names_may_differ_in_their_numbers(network):
    """Keras counts layers in the order in which a program makes them."""
    applying.check(network, record(dense(), dense()))


@pytest.mark.parametrize(
    "block, rows, difference",
    [
        ([dense(), layers.ReLU()], 4, "operation 1 is 'dense_1'.*'re_lu"),
        ([dense(7), dense(6)], 4, "gives 96 B, for a model in which .* 112 B"),
        ([dense(), dense()], 5, "gives 96 B, for a model in which .* 120 B"),
        ([dense()], 4, "operation 1 is .*, for a model .* is 'loss'"),
    ],
    ids=["layer", "width", "rows", "length"],
)
def test_a_difference_is_named(network, block, rows, difference):
    with pytest.raises(ValueError, match="plan for this model") as error:
        applying.check(network, record(*block, rows=rows))

    assert error.match(difference.replace("dense_1", r"dense_?\d*"))


def test_other_connections_are_named(network):
    inputs = keras.Input((6,))
    first = layers.Dense(6)(inputs)
    second = layers.Dense(6)(inputs)
    model = keras.Model(inputs, [first, second])

    with pytest.raises(ValueError, match="is connected otherwise"):
        applying.check(network, record_batch(model, tf.TensorSpec((4, 6))))
