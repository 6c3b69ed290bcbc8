"""Trains programs of two levels in shards, in each of several processes."""

import gc

import keras
import numpy as np
import sharded
import tensorflow as tf
from keras import layers
from keras import ops
from multilevel_cases import relative_error
from multilevel_cases import train
from multilevel_cases import two_levels

import kmem
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import MinimalResidual
from kmem.multilevel import Program

WIDTH, DEPTH = 256, 8

SYNCHRONIZED = layers.BatchNormalization, {"synchronized": True}
REGULARIZED = layers.Dense, {"units": 8, "kernel_regularizer": "l2"}
DAMPED = ConjugateGradient(2, damping=0.1, warm_start=True)
# Of 7 rows: two processes take 3 and 4, in parts.
CASES = {
    "gradients": (
        {"sharding": "gradients"},
        {"lower": {"hypergradient": FiniteDifference(), "microbatches": 2}},
    ),
    "optimizer": (
        {"sharding": "optimizer"},
        {
            "lower": {"hypergradient": ConjugateGradient(2), "roll_back": True},
            "upper": {"clipnorm": 1e-2},
            "dtype": "float32",
        },
    ),
    "parts": (
        {"sharding": "full"},
        {
            "block": REGULARIZED,
            "lower": {
                "hypergradient": DAMPED,
                "microbatches": 2,
                "roll_back": True,
            },
            "upper": {"clipnorm": 1e-2},
        },
    ),
    "loop": (
        {"sharding": "full"},
        {
            "batch": 5,
            "block": SYNCHRONIZED,
            "unroll_steps": 6,
            "lower": {"hypergradient": MinimalResidual(2)},
        },
    ),
    # Fewer rows than processes, each of which computes them.
    "one row": (
        {"sharding": "full"},
        {"batch": 1, "lower": {"hypergradient": Identity()}},
    ),
    "eager": ({"sharding": "full", "mode": "eager"}, {}),
    "elsewhere": (
        {"sharding": kmem.Sharding("full", cpu_offload=True)},
        {"lower": {"hypergradient": FiniteDifference()}},
    ),
}


def errors():
    """The largest errors of the weights, and of the logs, of each case."""
    results = {}
    for name, (options, case) in CASES.items():
        one, several = (_case(**{"batch": 7} | case) for _ in range(2))
        want, logs = train(case=one, epochs=1)
        got, found = train(case=several, epochs=1, **options)
        results[name] = (
            max(map(relative_error, got, want)),
            max(np.max(np.abs(relative_log(found, logs, key))) for key in logs),
        )
    return results


def _case(block=None, **options):
    kind, arguments = block or (None, {})
    made = (kind(dtype="float64", **arguments),) if kind else ()
    return two_levels(block=made, **options)


def relative_log(found, logs, key):
    return np.divide(found[key], logs[key]) - 1


def resumed():
    """How far a training is that an error ended, and that went on, from one
    without the error; what a solver kept for the next step included."""

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise InterruptedError

    found = []
    for options in ({}, {"sharding": "full"}):
        case = two_levels(batch=6, lower={"hypergradient": DAMPED})
        try:
            train(case=case, callbacks=[Failing()], **options)
        except InterruptedError:
            found.append(train(case=case, **options)[0])
    return max(map(relative_error, *found))


def wide():
    """A program whose lower level has nearly all of its weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((WIDTH,))], name="wide")
    for _ in range(DEPTH):
        model.add(layers.Dense(WIDTH, use_bias=False))
    weigh = keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, "sigmoid")], name="weigh"
    )

    def errors(x):
        return ops.mean(ops.square(model(x) - x), axis=-1)

    def weighted(x):
        each = errors(x)
        return ops.mean(weigh(each[:, None])[:, 0] * each)

    return Program(
        [
            Level(model, weighted, keras.optimizers.Adam(1e-4)),
            Level(weigh, lambda x: ops.mean(errors(x)), "adam"),
        ]
    )


def costs(stage):
    """Bytes that a step has, needs at its peak, and sends (in three steps), as
    multiples of the lower level's; and the losses."""
    x = np.random.default_rng(0).normal(size=(48, WIDTH)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(x).batch(4)
    gc.collect()
    before = kmem.memory.current("CPU")
    program = wide()
    callback = sharded.Costs()
    history = program.fit(
        {"wide": data, "weigh": data},
        sharding=stage,
        callbacks=[callback],
        verbose=0,
    )
    kept, peak = min(callback.kept) - before, min(callback.peaks) - before
    weights = 4 * DEPTH * WIDTH**2
    found = [each / weights for each in (kept, peak, callback.sent / 3)]
    return *found, history.history


def seen_and_trained(runs):
    """That of `sharded`, and what programs need."""
    seen, results = sharded.seen_and_trained(runs)
    stages = None, "gradients", "full"
    return seen | {"programs": list(map(costs, stages))}, results


def main():
    """Joins the other processes, and returns the errors."""
    kmem.ShardedStrategy()
    return errors() | {"resumed": (resumed(), 0.0)}
