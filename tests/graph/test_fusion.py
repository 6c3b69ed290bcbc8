"""What TensorFlow makes when it makes a graph."""

import tensorflow as tf

from kmem.graph import fusion


def test_a_graph_of_any_depth_can_be_asked_whether_it_is_constant():
    with tf.Graph().as_default():
        ends = [tf.constant([1.0]), tf.compat.v1.placeholder("float32", [1])]
        for _ in range(2000):
            ends = [tf.nn.relu(end) for end in ends]

        assert [fusion.is_constant(end) for end in ends] == [True, False]
