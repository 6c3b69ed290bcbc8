"""Frozen weights have no gradient, no sum of gradients, and no state.

The model has 8 matrices of 256 x 256. With LoRA of rank 2 on int8 it trains 8
pairs of 2 x 256, and keeps a byte for each number of a matrix.
"""

import gc

import keras
import pytest
import tensorflow as tf

import kmem

WIDTH, DEPTH, RANK = 256, 8, 2
WHOLE = 4 * DEPTH * WIDTH * WIDTH
ADAPTERS = 4 * DEPTH * 2 * WIDTH * RANK
# What the allocator rounds up, and counts of steps.
FEW = 12_000


def tower(lora):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(DEPTH)
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    if lora:
        for layer in layers:
            layer.quantize("int8")
            layer.enable_lora(RANK)
    return kmem.wrap(model)


class Held(keras.callbacks.Callback):
    """What is held before each step, and the most above it."""

    def __init__(self):
        super().__init__()
        self.before, self.peaks = [], []

    def on_train_batch_begin(self, batch, logs=None):
        gc.collect()
        self.before.append(kmem.memory.current("CPU"))
        kmem.memory.reset_peak("CPU")

    def on_train_batch_end(self, batch, logs=None):
        peak = kmem.memory.peak("CPU")
        self.peaks.append(peak - self.before[-1])


def trained(lora, num_steps=4, **options):
    model = tower(lora)
    model.compile(keras.optimizers.Adam(), "mse")
    rows = tf.ones([16, WIDTH])
    data = tf.data.Dataset.from_tensors((rows, rows)).repeat(num_steps)
    held = Held()
    model.fit(data, shuffle=False, verbose=0, callbacks=[held], **options)
    return held


@pytest.mark.parametrize("lora, trains", [(False, WHOLE), (True, ADAPTERS)])
def test_the_optimizer_keeps_two_numbers_of_each_trained_weight(
    native_library, lora, trains
):
    model = tower(lora)
    model.compile(keras.optimizers.Adam(), "mse")
    gc.collect()
    before = kmem.memory.current("CPU")

    model.optimizer.build(model.trainable_variables)

    assert 0 <= kmem.memory.current("CPU") - before - 2 * trains < FEW


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("lora, trains", [(False, WHOLE), (True, ADAPTERS)])
def test_the_sum_of_batches_is_of_trained_weights(
    native_library, lora, trains, dtype
):
    plain = trained(lora, mixed_precision=dtype).before
    held = trained(
        lora, mixed_precision=dtype, gradient_accumulation_steps=2
    ).before

    more = (held[3] - held[0]) - (plain[3] - plain[0])
    assert 0 <= more - trains < FEW


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_micro_batches_of_adapters_need_less_than_one_sum_of_all(
    native_library, dtype
):
    options = dict(microbatches=8, mixed_precision=dtype)
    peaks = [min(trained(lora, **options).peaks) for lora in (False, True)]

    assert peaks[0] > WHOLE * (1 + 1 / DEPTH)
    assert peaks[1] < WHOLE * 0.85
