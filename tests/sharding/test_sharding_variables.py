"""A sharded variable goes on as a Keras variable, in shards or as a whole.

One process, whose shard is all of it: flat, and in memory of its own.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from kmem import memory
from kmem.sharding import variables
from kmem.sharding.engine import Engine
from kmem.sharding.variables import ShardedVariable

VALUE = np.arange(6.0, dtype="float32").reshape(2, 3)


@pytest.fixture(params=[False, True], ids=["sharded", "mirrored"])
def variable(request):
    variable = keras.Variable(VALUE, name="kernel")
    variables.shard(variable, Engine(), "weight 0", mirrored=request.param)
    return variable


def test_outside_of_an_update_it_is_the_whole_array(variable):
    assert isinstance(variable, ShardedVariable)
    assert variable.shape == (2, 3)
    np.testing.assert_array_equal(variable, VALUE)
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    np.testing.assert_array_equal(variable[1] + 1, VALUE[1] + 1)


def test_within_an_update_it_is_a_vector(variable):
    mirrored = isinstance(variable, variables.MirroredVariable)
    with (
        variables.as_shards(),
        variables.updated([variable] if mirrored else []),
    ):
        assert variable.shape == (6,)
        np.testing.assert_array_equal(variable, VALUE.ravel())
        variable.assign_add(np.ones(6))

    np.testing.assert_array_equal(variable, VALUE + 1)


def test_an_assigned_array_is_cut(variable):
    variable.assign(2 * VALUE)

    np.testing.assert_array_equal(variable, 2 * VALUE)
    np.testing.assert_array_equal(variable.numbers, 2 * VALUE.ravel())


def test_its_gradient_reaches_its_handle(variable):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(variable))

    gradient = tape.gradient(loss, variable)

    np.testing.assert_array_equal(tf.reshape(gradient, (2, 3)), 2 * VALUE)


def test_a_restored_variable_is_keras_s_own_and_the_same(variable):
    own = vars(variable)["_value"]
    variable.assign(VALUE + 5)

    variables.restore(variable)

    assert type(variable) is keras.Variable
    assert variable.value is own
    np.testing.assert_array_equal(variable, VALUE + 5)


def test_a_function_that_was_traced_before_works_again_afterwards():
    variable = keras.Variable(VALUE)
    double = tf.function(lambda: variable * 2)
    double()

    variables.shard(variable, Engine(), "weight 0")
    variable.assign(VALUE + 1)
    variables.restore(variable)

    np.testing.assert_array_equal(double(), 2 * (VALUE + 1))


def test_a_variable_that_was_made_as_a_vector_is_whole_again():
    weight = keras.Variable(VALUE)
    variables.shard(weight, Engine(), "weight 0")
    variable = keras.Variable(VALUE.ravel(), name="momentum")

    variables.adopt(variable, weight.shard, "slot 0")

    assert variable.shape == (2, 3)
    np.testing.assert_array_equal(variable, VALUE)
    variables.restore(variable)
    assert (variable.shape, variable.ndim) == ((2, 3), 2)
    np.testing.assert_array_equal(variable, VALUE)


def test_its_text_takes_no_other_process(variable):
    assert "shard=0 of 1" in repr(variable)


def test_a_shard_takes_no_memory_besides(native_library):
    variable = keras.Variable(tf.ones((512, 512)))
    before = memory.current("CPU")

    variables.shard(variable, Engine(), "weight 0")
    during = memory.current("CPU")
    variables.restore(variable)

    assert abs(during - before) < 1024
    assert abs(memory.current("CPU") - before) < 1024
