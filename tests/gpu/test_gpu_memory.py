"""`kmem.memory` counts, limits and peaks a GPU as it does a CPU."""

import accelerator
import pytest
import tensorflow as tf
from accelerator import DEVICE

import kmem

pytestmark = accelerator.needs_it

MEGABYTE = 2**20


def zeros(num_bytes):
    with tf.device(DEVICE):
        return tf.zeros([num_bytes // 4]) + 1.0


def runners():
    """`f(x)` in every mode."""
    return {
        "eager": lambda f: f,
        "graph": tf.function,
        "xla": lambda f: tf.function(f, jit_compile=True),
    }


def test_a_tensor_counts_for_its_bytes():
    zeros(MEGABYTE)
    before = kmem.memory.current(DEVICE)

    tensor = zeros(8 * MEGABYTE)

    assert kmem.memory.current(DEVICE) - before == 8 * MEGABYTE
    del tensor
    assert kmem.memory.current(DEVICE) == before


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_a_peak_is_seen_inside_of_a_step(mode):
    with tf.device(DEVICE):
        x = tf.ones([512, 512])

        def step(x):
            return tf.matmul(tf.matmul(x, x), x)

        run = runners()[mode](step)
        run(x)
        with kmem.memory.track(DEVICE) as usage:
            run(x)

    assert usage.peak_bytes - usage.start_bytes >= x.shape[0] ** 2 * 4
    assert usage.end_bytes - usage.start_bytes < MEGABYTE


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_what_does_not_fit_is_refused_and_the_device_goes_on(mode):
    with tf.device(DEVICE):
        x = tf.ones([1024, 1024])
        run = runners()[mode](lambda x: tf.linalg.matmul(x, x) + x)
        run(x)
        with (
            accelerator.limited(MEGABYTE),
            pytest.raises(tf.errors.ResourceExhaustedError),
        ):
            run(x)
        result = run(x)

    assert float(result[0, 0]) == 1025.0


def test_a_limit_below_what_is_in_use_is_refused():
    tensor = zeros(8 * MEGABYTE)

    with pytest.raises(ValueError, match="in use"):
        kmem.memory.limit(MEGABYTE, device=DEVICE)

    assert int(tensor[0]) == 1


def test_a_peak_starts_again():
    del_me = zeros(8 * MEGABYTE)
    del del_me
    kmem.memory.reset_peak(DEVICE)

    assert kmem.memory.peak(DEVICE) == kmem.memory.current(DEVICE)


POOL = """
import kmem

kmem.memory.limit("100MB", device="{device}", pool=True)
import tensorflow as tf

with tf.device("{device}"):
    x = tf.fill([1_000_000], tf.constant(1.0))
pool = kmem.memory.pool("{device}")
print(pool.size, pool.blocks >= 4_000_000, float(x[0]))
"""


def test_blocks_come_from_a_pool(python):
    status, output, errors = python.run(POOL.format(device=DEVICE))

    assert (status, output) == (0, "100000000 True 1.0\n"), errors


def test_the_device_is_the_default():
    if not accelerator.ON_GPU:
        pytest.skip("of a machine with a GPU")

    tensor = zeros(8 * MEGABYTE)

    assert kmem.memory.current() == kmem.memory.current("GPU:0")
    assert int(tensor[0]) == 1
