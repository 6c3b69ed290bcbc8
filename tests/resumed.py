"""Trains, is killed in the middle, and goes on: a script for `kmem launch`.

Its arguments are a folder, and options of `fit`. With `--killed` the last rank
kills itself in the second epoch, once.
"""

import argparse
import json
import os
import pathlib
import signal

import keras
import numpy as np

import kmem
from kmem.sharding.engine import engine

EPOCHS = 3
ROWS = 40


def data():
    x = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
    return x, np.tanh(x[:, :2])


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(13, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return kmem.wrap(model)


class Killed(keras.callbacks.Callback):
    """Ends its process without a word, unless it has done so before."""

    def __init__(self, marker):
        super().__init__()
        self._marker = marker

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == (1, 2) and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--save-freq", type=int, default=0)
    parser.add_argument("--stage")
    args = parser.parse_args()
    group = engine()
    model = make_model()
    callbacks = [
        kmem.callbacks.ShardedCheckpoint(
            args.folder / "checkpoint", args.save_freq or "epoch"
        )
    ]
    if group.rank == group.size - 1:
        callbacks.append(Killed(args.folder / "killed"))
    x, y = data()
    history = model.fit(
        x,
        y,
        epochs=EPOCHS,
        batch_size=8,
        shuffle=False,
        callbacks=callbacks,
        sharding=args.stage,
        verbose=0,
    )
    kmem.distributed.save_weights(model, args.folder / "model.weights.h5")
    print(json.dumps(history.history["loss"]))


if __name__ == "__main__":
    main()
