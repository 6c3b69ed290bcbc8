"""What trains in a device of a fixed size: the tables that the README quotes.

    python benchmarks/headline.py --output benchmarks/headline.md

The device is the CPU with a limit, as of an accelerator. The largest batch of
plain Keras is looked for; the other ways have to train multiples of it. A
training is a process of its own, which takes its steps in turns with plain
Keras at its largest batch: the time of a row is the median of the ratios, so
that other work on the machine slows both down.
"""

import argparse
import contextlib
import statistics
import time

from measured_steps import Process
from measured_steps import fit
from measured_steps import in_turns
from measured_steps import run
from table import add_output
from table import made_by
from table import writer

KERAS = "Keras"
SCOPE = 'Keras, RematScope("full")'
REMAT = "kmem, remat"
BUDGET = "kmem, memory_budget"
ALLOWED = "kmem, memory_budget, allow"
# Multiples of Keras's largest batch, until one does not train.
MULTIPLES = {
    SCOPE: (1, 2, 3, 4),
    REMAT: (3, 3.5, 4, 6, 8),
    BUDGET: (16,),
    ALLOWED: (16,),
}
DEVICE_BYTES = {"ResNet50": 10**9, "transformer": 5 * 10**8}
OUT_OF_MEMORY = "ResourceExhaustedError"
NUM_PLAIN_STEPS = 2
FIRST_ROWS = 8


def train(name, way, num_rows, device_bytes):
    """Trains until standard input ends; answers with each step's numbers."""
    import keras
    import tensorflow as tf
    from remat_models import MODELS

    import kmem
    from kmem.budget.report import describe

    keras.utils.set_random_seed(0)
    is_scoped = way == SCOPE
    with keras.RematScope("full") if is_scoped else contextlib.nullcontext():
        model, x, y = MODELS[name](num_rows=int(num_rows))
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    kmem.memory.limit(int(device_bytes), device="CPU")
    options = {
        REMAT: {"remat": int(device_bytes)},
        BUDGET: {"memory_budget": int(device_bytes)},
        ALLOWED: {
            "memory_budget": int(device_bytes),
            "allow": ("batch_statistics",),
        },
    }.get(way, {})
    # Nothing of an input pipeline but the batch is in memory.
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    if options:
        model = kmem.wrap(model)
    start = time.perf_counter()

    def more(epoch, logs):
        chosen = ""
        if way in (BUDGET, ALLOWED):
            chosen = describe(model.memory_report.chosen.options)
        return {
            "loss": logs["loss"],
            "chosen": chosen,
            "since_start": time.perf_counter() - start,
        }

    fit(model, data, more, shuffle=False, **options)


def largest_of_keras(name, device_bytes):
    """The largest batch of plain Keras, by bisection."""
    fits, too_many = 0, None
    while too_many is None or too_many - fits > 1:
        rows = (fits + too_many) // 2 if too_many else max(FIRST_ROWS, 2 * fits)
        with Process(train, name, KERAS, str(rows), str(device_bytes)) as tried:
            answers = [tried.ask() for _ in range(NUM_PLAIN_STEPS)]
        errors = [found["error"] for found in answers if "error" in found]
        if not errors:
            fits = rows
        elif errors[0].startswith(OUT_OF_MEMORY):
            too_many = rows
        else:
            raise RuntimeError(errors[0])
    return fits


def lines(name, ways, num_steps):
    """Gives the lines of the table for a model."""
    device_bytes = DEVICE_BYTES[name]
    largest = largest_of_keras(name, device_bytes)
    with Process(train, name, KERAS, str(largest), str(device_bytes)) as keras:
        for _ in range(num_steps + 1):
            keras.ask()
        yield row(name, KERAS, 1, largest, keras.answers, keras.answers)
        for way in ways:
            for multiple in MULTIPLES[way]:
                rows = int(multiple * largest)
                arguments = name, way, str(rows), str(device_bytes)
                with Process(train, *arguments) as process:
                    turns = [None, *in_turns(process, keras, num_steps)]
                yield row(name, way, multiple, rows, process.answers, turns)
                if "error" in process.answers[-1]:
                    break


def row(name, way, multiple, rows, answers, keras):
    head = f"| {name} | {way} | {multiple} | {rows} |"
    if "error" in answers[-1]:
        return f"{head} {answers[-1]['error']} | | | |"
    peak = max(a["peak_bytes"] for a in answers[1:]) / 1e6
    pairs = zip(answers[1:], keras[1:], strict=True)
    ratio = statistics.median(a["seconds"] / k["seconds"] for a, k in pairs)
    waited = answers[0]["since_start"]
    return (
        f"{head} {peak:.1f} | {ratio / multiple:.2f} | {waited:.0f} | "
        f"{answers[-1]['chosen']} |"
    )


def header(num_steps):
    sizes = ", ".join(
        f"{name}: {size / 1e6:.0f} MB" for name, size in DEVICE_BYTES.items()
    )
    return (
        "# What trains in a device of a fixed size\n\n"
        f"{made_by(__file__)}\n\n"
        f"Graph mode, SGD with momentum; the device is the CPU, limited to "
        f"{sizes}. Keras's batch is the largest that trains. Peak: the most "
        f"that is in memory during a step, in {num_steps} steps after the "
        "first: parameters, optimizer, batch, activations, gradients and "
        "workspace. Time: of a row, relative to that of Keras with its largest "
        "batch, whose process takes a step after each one; medians. First "
        "step: after so many seconds, the search for a plan, or for a way, and "
        "its dry runs included. With `allow`, `allow=("
        '"batch_statistics",)`: time decides how many micro-batches there '
        "are.\n\n"
        "| model | way | of Keras's batch | rows | peak, MB | time a row | "
        "first step, s | chosen |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(DEVICE_BYTES)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    ways = list(MULTIPLES)
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways)
    parser.add_argument("--steps", type=int, default=5)
    add_output(parser)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run([train], *arguments.run)
        return
    write = writer(arguments.output, header(arguments.steps))
    for name in arguments.models:
        for text in lines(name, arguments.ways, arguments.steps):
            write(f"{text}\n")


if __name__ == "__main__":
    main()
