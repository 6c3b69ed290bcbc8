"""What micro-batches of a model hold that is nearly all weights, in one run.

    python benchmarks/weights.py --output benchmarks/weights.md

8 layers of Dense(2048) with SGD, in batches of 16 examples; each row in a
process of its own. The peak is all that the device holds in the worst of
several steps, in units of the weights (P = 134 MB): the weights, and, with one
sum of gradients, the largest gradient (P / 8) and one micro-batch, 2.13 P.
"""

import argparse
import json
import sys

import table
from measured_steps import meter

WAYS = {
    "plain": {},
    "microbatches=8": {"microbatches": 8},
    "gradient_accumulation_steps=2": {"gradient_accumulation_steps": 2},
}
MODES = ("graph", "xla", "eager")
BATCH_SIZE = 16
NUM_STEPS = 4


def measure(way, mode):
    """Prints the peak in units of the weights, and the fastest step's time."""
    import keras
    import numpy as np

    import kmem

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(2048, "relu") for _ in range(8)]
    model = kmem.wrap(keras.Sequential([keras.Input((2048,)), *layers]))
    model.compile(
        keras.optimizers.SGD(),
        "mse",
        jit_compile=mode == "xla",
        run_eagerly=mode == "eager",
    )
    x = np.random.default_rng(0).normal(size=(NUM_STEPS * BATCH_SIZE, 2048))
    x = x.astype("float32")
    step = meter()
    model.fit(
        *(x, x, BATCH_SIZE),
        epochs=2,
        verbose=0,
        callbacks=[step],
        **WAYS[way],
    )
    weights = 4 * model.count_params()
    # The first epoch traces.
    peaks, seconds = step.peak_bytes[NUM_STEPS:], step.seconds[NUM_STEPS:]
    print(json.dumps([max(peaks) / weights, min(seconds)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    table.add_output(parser)
    arguments = parser.parse_args()
    if arguments.one:
        measure(*arguments.one)
        return
    header = (
        "# Micro-batches of a model that is nearly all weights\n\n"
        + table.made_by(__file__)
        + "\n\nThe peak of a step in units of the weights.\n\n"
        "| mode | options | peak | step, s |\n| --- | --- | ---: | ---: |\n"
    )
    write = table.writer(arguments.output, header)
    for mode in MODES:
        for way in WAYS:
            *_, line = table.lines_of(__file__, "--one", way, mode)
            peak, seconds = json.loads(line)
            write(f"| {mode} | {way} | {peak:.2f} P | {seconds:.2f} |\n")


if __name__ == "__main__":
    sys.exit(main())
