"""Shards are equal in length, and make up the array again."""

import numpy as np
import pytest
import tensorflow as tf

from kmem.sharding.gathering import Layout


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("shape", [(15,), (3, 5), (1,), (2, 1, 4), (0, 3)])
def test_shards_make_up_the_array(shape, count):
    layout = Layout(shape, count)
    whole = tf.reshape(tf.range(layout.num_elements), shape)

    shards = [layout.cut(whole, rank) for rank in range(count)]

    assert {shard.shape.as_list()[0] for shard in shards} == {layout.length}
    np.testing.assert_array_equal(layout.whole(tf.stack(shards)), whole)


def test_padding_is_zero():
    layout = Layout((3, 5), 4)

    assert layout.length == 4
    assert layout.cut(tf.ones((3, 5)), 3).numpy().tolist() == [1, 1, 1, 0]
