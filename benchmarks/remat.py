"""Planned rematerialization beside what else there is for Keras.

    python benchmarks/remat.py --output benchmarks/remat.md

A row is a training in a process of its own. Two processes are alive at a
time, plain Keras and the one that is measured, and take steps in turns: the
time is the median of the ratios, so that other work on the machine slows both
down. kmem's budgets are what Keras holds before a step, and a share of what
its step needs above that: activations, gradients and workspace.
"""

import argparse
import contextlib
import pathlib
import statistics
import tempfile

from measured_steps import Process
from measured_steps import answer
from measured_steps import first_words
from measured_steps import fit
from measured_steps import in_turns
from measured_steps import run
from table import add_output
from table import made_by
from table import writer

MODEL_NAMES = (
    "ResNet50",
    "DenseNet121",
    "U-Net",
    "transformer",
    "EfficientNetV2B0",
)
KERAS = "Keras"
SCOPE = 'Keras, RematScope("full")'
BY_HAND = "tf.recompute_grad by hand"
SHARES = (0.75, 0.5, 0.4, 0.33)
NUM_LOSS_STEPS = 5


def train(name, mode, way, plan=None):
    """Trains until standard input ends; answers with each step's numbers."""
    import keras
    import remat_by_hand
    import tensorflow as tf

    import kmem

    is_scoped = way == SCOPE
    with keras.RematScope("full") if is_scoped else contextlib.nullcontext():
        model, x, y = compiled(name, mode)
    if way == BY_HAND:
        plain, model = model, remat_by_hand.ByHand(model)
        model.compile(plain.optimizer, plain.loss, jit_compile=mode == "xla")
    options = {"remat": plan} if plan else {}
    if options:
        model = kmem.wrap(model)
    # Nothing of an input pipeline but the batch is in memory.
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    fit(
        model,
        data,
        lambda epoch, logs: {"loss": logs["loss"]},
        shuffle=False,
        **options,
    )


def plan(name, mode, folder, *budgets):
    """Saves a plan for each budget; answers with what they predict."""
    import kmem

    model, x, y = compiled(name, mode)
    results = []
    for number, text in enumerate(budgets):
        budget = text if text == "auto" else int(text)
        path = pathlib.Path(folder) / f"{number}.json"
        try:
            made = kmem.plan(model, (x, y), budget=budget)
        except ValueError as error:
            results.append({"error": first_words(error)})
            continue
        made.save(path)
        results.append(
            {
                "path": str(path),
                "peak_bytes": made.predicted_peak_bytes,
                "slowdown": made.slowdown,
            }
        )
    answer(plans=results)


def compiled(name, mode):
    """A model, as all of them are trained here, and its batch."""
    import keras
    from remat_models import MODELS

    keras.utils.set_random_seed(0)
    model, x, y = MODELS[name]()
    model.compile(
        # Slow, so that rounding does not grow into another training.
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=mode == "xla",
    )
    return model, x, y


def rows(name, mode, num_steps):
    """Gives the lines of the table for a model in a mode."""
    with Process(train, name, mode, KERAS) as keras:
        while len(keras.answers) <= num_steps and "error" not in keras.ask():
            pass
        yield row(name, mode, KERAS, keras.answers, keras.answers)
        if "error" in keras.answers[-1]:
            return
        for way in (SCOPE, BY_HAND):
            yield beside(keras, name, mode, way, num_steps)
        held = keras.answers[-1]["held_bytes"]
        above = max(a["peak_bytes"] for a in keras.answers[1:]) - held
        budgets = {
            f"kmem, {share}: {(held + share * above) / 1e6:.1f} MB": str(
                int(held + share * above)
            )
            for share in SHARES
        }
        budgets["kmem, auto"] = "auto"
        with tempfile.TemporaryDirectory() as folder:
            with Process(plan, name, mode, folder, *budgets.values()) as made:
                answer = made.ask()
            plans = answer.get("plans", [answer] * len(budgets))
            for way, planned in zip(budgets, plans, strict=True):
                yield beside(keras, name, mode, way, num_steps, planned)


def beside(keras, name, mode, way, num_steps, made=None):
    """The line of a training that takes turns with plain Keras."""
    if made and "error" in made:
        return row(name, mode, way, [made], [])
    arguments = [made["path"]] if made else []
    with Process(train, name, mode, way, *arguments) as process:
        turns = in_turns(process, keras, num_steps)
    return row(name, mode, way, process.answers, [None, *turns], made)


def row(name, mode, way, answers, keras, made=None):
    head = f"| {name} | {mode} | {way} |"
    if "error" in answers[-1]:
        return f"{head} {answers[-1]['error']} | | | | |"
    peak = max(a["peak_bytes"] for a in answers[1:]) / 1e6
    pairs = zip(answers[1:], keras[1:], strict=True)
    ratio = statistics.median(a["seconds"] / k["seconds"] for a, k in pairs)
    predicted_peak = predicted_time = "-"
    if made:
        predicted_peak = f"{made['peak_bytes'] / 1e6:.1f}"
        predicted_time = f"{made['slowdown']:.2f}"
    loss = answers[NUM_LOSS_STEPS]["loss"]
    return (
        f"{head} {peak:.1f} | {predicted_peak} | {ratio:.2f} | "
        f"{predicted_time} | {loss:.5f} |"
    )


def header(num_steps):
    return (
        "# Planned rematerialization beside what else there is\n\n"
        f"{made_by(__file__)}\n\n"
        "SGD with momentum, on one batch. Peak: the most that is in memory "
        f"during a step, in {num_steps} steps after the first: parameters, "
        "optimizer, batch, activations, gradients and workspace. Time: a "
        "step's, relative to that of plain Keras, whose process takes a step "
        "after each one; the median, on a machine that does other work "
        "meanwhile. Loss: after "
        f"{NUM_LOSS_STEPS} steps. kmem's budgets are what is in memory before "
        "a step and a share of what Keras's step needs above that.\n\n"
        "| model | mode | way | peak, MB | predicted | time | predicted | "
        "loss |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=list(MODEL_NAMES), choices=MODEL_NAMES
    )
    parser.add_argument(
        "--modes", nargs="+", default=["graph", "xla"], choices=["graph", "xla"]
    )
    parser.add_argument("--steps", type=int, default=10)
    add_output(parser)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run([train, plan], *arguments.run)
        return

    write = writer(arguments.output, header(arguments.steps))
    for name in arguments.models:
        for mode in arguments.modes:
            for line in rows(name, mode, arguments.steps):
                write(f"{line}\n")


if __name__ == "__main__":
    main()
