"""What the memory options save in a program of two levels.

    python benchmarks/multilevel.py --output benchmarks/multilevel.md

The program is that of examples/data_reweighting.py: a small ResNet for images
of 32 x 32, and a net that weights its losses. `--blocks 3 4 6 3` is ResNet50,
which takes minutes to trace for each row. A row is a training in a process of
its own; two are alive at a time, the baseline and the one that is measured,
and take steps in turns: the time is the median of the ratios.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile

from measured_steps import Process
from measured_steps import fit
from measured_steps import in_turns
from measured_steps import run
from table import add_output
from table import made_by
from table import writer

# What is asked of each. Three products of a solver take what more of them
# take; the series needs a short step far from a minimum.
METHODS = {
    "Identity": {},
    "FiniteDifference": {},
    "SAMA": {},
    "Neumann": {"iterations": 3, "alpha": 0.01},
    "ConjugateGradient": {"iterations": 3},
    "MinimalResidual": {"iterations": 3},
    "Unrolled": {},
}
# Those with rows for all ways; others have the one that takes least.
IN_FULL = ("Identity", "FiniteDifference")
PARTS = {"microbatches": 4}
MIXED = {"mixed_precision": "bfloat16"}
REMAT = {"remat": "auto"}
TWO = {"devices": 2}
SINGLE, BASELINE, EXACT = "the lower level alone", "baseline", "float64"
TOGETHER = "+ microbatches, mixed precision, remat"
ROWS = {
    "+ microbatches=4": PARTS,
    '+ mixed_precision="bfloat16"': MIXED,
    '+ remat="auto"': REMAT,
    "+ data parallel over 2": TWO,
    TOGETHER: {**PARTS, **MIXED, **REMAT},
    "all together": {**PARTS, **MIXED, **REMAT, **TWO},
}


def train(method, way, settings, folder):
    """Trains until standard input ends; answers with each step's numbers."""
    import keras
    import numpy as np

    from kmem.multilevel import Program

    options = dict(ROWS.get(way, {}))
    if way == EXACT:
        keras.config.set_floatx("float64")
    with scope_of(options.pop("devices", 1)):
        levels, data, gradient = reweighting(
            hypergradient(method), json.loads(settings), options
        )
        if way == SINGLE:
            levels, data = levels[:1], {"classifier": data["classifier"]}
        program = Program(levels)

    def more(epoch, logs):
        if epoch == 0 and way != SINGLE:
            np.save(file_of(folder, method, way), gradient())
        return {}

    fit(program, data, more)


def hypergradient(method):
    from kmem import multilevel

    return getattr(multilevel, method)(**METHODS[method])


def scope_of(num_devices):
    """Where a program for one device, or for logical devices, is made."""
    import tensorflow as tf

    if num_devices == 1:
        return contextlib.nullcontext()
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * num_devices
    tf.config.set_logical_device_configuration(cpu, parts)
    names = [f"CPU:{number}" for number in range(num_devices)]
    return tf.distribute.MirroredStrategy(names).scope()


def reweighting(hypergradient, settings, options):
    """The levels of the example with the same weights at each precision.

    Its batches, too, and what gives the gradient of the first update.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    import data_reweighting as example

    classifier = example.resnet(
        settings["blocks"], settings["width"], group_norm=True
    )
    reweight = example.meta_weight_net()
    random = np.random.default_rng(0)
    for variable in [*classifier.weights, *reweight.weights]:
        if variable.path.endswith("kernel"):
            scale = np.sqrt(2 / np.prod(variable.shape[:-1]))
            values = scale * random.normal(size=variable.shape)
            variable.assign(values.astype("float32"))
    levels = example.make_levels(classifier, reweight, hypergradient, **options)
    images, _ = example.load("digits")
    many, few = example.long_tailed(*images, imbalance=100, num_balanced=100)
    data = {}
    for name, (x, y) in {"classifier": many, "reweight": few}.items():
        rows = random.choice(len(x), settings["batch"], replace=False)
        batch = x[rows].astype(keras.config.floatx()), y[rows]
        data[name] = tf.data.Dataset.from_tensors(batch)

    def gradient():
        """What Adam's first moments are a tenth of."""
        optimizer = levels[1].optimizer
        moments = [
            v for v in optimizer.variables if v.path.endswith("momentum")
        ]
        return np.concatenate([np.ravel(v.numpy()) for v in moments])

    return levels, data, gradient


def file_of(folder, method, way):
    return pathlib.Path(folder, f"{method} {way}.npy")


def rows(method, ways, settings, num_steps):
    """Gives the lines of the table for a way to pass gradients."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = json.dumps(settings), folder
        with Process(train, method, EXACT, *arguments) as exact:
            exact.ask()
        with Process(train, method, BASELINE, *arguments) as baseline:
            while len(baseline.answers) <= num_steps:
                if "error" in baseline.ask():
                    break
            if "error" in baseline.answers[-1]:
                yield row(method, BASELINE, baseline.answers, None, 0, folder)
                return
            peak = max(a["peak_bytes"] for a in baseline.answers[1:])
            yield row(method, BASELINE, baseline.answers, None, peak, folder)
            for way in ways:
                with Process(train, method, way, *arguments) as process:
                    turns = in_turns(process, baseline, num_steps)
                yield row(method, way, process.answers, turns, peak, folder)


def row(method, way, answers, baseline, baseline_peak_bytes, folder):
    head = f"| {method} | {way} |"
    if "error" in answers[-1]:
        return f"{head} {answers[-1]['error']} | | | |"
    peak_bytes = max(a["peak_bytes"] for a in answers[1:])
    pairs = zip(answers[1:], baseline or answers[1:], strict=True)
    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    return (
        f"{head} {peak_bytes / 1e6:.0f} | "
        f"{peak_bytes / baseline_peak_bytes:.3f} | {ratio:.2f} | "
        f"{error(method, way, folder)} |"
    )


def error(method, way, folder):
    """Of the gradient that the upper level gets, relative to float64."""
    import numpy as np

    paths = [file_of(folder, method, each) for each in (way, EXACT)]
    if not all(path.exists() for path in paths):
        return "-"
    found, exact = map(np.load, paths)
    return f"{np.linalg.norm(found - exact) / np.linalg.norm(exact):.1e}"


def header(settings, num_steps):
    return (
        "# Memory options in a program of two levels\n\n"
        f"{made_by(__file__)}\n\n"
        "Data reweighting: a ResNet with blocks "
        f"{settings['blocks']} of width {settings['width']} for images of 32 x "
        f"32, and a Meta-Weight-Net 1-100-1; batches of {settings['batch']} at "
        "both levels; SGD with momentum below, Adam above; graph mode. Betty's "
        "page on memory has ResNet50 (3-4-6-3, width 64) and batches of 100, "
        "and publishes 0.645 of its baseline for 16 bits, and 0.467 on each "
        "device for 16 bits on two devices; here both devices count together. "
        f'In the row "{SINGLE}" a step is a plain gradient of the lower '
        "loss, and an update. "
        "Solvers make three iterations; `Unrolled` passes one step. "
        "Groups are normalized instead of batches, whose statistics are "
        "others in each part. Peak: the most that is in memory during a step, "
        f"in {num_steps} steps after the first, with everything in it. "
        "Time: a step's, "
        "relative to that of the baseline, whose process takes a step after "
        "each one; the median, on a machine that does other work meanwhile. "
        "Error: of the gradient with which the upper level makes its first "
        "update, relative to that of the same method in float64.\n\n"
        "| method | way | peak, MB | of baseline | time | error |\n"
        "|---|---|---|---|---|---|\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=[SINGLE, *ROWS],
        help=f"all for {' and '.join(IN_FULL)}, else all options together",
    )
    parser.add_argument("--blocks", type=int, nargs=4, default=[1, 1, 1, 1])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    add_output(parser)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run([train], *arguments.run)
        return

    settings = {
        "blocks": arguments.blocks,
        "width": arguments.width,
        "batch": arguments.batch,
    }
    write = writer(arguments.output, header(settings, arguments.steps))
    for method in arguments.methods:
        every = [SINGLE, *ROWS] if method in IN_FULL else [TOGETHER]
        ways = arguments.ways or every
        for line in rows(method, ways, settings, arguments.steps):
            write(f"{line}\n")


if __name__ == "__main__":
    main()
