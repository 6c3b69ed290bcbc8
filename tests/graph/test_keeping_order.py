"""A step runs its operations in one order, and needs the same memory each
time."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from peaks import peaks_bytes
from reference import relative_error

import kmem

pytestmark = pytest.mark.usefixtures("native_library")


def _residual():
    """Whose branches could run side by side."""
    inputs = x = keras.Input((16, 16, 8))
    for _ in range(3):
        y = layers.Conv2D(8, 3, padding="same")(x)
        y = layers.Activation("silu")(y)
        x = layers.Add()([x, layers.Conv2D(8, 3, padding="same")(y)])
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x))


class _Branching(layers.Layer):
    def call(self, x):
        def wide():
            return ops.tanh(x @ ops.transpose(x, (0, 2, 1))) @ x

        return ops.cond(ops.sum(x) > 0, wide, lambda: x + 1.0)


def _with_loops_and_branches():
    inputs = keras.Input((16, 8))
    x = _Branching()(inputs)
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(x)
    x = _Branching()(x)
    return keras.Model(inputs, layers.LSTM(8)(x))


def _trained(make_model, shape, options):
    """The weights after some steps, and what each step needed."""
    keras.utils.set_random_seed(0)
    model = kmem.wrap(make_model())
    model.compile("adam", "mse", jit_compile=False)
    model.memory_options = options
    random = np.random.default_rng(0)
    # Held here, so that when a step lets go of them counts for nothing.
    x = tf.constant(random.normal(size=shape), "float32")
    y = tf.constant(random.normal(size=(shape[0], 8)), "float32")
    peaks = peaks_bytes(model.train_on_batch, x, y)
    return model.get_weights(), peaks


@pytest.mark.parametrize(
    "options",
    [
        kmem.MemoryOptions(remat="auto"),
        kmem.MemoryOptions(remat="1GB"),
        kmem.MemoryOptions(microbatches=2),
        kmem.MemoryOptions(microbatches=2, remat="auto"),
    ],
    ids=str,
)
def test_each_step_needs_the_same_bytes(options):
    _, peaks = _trained(_residual, (64, 16, 16, 8), options)
    # But for scalars, of which each takes 64 bytes.
    assert max(peaks) <= min(peaks) + 256


@pytest.mark.parametrize("steps", [1, 2])
def test_loops_and_branches_run_in_it(steps):
    options = kmem.MemoryOptions(gradient_accumulation_steps=steps)
    shape = (4, 16, 8)
    weights, _ = _trained(_with_loops_and_branches, shape, options)
    if steps == 1:
        expected, _ = _trained(_with_loops_and_branches, shape, None)
        assert relative_error(weights, expected) < 1e-6
    assert all(np.isfinite(weight).all() for weight in weights)


def _attending():
    """In micro-batches TensorFlow merges what scales their losses, and
    computes it under the name of the last."""
    inputs = x = keras.Input((128, 8))
    for _ in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(x))


def test_a_micro_batch_needs_what_a_batch_of_its_size_needs():
    whole = kmem.MemoryOptions(remat=1.0)
    split = kmem.MemoryOptions(microbatches=2)

    _, expected = _trained(_attending, (8, 128, 8), whole)
    _, peaks = _trained(_attending, (16, 128, 8), split)

    # Besides the rest of the batch, and sums of gradients.
    assert max(peaks) < 1.05 * max(expected)
