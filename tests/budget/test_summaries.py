"""What layers write for TensorBoard is there under a budget: once a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import kmem

_NUM_BATCHES = 3


class Writing(keras.layers.Layer):
    def call(self, x):
        tf.summary.scalar("mean", tf.reduce_mean(x))
        return x


def _steps_written(folder) -> list[int]:
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("mean")]
    return sorted(e.step for tag in tags for e in events.Tensors(tag))


@pytest.mark.usefixtures("native_library")
def test_each_step_writes_what_its_layers_do(tmp_path):
    x = np.ones((2 * _NUM_BATCHES, 4), "float32")
    found = []
    for options in ({}, {"memory_budget": "1GB"}):
        model = keras.Sequential(
            [keras.Input((4,)), Writing(), keras.layers.Dense(4)]
        )
        model = kmem.wrap(model)
        model.compile("sgd", "mse", jit_compile=False)
        folder = tmp_path / f"{len(found)}"
        board = keras.callbacks.TensorBoard(folder, update_freq=1)
        data = {"validation_data": (x, x), "callbacks": [board]}
        model.fit(x, x, batch_size=2, verbose=0, **data, **options)
        parts = "train", "validation"
        found.append([_steps_written(folder / part) for part in parts])
    plain, budgeted = found
    assert budgeted == plain
    assert len(plain[0]) == len(plain[1]) == _NUM_BATCHES
