"""What kmem promises, tried on a GPU: same numbers, the budget, the price.

    python benchmarks/gpu.py --output benchmarks/gpu.md

First the tests marked `gpu` run. Then each option trains each model in each
mode, in a process of its own; a row compares it with plain Keras in the same
mode. It ends in less than eight minutes: what is left is named, and not run.
`--device CPU` does the same on the CPU, to try the script.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

from table import add_output
from table import lines_of
from table import made_by
from table import writer

TESTS = pathlib.Path(__file__).parents[1] / "tests" / "gpu"
SECONDS = 8 * 60
STEPS = 6
MODELS = {"ResNet50": {"num_rows": 32}, "transformer": {"num_layers": 6}}
MODES = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}
# Shares of the peak of plain training, in the modes that an option has.
SHARES = {"remat": 0.6, "memory_budget": 0.5, "dtr": 0.7}
OPTIONS = {
    "microbatches=4": {"microbatches": 4},
    "remat": {},
    "memory_budget": {},
    "dtr": {},
    'mixed_precision="bfloat16"': {"mixed_precision": "bfloat16"},
    'sharding="full"': {"sharding": "full"},
    "offloaded": {},
}
# Also in a pool of kmem's own that is as large as the budget.
IN_A_POOL = " in a pool of it"
OPTIONS |= {option + IN_A_POOL: {} for option in SHARES}
ONLY_IN = {"dtr": ("eager",), "offloaded": ("graph",), "remat": ("graph",)}
ONLY_IN |= {
    option + IN_A_POOL: ONLY_IN.get(option, ("graph",)) for option in SHARES
}


def train(name, mode, option, budget, device):
    """Prints the steps' peaks and times, and the weights' checksums."""
    import keras
    import numpy as np
    import tensorflow as tf
    from remat_models import MODELS as MAKE

    import kmem

    if option.endswith(IN_A_POOL):
        kmem.memory.limit(int(budget), device=device, pool=True)
        option = option.removesuffix(IN_A_POOL)
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    model, x, y = MAKE[name](**MODELS[name])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, 0.9), loss, **MODES[mode])
    options = dict(OPTIONS.get(option, {}))
    if option in SHARES:
        options[option] = int(budget)
    if option == "offloaded":
        options["sharding"] = kmem.Sharding("full", cpu_offload=True)
    peaks, seconds = [], []

    class Meter(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            kmem.memory.reset_peak(device)
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            # Logs are numbers: the step has ended.
            float(logs["loss"])
            seconds.append(time.perf_counter() - self.start)
            peaks.append(kmem.memory.peak(device))

    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    kmem.wrap(model).fit(
        *(data,),
        steps_per_epoch=STEPS,
        verbose=0,
        callbacks=[Meter()],
        **options,
    )
    weights = [np.asarray(w, "float64") for w in model.get_weights()]
    print(
        json.dumps(
            {
                "peak": max(peaks[1:]),
                "seconds": statistics.median(seconds[1:]),
                "norms": [float(np.linalg.norm(w)) for w in weights],
                "sums": [float(w.sum()) for w in weights],
            }
        )
    )


def result_of(*arguments):
    """What a training of its own process gives, or `None` and its error."""
    try:
        *_, last = lines_of(__file__, "--run", *arguments)
    except (subprocess.CalledProcessError, ValueError) as error:
        return {"error": str(error)[:80]}
    return json.loads(last)


def row(name, mode, option, plain, device):
    share = SHARES.get(option.removesuffix(IN_A_POOL), 0)
    budget = int(share * plain["peak"])
    result = result_of(name, mode, option, budget, device)
    head = f"| {name} | {mode} | {option} |"
    if "error" in result:
        return f"{head} {result['error']} | | | |\n"
    changed = max(
        abs(a - b) / (norm or 1.0)
        for key in ("norms", "sums")
        for a, b, norm in zip(
            result[key], plain[key], plain["norms"], strict=True
        )
    )
    within = "" if not budget else "yes" if result["peak"] <= budget else "NO"
    return (
        f"{head} {result['peak'] / 1e6:.1f} | "
        f"{budget / 1e6:.1f} {within} | {changed:.1e} | "
        f"{result['seconds'] / plain['seconds']:.2f} |\n"
    )


def tests(device):
    """pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu"]
    ended = subprocess.run(
        [*command, str(TESTS)],
        env={**os.environ, "KMEM_TEST_DEVICE": device},
        capture_output=True,
        text=True,
    )
    return ended.stdout.strip().splitlines()[-1]


def main():
    parser = argparse.ArgumentParser()
    add_output(parser)
    parser.add_argument("--device", default="GPU")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        train(*args.run)
        return
    start = time.monotonic()
    write = writer(
        args.output,
        f"# What kmem promises, on a {args.device}\n\n{made_by(__file__)}\n\n"
        f"Tests marked `gpu`: {tests(args.device)}\n\n"
        "Peak: the most in use on the device in a step after the first. "
        "Changed: the largest difference of a weight's norm or sum after "
        f"{STEPS} steps, relative to its norm. Time: of a step, relative to "
        "plain Keras in the same mode; medians of processes that ran one "
        "after another.\n\n"
        "| model | mode | option | peak, MB | budget, MB, kept | changed | "
        "time |\n|---|---|---|---|---|---|---|\n",
    )
    for name in MODELS:
        for mode in MODES:
            plain = result_of(name, mode, "plain", 0, args.device)
            if "error" in plain:
                write(f"| {name} | {mode} | plain | {plain['error']} ||||\n")
                continue
            write(
                f"| {name} | {mode} | plain | {plain['peak'] / 1e6:.1f} | | "
                "| 1.00 |\n"
            )
            for option in OPTIONS:
                if mode not in ONLY_IN.get(option, MODES):
                    continue
                if time.monotonic() - start > SECONDS:
                    write(f"| {name} | {mode} | {option} | no time ||||\n")
                    continue
                write(row(name, mode, option, plain, args.device))


if __name__ == "__main__":
    main()
