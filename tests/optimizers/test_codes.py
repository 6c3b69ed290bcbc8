"""Numbers in 8 bits, against the definition of their codes."""

import numpy as np
import pytest
import tensorflow as tf

from kmem import optimizers as codes


def test_shares_are_256_that_grow_tenfold_seven_times():
    for signed in (True, False):
        shares = codes.shares(signed)
        assert len(set(shares)) == 256
        assert shares.max() == 1 and 0 in shares
        # Of each decade twice as many as of the one below.
        counts = [
            int(np.sum((10.0 ** (e - 1) < shares) & (shares < 10.0**e)))
            for e in range(-6, 1)
        ]
        assert counts == [(2 - signed) * 2**k for k in range(7)]
    assert (codes.shares(True) < 0).sum() == 127


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [1, 256, 700])
def test_each_number_gets_the_nearest_code_of_its_block(signed, size):
    values = np.random.default_rng(0).normal(size=size).astype("float32")
    values = values if signed else values**2

    numbers, scales = codes.encode(tf.constant(values), signed)
    again = codes.decode(numbers, scales, signed).numpy()

    assert numbers.dtype == tf.uint8 and numbers.shape == (size,)
    assert scales.shape == (-(-size // 256),)
    for start in range(0, size, 256):
        block = values[start : start + 256]
        scale = np.abs(block).max()
        known = codes.shares(signed) * scale
        least = np.abs(block[:, None] - known).min(axis=1)
        error = np.abs(again[start : start + 256] - block)
        np.testing.assert_allclose(error, least, atol=2e-7 * scale)
        # The largest is exact, unless it is negative: -1 is no share.
        largest = np.abs(block).argmax()
        assert error[largest] == 0 or block[largest] < 0


def test_zeros_stay_and_a_second_moment_never_becomes_zero():
    values = tf.constant([0.0, 1e-30, 1.0] + [0.0] * 300)

    again = codes.decode(*codes.encode(values, False), False).numpy()

    assert again[0] == 0 and again[2] == 1 and not again[3:].any()
    assert again[1] > 0
