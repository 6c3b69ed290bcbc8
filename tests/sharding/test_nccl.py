"""What NCCL is asked to do, as far as it can be told without a GPU.

TensorFlow takes NCCL only for collectives that name it
(`AssignCollectiveType` in collective_param_resolver_local.cc), and its
`NcclManager` knows the dtypes below and takes all others for float32.
"""

import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from kmem.sharding.engine import Group

OF_NCCL = {tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}
DTYPES = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
    *(tf.bool, tf.uint8, tf.int32, tf.uint32, tf.int64),
)


def collectives(call, dtype, *shape) -> list:
    """The collective operations that a call makes when it is traced."""
    group = Group(2, 1, device="/device:GPU:0", timeout=60.0)
    traced = tf.function(lambda x: call(group, x)).get_concrete_function(
        tf.TensorSpec(shape, dtype)
    )
    found = [o for o in traced.graph.get_operations() if "Coll" in o.type]
    assert found
    return found


def is_for_nccl(operation) -> bool:
    return (
        operation.get_attr("communication_hint") == b"nccl"
        and operation.get_attr("T") in OF_NCCL
        and "GPU" in operation.device
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("method", ["gather", "broadcast"])
def test_what_is_sent_is_nccls(method, dtype):
    made = collectives(
        lambda group, x: getattr(group, method)(x, "it"), dtype, 6
    )

    assert all(map(is_for_nccl, made))


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("method", ["all_reduce", "reduce_scatter"])
def test_what_is_summed_is_nccls(method, dtype):
    made = collectives(
        lambda group, x: getattr(group, method)(x, "it"), dtype, 2, 6
    )

    assert all(map(is_for_nccl, made))


@pytest.mark.parametrize(
    ("operation", "merges"), [("Add", "Add"), ("Max", "Maximum")]
)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.float32])
def test_a_gpu_has_the_kernels_of_a_reduction(operation, merges, dtype):
    (reduction,) = collectives(
        lambda group, x: group.all_reduce(x, "it", operation), dtype, 3
    )

    assert any(
        each.device_type in ("GPU", "DEFAULT")
        for each in kernels.get_registered_kernels_for_op(reduction.type).kernel
    )
    assert any(
        each.device_type in ("GPU", "DEFAULT")
        and dtype.as_datatype_enum
        in each.constraint[0].allowed_values.list.type
        for each in kernels.get_registered_kernels_for_op(merges).kernel
    )
