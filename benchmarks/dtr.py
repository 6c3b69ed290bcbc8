"""DTR beside plain Keras, at thresholds from none to the smallest.

    python benchmarks/dtr.py --output benchmarks/dtr.md

A row is a training in a process of its own. All rows of a model are alive at
the same time and take their steps in turns, each with the same batch: the
time is the median of the ratios to plain eager Keras, so that other work on
the machine slows all of them down. Thresholds are shares of that one's peak.
"""

import argparse
import contextlib
import hashlib
import itertools
import statistics
import sys
import time

from measured_steps import Process
from measured_steps import answer
from measured_steps import run
from table import add_output
from table import made_by
from table import writer

MODEL_NAMES = ("ResNet50", "TreeLSTM", "LSTM", "transformer")
EAGER, GRAPH = "Keras, eager", "Keras, graph"
DTR = {
    "DTR, op by op": {"compile": None},
    "DTR, compiled": {"compile": "layers"},
}
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)
NUM_BATCHES = 5


def train(name, way, threshold, heuristic):
    """Trains until standard input ends; answers with each step's numbers."""
    import keras
    import numpy as np
    import tensorflow as tf
    from dtr_models import MODELS

    import kmem

    # Without it, plain Keras's own sums of gradients of an embedding differ
    # from run to run.
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(0)
    model, batches = MODELS[name]()
    model.compile(
        keras.optimizers.SGD(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=way != GRAPH,
        jit_compile=False,
    )
    if way in DTR:
        # Of small tensors as well: some models have no others.
        options = kmem.DTR(
            int(threshold),
            evictee_minimum_size=0,
            heuristic=heuristic,
            **DTR[way],
        )
        model = kmem.wrap(model)
        model.memory_options = kmem.MemoryOptions(dtr=options)
    model.optimizer.build(model.trainable_variables)
    batches = keras.tree.map_structure(tf.constant, batches)

    def step(x, y):
        with kmem.memory.track("CPU") as usage:
            start = time.perf_counter()
            loss = model.train_on_batch(x, y)
            seconds = time.perf_counter() - start
        return loss, usage.peak_bytes, seconds

    losses, peaks, _ = zip(*(step(x, y) for x, y in batches), strict=True)
    values = [*model.variables, *model.optimizer.variables]
    numbers = [*map(np.asarray, losses), *(value.numpy() for value in values)]
    digest = hashlib.sha256()
    for array in numbers:
        digest.update(array.tobytes())
    answer(peak_bytes=max(peaks), numbers=digest.hexdigest())
    for x, y in itertools.cycle(batches):
        if not sys.stdin.readline():
            break
        before = recomputed()
        _, peak_bytes, seconds = step(x, y)
        answer(
            peak_bytes=peak_bytes,
            seconds=seconds,
            recomputed=recomputed() - before,
        )


def recomputed():
    import kmem

    done = kmem.dtr.statistics()
    return done.num_recomputations if done else 0


def rows(name, shares, heuristic, num_passes):
    """Gives the lines of the table for a model."""
    with Process(train, name, EAGER, "0", heuristic) as eager:
        eager.ask()
        peak_bytes = eager.answers[0]["peak_bytes"]
        groups = [[(EAGER, 0), (GRAPH, 0)]]
        groups += [[(way, share) for share in (0, *shares)] for way in DTR]
        for group in groups:
            group = [(way, int(share * peak_bytes)) for way, share in group]
            yield from beside(eager, name, group, heuristic, num_passes)


def beside(eager, name, group, heuristic, num_passes):
    """The lines of trainings that take turns with plain eager Keras."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                Process(train, name, way, str(threshold), heuristic)
            )
            for way, threshold in group
        ]
        for process in processes:
            process.ask()
        turns = []
        for _ in range(num_passes * NUM_BATCHES):
            turns.append(eager.ask())
            for process in processes:
                if "error" not in process.answers[-1]:
                    process.ask()
    first = eager.answers[0]
    for (way, threshold), process in zip(group, processes, strict=True):
        yield row(name, way, threshold, process.answers, first, turns)


def row(name, way, threshold_bytes, answers, first, turns):
    threshold = f"{threshold_bytes / 1e6:.1f}" if threshold_bytes else "-"
    head = f"| {name} | {way} | {threshold} |"
    if "error" in answers[-1]:
        return f"{head} {answers[-1]['error']} | | | |"
    peak = max(a["peak_bytes"] for a in answers)
    kept = "" if peak <= (threshold_bytes or peak) else ", NOT KEPT"
    pairs = zip(answers[1:], turns, strict=True)
    ratio = statistics.median(a["seconds"] / e["seconds"] for a, e in pairs)
    again = statistics.mean(a["recomputed"] for a in answers[1:])
    same = "yes" if answers[0]["numbers"] == first["numbers"] else "no"
    return (
        f"{head} {peak / 1e6:.1f}{kept} | {ratio:.2f} | {again:.0f} | {same} |"
    )


def header(heuristic, num_passes):
    return (
        "# DTR beside plain Keras\n\n"
        f"{made_by(__file__)}\n\n"
        "Deterministic operations; SGD without momentum; ResNet50 with 16 "
        "images of 96 x 96; TreeLSTM and LSTM have another tree, or length, "
        "in each batch. Threshold and peak: of the device, with parameters, "
        "optimizer, batches, activations, gradients and workspace; thresholds "
        "are shares of plain eager Keras's peak, the largest of all steps "
        f'counts. Heuristic: "{heuristic}", for tensors of all sizes. '
        "Time: a step's, "
        "relative to that of another process with plain eager Keras; the "
        f"median of {num_passes * NUM_BATCHES} that were taken in turns. "
        "Recomputed: operators in a step. Same: whether the losses and all "
        f"variables after {NUM_BATCHES} steps are those of plain eager Keras, "
        "bit for bit.\n\n"
        "| model | way | threshold, MB | peak, MB | time | recomputed | same "
        "|\n"
        "|---|---|---|---|---|---|---|\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=list(MODEL_NAMES), choices=MODEL_NAMES
    )
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--heuristic", default="dtr_eq")
    parser.add_argument(
        "--passes",
        type=int,
        default=1,
        help="how often to go through the batches for the times",
    )
    add_output(parser)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run([train], *arguments.run)
        return

    write = writer(
        arguments.output, header(arguments.heuristic, arguments.passes)
    )
    for name in arguments.models:
        for line in rows(
            name, arguments.shares, arguments.heuristic, arguments.passes
        ):
            write(f"{line}\n")


if __name__ == "__main__":
    main()
