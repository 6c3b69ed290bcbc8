"""Trains cases in shards: what each of several processes runs in tests."""

import gc
import pathlib
import time

import cases
import keras
import numpy as np
import tensorflow as tf
import traced_once
from keras import layers
from reference import relative_error
from reference import state
from reference import train
from sharding_cases import SHARDED

import kmem


def built(case):
    """A case whose model has its weights, as one in shards must."""

    def make():
        model, arguments = case()
        if not model.built:
            model(arguments["x"][:1])
        return model, arguments

    return make


traced_once.install()
# Python need not look through TensorFlow itself at each of its collections.
gc.freeze()

CASES = {name: built(case) for name, case in (cases.ALL | SHARDED).items()}
# 52 rows: slices of 9 and 8, and a last batch of a single row.
BATCH_SIZE = 17
WIDTH = 512
DEPTH = 4


def main(runs, known=()):
    """Trains in shards, and what to compare with in one process.

    Args:
        runs: `{key: (case, options of fit)}`. Of the options `whole` is the
            batch size to compare with, and `both` are arguments of that
            training as well.
        known: The keys of `plain_trainings` that need not be trained.

    Returns:
        The weights and logs of this process's share of plain trainings, and
        of all in shards.
    """
    strategy = kmem.ShardedStrategy()
    missing = {
        key: training
        for key, training in plain_trainings(runs).items()
        if key not in known
    }
    share = list(missing.items())[strategy.rank :: strategy.num_processes]
    plain = {
        key: trained(CASES[name], **options) for key, (name, options) in share
    }
    return plain, {key: in_shards(*run) for key, run in runs.items()}


def plain_trainings(runs):
    """`{key: (case, options)}` of what there is to compare runs with."""
    found = {}
    for name, options in runs.values():
        key = plain_key(name, options)
        found[key] = name, dict(key[1:])
    return found


def plain_key(name, options):
    """What tells the training apart that a run is compared with."""
    options = {
        "batch_size": options.get("whole", BATCH_SIZE),
        **options.get("both", {}),
    }
    return name, *options.items()


def in_shards(name, options):
    options = {"batch_size": BATCH_SIZE} | options
    options.pop("whole", None)
    case = of_own_weights(CASES[name])
    return trained(case, **options.pop("both", {}) | options)


def of_own_weights(case):
    """A case of other weights in every process: those of process 0 count."""

    def make():
        model, arguments = case()
        for variable in model.trainable_variables:
            variable.assign(variable + kmem.ShardedStrategy().rank)
        return model, arguments

    return make


def trained(case, **options):
    model, logs = train(case, **options)
    return state(model), logs


def seen_and_trained(runs):
    """`observe` and `main` in one process, and the threads that `main` adds."""
    seen, before = observe(), num_threads()
    results = main(runs)
    seen["threads"] = num_threads() - before
    return seen | {"refused": refused_data()}, results


def num_threads():
    return len(list(pathlib.Path("/proc/self/task").iterdir()))


def observe():
    """What is seen of training that no single process has."""
    strategy = kmem.ShardedStrategy()
    return {
        "dropout": dropout(),
        "overflow": overflow(),
        "predicted": predicted(strategy.rank),
        **{f"bytes {stage}": costs(stage) for stage in ("full", "gradients")},
        "bytes optimizer": costs("optimizer"),
        "bytes bfloat16": costs("full", "bfloat16"),
        "bytes planned": costs("full", remat=kmem.Remat(solver="sqrt")),
        "dtr": dtr(),
        "budget": budgeted(sharding="gradients"),
        "scope": built_in_shards(strategy),
    }


class _Seeds(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.seen = [seed.numpy().tolist() for seed in seeds(self.model)]


def seeds(model):
    return [v for v in model.variables if v.name == "seed_generator_state"]


def dropout():
    """The seeds within training and after it, how far a run that recomputes is
    from one that does not, and the averages of batch normalization."""

    def case():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.BatchNormalization(),
                layers.Dense(7, activation="tanh"),
                layers.GaussianDropout(0.3),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )
        model.compile("sgd", "mse")
        return model, cases.regression()

    callback = _Seeds()
    options = {"batch_size": BATCH_SIZE}
    other, _ = train(case, sharding="gradients", **options)
    model, _ = train(case, sharding="full", callbacks=[callback], **options)
    after = [seed.numpy().tolist() for seed in seeds(model)]
    error = relative_error(state(model), state(other))
    return callback.seen, after, error, model.layers[0].moving_mean.numpy()


def overflow():
    """The weights' change, and the updates, of a batch with an infinity in
    the last process's rows."""
    model = cases.dense(optimizer=keras.optimizers.SGD(0.1))
    before = model.get_weights()
    x = np.ones((8, 5), "float32")
    x[7] = np.inf
    kmem.wrap(model).fit(
        x, x[:, :3], sharding="full", mixed_precision="float16", verbose=0
    )
    changes = map(np.subtract, model.get_weights(), before)
    change = max(float(np.max(np.abs(c))) for c in changes)
    return [change, int(model.optimizer.iterations.numpy())]


def predicted(rank):
    """The rows of predictions in a callback and afterwards, and the loss of
    processes that would shuffle in different ways."""
    model, arguments = cases.plain()
    seen = []

    class Predict(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(len(self.model.predict(arguments["x"], verbose=0)))

    model.predict(arguments["x"], verbose=0)
    tf.random.set_seed(rank)
    history = kmem.wrap(model).fit(
        **arguments, sharding="full", verbose=0, callbacks=[Predict()]
    )
    rows = [*seen, len(model.predict(arguments["x"], verbose=0))]
    return rows, history.history["loss"]


def wide():
    return keras.Sequential(
        [keras.Input((WIDTH,))]
        + [layers.Dense(WIDTH, use_bias=False) for _ in range(DEPTH)]
    )


class Costs(keras.callbacks.Callback):
    """Bytes in memory of nine steps like any other, on the wire of three."""

    def on_train_batch_begin(self, batch, logs=None):
        kmem.memory.reset_peak("CPU")
        if batch == 3:
            self.kept, self.peaks, self.sent = [], [], -_sent_bytes()

    def on_train_batch_end(self, batch, logs=None):
        if batch >= 3:
            self.kept.append(kmem.memory.current("CPU"))
            self.peaks.append(kmem.memory.peak("CPU"))
        if batch == 5:
            self.sent += _sent_bytes()


def _sent_bytes():
    """What this network has carried."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(loopback.split(":")[1].split()[0])


def costs(stage, dtype=None, **options):
    """Bytes that a step has, needs at its peak, and sends (in three steps)."""
    x = np.ones((12, 4, WIDTH), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x))
    gc.collect()
    before = kmem.memory.current("CPU")
    model = wide()
    model.compile("adam", "mse")
    option = kmem.Sharding(stage, gather_dtype=dtype, reduce_dtype=dtype)
    callback = Costs()
    kmem.wrap(model).fit(
        data, sharding=option, callbacks=[callback], verbose=0, **options
    )
    # A process has more for as long as another one has yet to read from it.
    kept, peak = min(callback.kept), min(callback.peaks)
    return kept - before, peak - before, callback.sent


def dtr():
    """How far training that gives up tensors is from eager training, and how
    many it has given up."""

    def case():
        # Small batches: what the input pipeline holds of them varies.
        model = keras.Sequential([keras.Input((4,))])
        for _ in range(12):
            model.add(layers.Dense(64, "tanh"))
        model.add(layers.Dense(4))
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(2048, 4))
        return model, {"x": x, "y": np.tanh(x)}

    arguments = {"batch_size": 2048, "epochs": 1, "sharding": "gradients"}
    gc.collect()  # What is let go of meanwhile would count.
    with kmem.memory.track("CPU") as usage:
        want, _ = train(case, mode="eager", **arguments)
    above = usage.peak_bytes - usage.start_bytes
    gc.collect()
    threshold = kmem.memory.current("CPU") + int(0.85 * above)
    with kmem.memory.track("CPU") as usage:
        option = kmem.DTR(threshold, evictee_minimum_size=0)
        model, _ = train(case, dtr=option, **arguments)
    assert usage.peak_bytes <= threshold
    num_evictions = kmem.dtr.statistics().num_evictions
    return relative_error(state(model), state(want)), num_evictions


def long():
    """A case whose activations are most of what it needs."""
    model = keras.Sequential([keras.Input((256, 8))])
    for _ in range(3):
        model.add(layers.Dense(64, "tanh"))
    model.add(layers.Dense(4))
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(24, 256, 8))
    return model, {"x": x, "y": np.tanh(x[..., :4])}


def budgeted(**options):
    """What is chosen for a budget, the error of training so, what it needs
    above that budget, and what happened on the way."""
    kmem.ShardedStrategy()

    # The last batch is smaller.
    arguments = {"batch_size": 16, "epochs": 1}
    gc.collect()
    with kmem.memory.track("CPU") as usage:
        want, _ = train(long, sharding="gradients", **arguments)
    above = usage.peak_bytes - usage.start_bytes
    gc.collect()
    budget = kmem.memory.current("CPU") + int(0.85 * above)
    model, _ = train(long, memory_budget=budget, **arguments, **options)
    chosen = model.memory_report.chosen
    excess = chosen.measured_peak_bytes - budget
    error = relative_error(state(model), state(want))
    return str(chosen), error, excess, model.memory_report.events


def built_in_shards(strategy):
    """Bytes after and while building, and how far training is from that of a
    model that was built whole."""
    gc.collect()
    before = kmem.memory.current("CPU")
    kmem.memory.reset_peak("CPU")
    keras.utils.set_random_seed(strategy.rank)
    with strategy.scope():
        model = wide()
    current, peak = kmem.memory.current("CPU"), kmem.memory.peak("CPU")
    plain = wide()
    plain.set_weights(model.get_weights())
    x = np.random.default_rng(0).normal(size=(24, WIDTH)).astype("float32")
    losses = []
    for each in (model, plain):
        each.compile(keras.optimizers.Adam(1e-4), "mse")
        options = {"sharding": "full"} if each is model else {}
        history = kmem.wrap(each).fit(
            x, x, batch_size=8, verbose=0, shuffle=False, **options
        )
        losses.append(history.history["loss"])
    return current - before, peak - before, losses


def refused_data():
    """What a process is told if each has rows of its own."""
    strategy = kmem.ShardedStrategy()
    model, arguments = cases.plain()
    arguments["x"] = arguments["x"] + strategy.rank
    try:
        kmem.wrap(model).fit(**arguments, sharding="full", verbose=0)
    except tf.errors.OpError as error:
        return str(error)


def read_alone():
    """Process 0 asks for a weight, and the other one does not."""
    strategy = kmem.ShardedStrategy()
    with strategy.scope():
        model = wide()
    if strategy.rank == 0:
        model.get_weights()
    else:
        time.sleep(60)
