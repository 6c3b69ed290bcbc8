"""Trains cases on two replicas; prints their errors against one device.

A process of its own: the logical devices must be set before TensorFlow starts.
"""

import functools
import gc
import json

import cases
import keras
import numpy as np
import tensorflow as tf
import traced_once
from keras import layers
from peaks import Peaks
from reference import log_error
from reference import relative_error
from reference import state
from reference import train

import kmem
from kmem.budget.report import describe

traced_once.install()
# One of each mechanism, under one option: a case takes some seconds.
CASES = {
    "microbatches": ("plain",),
    "gradient_accumulation_steps": (
        "plain",
        "mean_with_sample_weight_weighted",
        "global_clipnorm",
    ),
}
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


@functools.cache
def on_one_device(name):
    return train(cases.ALL[name], batch_size=20, epochs=1)


def errors(strategy, name, options):
    def mirrored():
        with strategy.scope():
            return cases.ALL[name]()

    want, history = on_one_device(name)
    model, logs = train(mirrored, **options, epochs=1)
    return relative_error(state(model), state(want)), log_error(logs, history)


def after_an_overflow_in_the_second_replica(strategy, optimizer, **options):
    """The weights' change, and the number of updates."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
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


def deep(synchronized=False, scale=1):
    """A case whose activations take most memory, with layers that draw random
    numbers and keep statistics."""
    block = []
    for _ in range(3):
        block += [
            layers.Dense(16 * scale, "tanh"),
            layers.Dropout(0.2),
            layers.BatchNormalization(synchronized=synchronized),
        ]
    model = keras.Sequential([keras.Input((16,)), *block, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(1536 * scale, 16)).astype(keras.config.floatx())
    size = 512 * scale
    return model, {"x": x, "y": x[:, :1], "batch_size": size, "epochs": 1}


def synchronized_in_16_bits(strategy):
    """What was computed in while replicas took turns."""
    with strategy.scope():
        block = [layers.Dense(4), layers.BatchNormalization(synchronized=True)]
        model = keras.Sequential([keras.Input((4,)), *block, Noting()])
        model.compile("sgd", "mse")
    x = np.ones((8, 4))
    kmem.wrap(model).fit(x, x, mixed_precision="bfloat16", verbose=0)
    return sorted({*model.layers[-1].dtypes})


class Noting(layers.Layer):
    """Notes the dtypes of its inputs."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def call(self, x):
        self.dtypes.append(x.dtype.name)
        return x


def planned_errors(strategy):
    """A plan's errors against the same replicas without one, as each of them
    draws random numbers of its own."""

    def mirrored():
        with strategy.scope():
            return deep()

    want, history = train(mirrored)
    model, logs = train(mirrored, remat="auto")
    return relative_error(state(model), state(want)), log_error(logs, history)


def planned_in_scope_error(strategy):
    """The same of a `fit` within the strategy's scope, which is no replica."""

    def trained(**options):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, arguments = deep()
            kmem.wrap(model).fit(**arguments, verbose=0, **options)
        return state(model)

    return relative_error(trained(remat="auto"), trained())


def within_a_budget(strategy):
    """What a budget chooses, the peak as a share of it, and the error against
    the same replicas without one."""

    def mirrored():
        with strategy.scope():
            return deep(scale=4)

    def measured(**options):
        gc.collect()
        before, peaks = kmem.memory.current(), Peaks()
        model, _ = train(mirrored, callbacks=[peaks], **options)
        return model, max(peaks.found) - before

    want, needed = measured()
    gc.collect()
    share = int(0.7 * needed)
    model, peak = measured(memory_budget=kmem.memory.current() + share)
    return [
        describe(model.memory_report.chosen.options),
        peak / share,
        relative_error(state(model), state(want)),
    ]


def refusal(strategy):
    """What is said of what replicas cannot do."""
    with strategy.scope():
        model, arguments = deep(synchronized=True)
    try:
        kmem.wrap(model).fit(**arguments, remat="auto")
    except ValueError as error:
        return str(error)


def left_behind(strategy, **options):
    """What a `fit` under options leaves on a model and its parts, and how far
    the replicas of its weights are apart after a plain `fit`."""
    with strategy.scope():
        inner = keras.Sequential([layers.Dense(4, activity_regularizer="l2")])
        model = Subclassed(inner)
        model.compile("sgd", "mse", metrics=["mae"])
    kmem.wrap(model)
    x = np.random.default_rng(0).normal(size=(16, 4))
    fit = functools.partial(
        model.fit, x, x[:, :1], batch_size=8, shuffle=False, verbose=0
    )
    fit()
    everything = [model, inner, *inner.layers, model.optimizer, *model.metrics]
    before = [set(vars(each)) for each in everything]
    fit(**options)
    left = [
        name
        for each, names in zip(everything, before, strict=True)
        for name in set(vars(each)) - names - {"_kmem_sessions"}
    ]
    fit()
    copies = [v.value.values for v in model.trainable_variables]
    apart = max(float(np.max(np.abs(a - b))) for a, b in copies)
    return left, apart


class Subclassed(keras.Model):
    """A model with statistics, which makes replicas take turns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.statistics = layers.BatchNormalization()
        self.last = layers.Dense(1)

    def call(self, x, training=None):
        return self.last(self.statistics(self.inner(x), training=training))


def main():
    strategy = make_strategy()
    results = {
        f"{option} {name}": errors(strategy, name, OPTIONS[option])
        for option, names in CASES.items()
        for name in names
    }
    results["left behind"] = [
        left_behind(strategy, microbatches=2),
        left_behind(strategy, gradient_accumulation_steps=2),
    ]
    results["16 bits"] = synchronized_in_16_bits(strategy)
    results["remat"] = planned_errors(strategy)
    results["remat in scope"] = [planned_in_scope_error(strategy)]
    results["memory_budget"] = within_a_budget(strategy)
    results["refused"] = refusal(strategy)
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
