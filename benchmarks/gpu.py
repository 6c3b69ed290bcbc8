"""What kmem promises, tried on a GPU: same numbers, the budget, the price.

    python benchmarks/gpu.py --output benchmarks/gpu.md

First the tests marked `gpu` run. Then each option trains each model in each
mode, in a process of its own; a row compares it with plain Keras in the same
mode. `--jobs` processes trace and plan beside each other; one at a time takes
the steps that are timed. It ends in less than eight minutes: what is left is
named, and not run. `--device CPU` does the same on the CPU, to try the script.
"""

import argparse
import fcntl
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent import futures

from table import add_output
from table import made_by
from table import writer

TESTS = pathlib.Path(__file__).parents[1] / "tests" / "gpu"
SECONDS = 8 * 60
STEPS = 11
MODELS = {"ResNet50": {"num_rows": 32}, "transformer": {"num_layers": 6}}
MODES = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
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


# A device is whole in each process only if none takes all of it at once.
SHARED = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}


def train(name, mode, option, budget, device, lock):
    """Prints the steps' peaks and times, and the weights' checksums."""
    if mode == "xla":
        # TensorFlow's own determinism would have Keras leave XLA out.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"

    import keras
    import numpy as np
    import tensorflow as tf
    from remat_models import MODELS as MAKE

    import kmem

    if option.endswith(IN_A_POOL):
        kmem.memory.limit(int(budget), device=device, pool=True)
        option = option.removesuffix(IN_A_POOL)
    if mode != "xla":
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
    alone = open(lock)

    class Meter(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:  # Until the process ends.
                fcntl.flock(alone, fcntl.LOCK_EX)
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


def result_of(arguments, until):
    """What a training of its own process gives, or its error."""
    try:
        ended = subprocess.run(
            [sys.executable, __file__, "--run", *map(str, arguments)],
            env={**os.environ, **SHARED},
            capture_output=True,
            text=True,
            timeout=max(0, until - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        return {"error": "no time"}
    if ended.returncode:
        print(*arguments, ended.stderr, sep="\n", file=sys.stderr)
        *_, last = ["", *ended.stderr.strip().splitlines()]
        return {"error": f"status {ended.returncode}: {last[:80]}"}
    return json.loads(ended.stdout.splitlines()[-1])


def row(name, mode, option, budget, result, plain):
    """A line of the table."""
    head = f"| {name} | {mode} | {option} |"
    if "error" in result:
        return f"{head} {result['error']} | | | |\n"
    # That of a weight whose gradient is rounding alone says nothing.
    least = max(plain["norms"]) / 1000
    changed = max(
        abs(a - b) / max(norm, least)
        for key in ("norms", "sums")
        for a, b, norm in zip(
            result[key], plain[key], plain["norms"], strict=True
        )
    )
    within = ""
    if budget:
        kept = "yes" if result["peak"] <= budget else "NO"
        within = f"{budget / 1e6:.1f} {kept}"
    return (
        f"{head} {result['peak'] / 1e6:.1f} | {within} | {changed:.1e} | "
        f"{result['seconds'] / plain['seconds']:.2f} |\n"
    )


def tests(device):
    """The last line of pytest for each file, all in less time than one.

    Each has a process: determinism, once asked for, is for a whole process.
    """
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu"]
    running = {
        path.name: subprocess.Popen(
            [*command, str(path)],
            env={**os.environ, **SHARED, "KMEM_TEST_DEVICE": device},
            stdout=subprocess.PIPE,
            text=True,
        )
        for path in sorted(TESTS.glob("test_*.py"))
    }
    for name, process in running.items():
        output, _ = process.communicate()
        if process.returncode:
            print(output, file=sys.stderr)
        yield f"* `{name}`: {output.strip().splitlines()[-1].strip('= ')}\n"


def rows(device, jobs, until):
    """All lines of the table, those of a model in a mode together."""
    programs = list(itertools.product(MODELS, MODES))
    with (
        tempfile.NamedTemporaryFile() as lock,
        futures.ThreadPoolExecutor(jobs) as processes,
        futures.ThreadPoolExecutor(len(programs)) as threads,
    ):

        def trained(*case):
            arguments = (*case, device, lock.name)
            return processes.submit(result_of, arguments, until)

        def of_program(program):
            plain = trained(*program, "plain", 0).result()
            cases = [
                (*program, option, budget_of(option, plain))
                for option in OPTIONS
                if program[1] in ONLY_IN.get(option, MODES) and "peak" in plain
            ]
            running = [trained(*case) for case in cases]
            lines = [row(*program, "plain", 0, plain, plain)]
            for case, result in zip(cases, running, strict=True):
                lines.append(row(*case, result.result(), plain))
            return lines

        for lines in threads.map(of_program, programs):
            yield from lines


def budget_of(option, plain):
    """In bytes; 0 of an option that has none."""
    share = SHARES.get(option.removesuffix(IN_A_POOL), 0)
    return int(share * plain["peak"])


def main():
    parser = argparse.ArgumentParser()
    add_output(parser)
    parser.add_argument("--device", default="GPU")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes beside each other"
    )
    parser.add_argument("--run", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        train(*args.run)
        return
    until = time.monotonic() + SECONDS
    write = writer(
        args.output,
        f"# What kmem promises, on a {args.device}\n\n{made_by(__file__)}\n\n"
        f"Tests marked `gpu`:\n\n{''.join(tests(args.device))}\n"
        "Peak: the most in use on the device in a step after the first. "
        "Changed: the largest difference of a weight's norm or sum after "
        f"{STEPS} steps, relative to its norm, or to a thousandth of the "
        "largest. Time: of a step, relative to "
        "plain Keras in the same mode; medians of processes that took these "
        "steps one after another.\n\n"
        "| model | mode | option | peak, MB | budget, MB, kept | changed | "
        "time |\n|---|---|---|---|---|---|---|\n",
    )
    for line in rows(args.device, args.jobs, until):
        write(line)


if __name__ == "__main__":
    main()
