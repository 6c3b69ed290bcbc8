"""Processes that work together until something happens to one of them.

A script for `kmem launch`; its argument says what happens to rank 1.
"""

import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import kmem
from kmem.sharding.engine import engine

FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: 1 / 0,
    "stalled": lambda: time.sleep(1000),
    "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ends": lambda: sys.exit(0),
}


class Stalled(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if engine().rank == 1 and batch == 2:
            FAULTS["stalled"]()


def train():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    x = np.ones((40, 3))
    kmem.wrap(model).fit(
        x, x, batch_size=4, sharding="full", callbacks=[Stalled()], verbose=0
    )


def main(fault):
    if fault == "late" and '"index": 1' in os.environ["TF_CONFIG"]:
        time.sleep(1000)
    group = engine()
    if fault == "stalled in fit":
        train()
    for step in range(5):
        group.all_reduce(tf.ones([3]), "step")
        if group.rank == 1 and step == 2:
            FAULTS[fault]()


if __name__ == "__main__":
    main(sys.argv[1])
