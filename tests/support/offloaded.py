"""What a process does whose device is not the machine's own memory.

The second of two logical CPU devices computes. Both share what kmem counts and
limits, so that offloading saves nothing here.
"""

import cases
import failing
import keras
import numpy as np
import tensorflow as tf
from reference import relative_error
from reference import state
from reference import train
from reference import whole
from sharded import long

import kmem
from kmem.step import batches

OFFLOAD = kmem.Sharding(cpu_offload=True)


def main(*functions):
    (cpu,) = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, halves)
    with tf.device("CPU:1"):
        return [function() for function in functions]


class Devices(keras.callbacks.Callback):
    """Those of all shards, between the steps."""

    def on_train_batch_end(self, batch, logs=None):
        variables = [*self.model.weights, *self.model.optimizer.variables]
        self.found = [
            v.shard.variable.device for v in variables if len(v.shape)
        ]


def placed():
    """Where shards and updates are, and how far that is from training without
    them."""
    updates, devices = [], Devices()

    def case():
        model, arguments = cases.plain()
        update = model.optimizer.update_step

        def update_step(gradient, variable, learning_rate):
            updates.append(tf.square(gradient).device)
            update(gradient, variable, learning_rate)

        object.__setattr__(model.optimizer, "update_step", update_step)
        return model, arguments

    want, _ = whole(cases.plain)
    model, _ = train(case, batch_size=20, sharding=OFFLOAD, callbacks=[devices])
    after = [v.value.device for v in model.weights]
    return updates, devices.found, after, relative_error(state(model), want)


def chosen():
    """The `sharding` of all that is tried within a budget, and how far the
    training is from one without."""
    with kmem.memory.track() as usage:
        want, _ = train(long, batch_size=24)
    needed = usage.peak_bytes - usage.start_bytes
    budget = kmem.memory.current() + int(0.6 * needed)
    model, _ = train(long, batch_size=24, memory_budget=budget)
    report = model.memory_report
    tried = [
        each.options.sharding for each in (report.chosen, *report.alternatives)
    ]
    return tried, relative_error(state(model), state(want))


def undone():
    """How often a step was undone, whether that left no trace, and where the
    weights are afterwards, also if an error ends the training."""
    want, history = failing.trained([], sharding=OFFLOAD)
    model, found = failing.trained(
        [0, 2, 3], sharding=OFFLOAD, memory_budget="1GB"
    )
    same = found == history and all(
        np.array_equal(got, value)
        for got, value in zip(state(model), state(want), strict=True)
    )
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=_interrupt)
    try:
        failing.trained([], model, sharding=OFFLOAD, callbacks=[stop])
    except KeyboardInterrupt:
        pass
    devices = [v.value.device for v in model.weights]
    return len(model.memory_report.events), same, devices


def grown():
    """The rows that were chosen for last where a batch is larger than those
    before, and how far the training is from one without a budget."""

    def case():
        model, arguments = cases.plain()
        x, y = arguments["x"], arguments["y"]
        first, last = (
            tf.data.Dataset.from_tensor_slices((x[rows], y[rows]))
            for rows in (slice(16), slice(16, None))
        )
        return model, {"x": first.batch(8).concatenate(last.batch(36))}

    want, _ = train(case)
    model, _ = train(case, sharding=OFFLOAD, memory_budget="1GB")
    x, _ = batches.from_json(model.memory_report.batch)
    return x.shape[0], relative_error(state(model), state(want))


def _interrupt(batch, logs):
    raise KeyboardInterrupt
