"""The device that tests marked `gpu` run on, and models for it.

`KMEM_TEST_DEVICE=CPU` runs them on the CPU, limited as a device would be: that
tests the tests, where no GPU is at hand.
"""

import contextlib
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem

# Three decimal digits, and which convolutions have them is TensorFlow's choice.
tf.config.experimental.enable_tensor_float_32_execution(False)
DEVICE = os.environ.get("KMEM_TEST_DEVICE", "GPU")
ON_GPU = DEVICE.startswith("GPU")
MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}
BATCH_SIZE = 32
STEPS = 3
# What float32 makes of sums in another order, after six steps.
ROUNDING = 2e-3

needs_it = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not tf.config.list_physical_devices(DEVICE.partition(":")[0]),
        reason=f"there is no {DEVICE}",
    ),
]


@contextlib.contextmanager
def limited(num_bytes):
    """Within, the device has this many bytes more than are in use."""
    kmem.memory.limit(kmem.memory.current(DEVICE) + num_bytes, device=DEVICE)
    try:
        yield
    finally:
        kmem.memory.limit(None, device=DEVICE)


def convolutional(mode, normalizes=False):
    """A net whose activations are most of what its step needs."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((32, 32, 3))]
    for _ in range(6):
        layers.append(keras.layers.Conv2D(16, 3, padding="same"))
        if normalizes:
            layers.append(keras.layers.BatchNormalization())
        layers.append(keras.layers.Activation("gelu"))
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, **MODES[mode])
    return model


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH_SIZE, 32, 32, 3)).astype("float32")
    return x, rng.integers(4, size=len(x))


class Peaks(keras.callbacks.Callback):
    """The peak of each step, above what is held between them."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def on_train_batch_begin(self, batch, logs=None):
        kmem.memory.reset_peak(DEVICE)
        self._before = kmem.memory.current(DEVICE)

    def on_train_batch_end(self, batch, logs=None):
        self.bytes.append(kmem.memory.peak(DEVICE) - self._before)


def trained(mode, normalizes=False, **options):
    """Weights, and the peaks of all steps but the first, which is traced."""
    model, peaks = convolutional(mode, normalizes), Peaks()
    x, y = data()
    kmem.wrap(model).fit(
        *(x, y),
        batch_size=BATCH_SIZE,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[peaks],
        **options,
    )
    return model.get_weights(), peaks.bytes[1:]


def relative_difference(weights, others):
    return max(
        float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1.0))
        for a, b in zip(weights, others, strict=True)
    )
