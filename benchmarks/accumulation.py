"""kmem's micro-batches and accumulation beside Keras's own, in one run.

    python benchmarks/accumulation.py > benchmarks/accumulation.md

24 layers of Dense(128) on an epoch of two and a half batches, as a whole and
in parts of an eighth, under a learning-rate schedule. Each mode and optimizer
has a process of its own, in which the four ways take turns. The error is the
largest difference of a weight from whole-batch training after one epoch,
relative to the largest change of a weight, all in float64: in float32 Adam's
first steps make the rounding of gradients near zero as large as a step. The
peak is what a step needs above what was held before it.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time

BATCH_SIZE = 16384
NUM_PARTS = 8
NUM_ROWS = 5 * BATCH_SIZE // 2
NUM_ROUNDS = 7
WAYS = {
    "whole batch": {},
    "Keras, gradient_accumulation_steps=8": {},
    "kmem, gradient_accumulation_steps=8": {
        "gradient_accumulation_steps": NUM_PARTS
    },
    "kmem, microbatches=8": {"microbatches": NUM_PARTS},
}


def build(way, optimizer, mode):
    """A compiled model and its batch size."""
    import keras

    import kmem

    keras.utils.set_random_seed(0)
    inputs = outputs = keras.Input((128,))
    for _ in range(24):
        outputs = keras.layers.Dense(128, activation="relu")(outputs)
    model = keras.Model(inputs, outputs)
    rate = keras.optimizers.schedules.InverseTimeDecay(1e-2, 1, 0.5)
    steps = NUM_PARTS if way.startswith("Keras") else None
    model.compile(
        getattr(keras.optimizers, optimizer)(
            rate, gradient_accumulation_steps=steps
        ),
        "mse",
        jit_compile=mode == "xla",
    )
    in_parts = "accumulation" in way
    size = BATCH_SIZE // NUM_PARTS if in_parts else BATCH_SIZE
    return kmem.wrap(model), size


def measure(optimizer, mode):
    """Returns error, bytes and seconds for every way."""
    import keras
    import numpy as np
    import tensorflow as tf

    import kmem

    class Step(keras.callbacks.Callback):
        """The largest peak of a step, above what was held before it."""

        def on_train_begin(self, logs=None):
            self.peak = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.before = kmem.memory.current("CPU")
            kmem.memory.reset_peak("CPU")

        def on_train_batch_end(self, batch, logs=None):
            peak = kmem.memory.peak("CPU") - self.before
            self.peak = max(self.peak, peak)

    def prepare(way, floatx):
        """A model, and the arguments of its `fit`."""
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(floatx)
        model, size = build(way, optimizer, mode)
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(2, NUM_ROWS, 128)).astype(floatx)
        data = tf.data.Dataset.from_tensor_slices(tuple(rows)).batch(size)
        arguments = {"x": data, "verbose": 0, "shuffle": False}
        return model, arguments | WAYS[way]

    def largest_difference(some, others):
        pairs = zip(some, others, strict=True)
        return max(np.max(np.abs(a - b)) for a, b in pairs)

    errors = {}
    for way in WAYS:
        model, arguments = prepare(way, "float64")
        start = model.get_weights()
        model.fit(**arguments)
        end = model.get_weights()
        if way == "whole batch":
            want, moved = end, largest_difference(end, start)
        errors[way] = float(largest_difference(end, want) / moved)
    models, results = {}, {}
    for way in WAYS:
        model, arguments = prepare(way, "float32")
        model.fit(**arguments)
        step = Step()
        model.fit(**arguments, callbacks=[step])
        models[way] = model, arguments
        results[way] = {
            "error": errors[way],
            "peak": step.peak,
            "seconds": [],
        }
    for _ in range(NUM_ROUNDS):
        for way, (model, arguments) in models.items():
            start = time.perf_counter()
            model.fit(**arguments)
            seconds = time.perf_counter() - start
            results[way]["seconds"].append(seconds / NUM_ROWS)
    return results


def table(optimizer, mode):
    process = subprocess.run(
        [sys.executable, __file__, "--measure", optimizer, mode],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    results = json.loads(process.stdout.splitlines()[-1])
    base = results["whole batch"]
    for way, row in results.items():
        ratio = min(row["seconds"]) / min(base["seconds"])
        yield (
            f"| {mode} | {optimizer} | {way} | {row['error']:.1e} | "
            f"{row['peak'] / 1e6:.1f} | {ratio:.2f} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs=2, metavar=("OPTIMIZER", "MODE"))
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    import importlib.metadata

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("kmem", "tensorflow", "keras")
    )
    print("# Micro-batches and accumulation beside Keras's own\n")
    print(
        f"{datetime.date.today()}; {platform.machine()}, {os.cpu_count()} "
        f"cores, no GPU; {versions}; Python {platform.python_version()}.\n"
    )
    print(
        f"24 layers of Dense(128), {NUM_ROWS} rows in batches of {BATCH_SIZE}"
        f" or parts of {BATCH_SIZE // NUM_PARTS}, with a schedule of the "
        "learning rate. Error: the largest difference of a weight from "
        "whole-batch training after one epoch, relative to the largest "
        "change of a weight, in float64. Peak: bytes of a step above what was "
        "held before it, with the batch that the input pipeline makes "
        "meanwhile. Time a row, relative to the whole batch: the fastest "
        f"of {NUM_ROUNDS} rounds, in which the ways take turns. The last "
        "batch of the epoch is a half.\n"
    )
    print("| mode | optimizer | way | error | peak, MB | time |")
    print("|---|---|---|---|---|---|")
    for mode in ("graph", "xla"):
        for optimizer in ("SGD", "Adam"):
            for line in table(optimizer, mode):
                print(line, flush=True)


if __name__ == "__main__":
    main()
