"""Are budgets kept? Trains at many of them, and looks at every step's peak.

    python benchmarks/budgets.py --output benchmarks/budgets.md

For each model, budgets from the smallest that can be planned for to the peak
of a step that keeps everything. Each is planned for, and trained with for some
steps, in graph mode.
"""

import argparse
import time

from table import add_output
from table import lines_of
from table import made_by
from table import writer

MODEL_NAMES = ("U-Net", "transformer, 6 layers", "ResNet50, batch 16")
NUM_STEPS = 8


def rows(name, num_budgets):
    """Prints the lines of the table for a model."""
    import numpy as np
    import tensorflow as tf

    import kmem

    model, x, y = compiled(name)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    train(model, data, None)
    everything = kmem.plan(model, (x, y), budget="1TB")
    most = everything.predicted_peak_bytes
    try:
        kmem.plan(model, (x, y), budget=1)
    except ValueError as error:
        least = error.smallest_bytes
    for budget in np.linspace(least, most, num_budgets).astype(int).tolist():
        start = time.perf_counter()
        plan = kmem.plan(model, (x, y), budget=budget)
        seconds = time.perf_counter() - start
        peaks = train(model, data, plan)
        kept = "yes" if max(peaks) <= budget else "NO"
        cells = [name, *map(megabytes, (budget, plan.predicted_peak_bytes))]
        cells += [megabytes(min(peaks)), megabytes(max(peaks)), kept]
        cells += [f"{plan.slowdown:.2f}", f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def train(model, data, plan):
    """The peaks of some steps after the one that is traced."""
    import keras

    import kmem

    class Peaks(keras.callbacks.Callback):
        seen = []

        def on_train_batch_begin(self, batch, logs=None):
            kmem.memory.reset_peak("CPU")

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(kmem.memory.peak("CPU"))

    peaks = Peaks()
    kmem.wrap(model).fit(
        data,
        steps_per_epoch=NUM_STEPS + 1,
        shuffle=False,
        verbose=0,
        callbacks=[peaks],
        remat=plan,
    )
    return peaks.seen[1:]


def compiled(name):
    import remat_models
    from remat import compiled

    makers = {
        "U-Net": remat_models.unet,
        "transformer, 6 layers": lambda: remat_models.transformer(6),
        "ResNet50, batch 16": lambda: remat_models.resnet50(16),
    }
    remat_models.MODELS[name] = makers[name]
    return compiled(name, "graph")


def megabytes(size):
    return f"{size / 1e6:.1f}"


def header():
    return (
        "# Are budgets kept?\n\n"
        f"{made_by(__file__)}\n\n"
        "Graph mode, SGD with momentum, on one batch. Asked: the budget. "
        f"Measured: the least and the most of the peaks of {NUM_STEPS} "
        "steps, with all that is in memory. Time: a step's, as predicted, "
        "relative to one that keeps everything. Planned in: seconds, "
        "dry runs and all.\n\n"
        "| model | asked, MB | predicted | measured, least | most | kept "
        "| time | planned in |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=list(MODEL_NAMES), choices=MODEL_NAMES
    )
    parser.add_argument("--budgets", type=int, default=15)
    add_output(parser)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        rows(arguments.run, arguments.budgets)
        return

    write = writer(arguments.output, header())
    for name in arguments.models:
        run = ("--run", name, "--budgets", arguments.budgets)
        for line in lines_of(__file__, *run):
            write(line)


if __name__ == "__main__":
    main()
