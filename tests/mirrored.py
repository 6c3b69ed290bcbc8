"""Trains cases on two replicas; prints their errors against one device.

A process of its own: the logical devices must be set before TensorFlow starts.
"""

import json

import cases
import keras
import numpy as np
import tensorflow as tf
from reference import log_error
from reference import relative_error
from reference import state
from reference import train
from reference import whole

import kmem

CASES = [
    "plain",
    "sample_weight",
    "masked_regularized",
    "several_outputs",
    "penalties",
    "sum",
    "mean_with_sample_weight_weighted",
    "adamw",
    "clipnorm",
    "global_clipnorm",
    "dynamic_loss_scale",
    "schedule",
    "constraints",
]
OPTIONS = {
    "microbatches": {"batch_size": 20, "microbatches": 3},
    "gradient_accumulation_steps": {
        "batch_size": 10,
        "gradient_accumulation_steps": 2,
    },
}


def make_strategy():
    (cpu,) = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, halves)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def errors(strategy, name, options):
    def mirrored():
        with strategy.scope():
            return cases.ALL[name]()

    want, history = whole(cases.ALL[name])
    model, logs = train(mirrored, **options)
    return relative_error(state(model), want), log_error(logs, history)


def after_an_overflow_in_the_second_replica(strategy, optimizer, **options):
    """The weights' change, and the number of updates."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse")
    before = model.get_weights()
    x = np.ones((8, 1), "float32")
    x[5] = np.inf
    kmem.wrap(model).fit(x, x[:, 0], verbose=0, shuffle=False, **options)
    changes = [
        float(np.max(np.abs(a - b)))
        for a, b in zip(before, model.get_weights(), strict=True)
    ]
    return max(changes), int(model.optimizer.iterations.numpy())


def main():
    strategy = make_strategy()
    results = {
        f"{option} {name}": errors(strategy, name, OPTIONS[option])
        for name in CASES
        for option in OPTIONS
    }
    results["overflow of Keras's scale"] = (
        after_an_overflow_in_the_second_replica(
            strategy,
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1)
            ),
            batch_size=8,
            microbatches=2,
        )
    )
    results["overflow of kmem's scale"] = (
        after_an_overflow_in_the_second_replica(
            strategy,
            lambda: keras.optimizers.SGD(0.1),
            batch_size=8,
            mixed_precision="float16",
        )
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
