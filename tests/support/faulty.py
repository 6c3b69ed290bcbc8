"""Processes that work together until something happens to one of them.

A script for `kmem launch`; its argument says what happens to rank 1.
"""

import json
import os
import signal
import socket
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import kmem
from kmem.sharding.engine import engine

BEFORE_JOINING = {
    "late": lambda port: time.sleep(1000),
    "port taken": lambda port: socket.create_server(("", port)).detach(),
}
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
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["index"] == 1 and fault in BEFORE_JOINING:
        BEFORE_JOINING[fault](int(config["cluster"]["worker"][1].split(":")[1]))
    group = engine()
    if fault == "stalled in fit":
        train()
    for step in range(5):
        group.all_reduce(tf.ones([3]), "step")
        if group.rank == 1 and step == 2:
            FAULTS[fault]()


if __name__ == "__main__":
    main(sys.argv[1])
