"""What kmem's allocator costs: a training step with it and without it.

    python benchmarks/allocator.py > benchmarks/allocator.md

Both ways run in processes of their own, in turn, so that a machine that is
busier for a while is busier for both; each pair of neighbours gives one
ratio. A process reports the fastest of several rounds of steps, which other
programs disturb least. Without kmem's allocator means that kmem is not
imported: TensorFlow's own is in place.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time

# Steps in a round: each round takes roughly a fifth of a second.
CASES = {
    ("mlp", "eager"): 1,
    ("mlp", "graph"): 2,
    ("mlp", "xla"): 2,
    ("small mlp", "eager"): 10,
    ("small mlp", "graph"): 200,
    ("convnet", "eager"): 1,
    ("convnet", "graph"): 3,
}
NUM_ROUNDS = 25


def build_model(name, mode):
    import keras

    if name == "convnet":
        layers = []
        for filters in (16, 32, 64):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same"),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.MaxPooling2D(),
            ]
        layers += [keras.layers.GlobalAveragePooling2D()]
    else:
        width, depth = (64, 4) if name == "small mlp" else (512, 8)
        layers = [
            keras.layers.Dense(width, activation="relu") for _ in range(depth)
        ]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
    )
    return model


def measure(name, mode):
    """Returns the seconds of a step, and the process's memory after it."""
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    shape = {
        "mlp": (2048, 512),
        "small mlp": (64, 64),
        "convnet": (64, 64, 64, 3),
    }[name]
    x = tf.constant(random.normal(size=shape).astype("float32"))
    y = tf.constant(random.integers(0, 10, size=shape[0]))
    model = build_model(name, mode)
    for _ in range(4):
        model.train_on_batch(x, y)
    num_steps = CASES[name, mode]
    seconds = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        for _ in range(num_steps):
            model.train_on_batch(x, y)
        seconds.append((time.perf_counter() - start) / num_steps)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"seconds": min(seconds), "resident": resident}


def run_process(name, mode, with_kmem):
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        + ("import kmem; kmem.memory.current('CPU')\n" if with_kmem else "")
        + "import allocator, json\n"
        f"print(json.dumps(allocator.measure({name!r}, {mode!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def cpu_name():
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    import importlib.metadata as metadata

    versions = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("kmem", "tensorflow", "keras")
    )
    print("# The price of kmem's allocator\n")
    print(
        f"{datetime.date.today()}; {cpu_name()}, {os.cpu_count()} cores; "
        f"{versions}; Python {platform.python_version()}.\n"
    )
    print(
        f"Each row: {args.pairs} pairs of processes in turn, one with "
        "TensorFlow's own allocator and one with kmem's. A ratio above 1 is "
        "kmem's price. Resident is the whole process at the end.\n"
    )
    print(
        "| model | mode | TensorFlow, ms a step | kmem, ms a step "
        "| ratio, median | ratios | resident, TensorFlow / kmem, MB |"
    )
    print("|---|---|---|---|---|---|---|")
    medians = []
    for name, mode in CASES:
        pairs = []
        for index in range(args.pairs):
            # Who goes first changes, too.
            order = [False, True] if index % 2 == 0 else [True, False]
            pair = {way: run_process(name, mode, way) for way in order}
            pairs.append((pair[False], pair[True]))
        ratios = [b["seconds"] / a["seconds"] for a, b in pairs]
        ratio = statistics.median(ratios)
        medians.append(ratio)
        plain, kmem = (
            {
                key: statistics.median(pair[way][key] for pair in pairs)
                for key in ("seconds", "resident")
            }
            for way in (0, 1)
        )
        print(
            f"| {name} | {mode} | {plain['seconds'] * 1e3:.2f} "
            f"| {kmem['seconds'] * 1e3:.2f} | {ratio:.3f} "
            f"| {min(ratios):.3f} to {max(ratios):.3f} "
            f"| {plain['resident'] / 1e6:.0f} / {kmem['resident'] / 1e6:.0f} |",
            flush=True,
        )
    print(f"\nMedian of the rows' ratios: {statistics.median(medians):.3f}.")


if __name__ == "__main__":
    main()
