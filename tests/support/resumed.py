"""Trains, is killed in the middle, and goes on: a script for `kmem launch`.

Its arguments are a folder, and options of `fit`. In the second epoch the last
rank sends itself a signal, once.
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


class Signalled(keras.callbacks.Callback):
    """Sends its process a signal, unless it has done so before."""

    def __init__(self, name, marker):
        super().__init__()
        self._signal = signal.Signals[name]
        self._marker = marker

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == (1, 2) and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), self._signal)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--save-freq", type=int, default=0)
    parser.add_argument("--stage")
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--unsaved", action="store_true")
    args = parser.parse_args()
    model = make_model()
    group = engine()
    callbacks = []
    if group.rank == group.size - 1:
        callbacks.append(Signalled(args.signal, args.folder / "signalled"))
    if not args.unsaved:
        callbacks.append(
            kmem.callbacks.ShardedCheckpoint(
                args.folder / "checkpoint", args.save_freq or "epoch"
            )
        )
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
