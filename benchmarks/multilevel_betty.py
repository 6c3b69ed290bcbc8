"""The memory of a data reweighting in kmem, beside Betty's.

    cd benchmarks; python multilevel_betty.py --output multilevel_betty.md

The program is that of multilevel.py: the same net, shapes, batches and
optimizers, by Betty (Choe et al., ICLR 2023, arXiv:2207.02849) in an
environment of its own, which is deleted. Bytes of PyTorch are what its
profiler says is allocated and freed during a step, on top of what is held
before it; those of TensorFlow are `kmem.memory`'s. A row is a training in a
process of its own; it takes steps in turns with Betty's baseline of the same
method. A second table tells what a whole process takes, and which part of it
its imports are.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import multilevel
from betty_golden import SOURCE
from headline_torch import allocated
from measured_steps import Process
from measured_steps import answer
from measured_steps import fit
from measured_steps import in_turns
from measured_steps import run
from table import add_output
from table import made_by
from table import writer
from torch_environment import environment

# By the names in kmem: what Betty is told to do.
METHODS = {
    "FiniteDifference": {"type": "darts"},
    "Identity": {"type": "neumann", "neumann_iterations": 0},
    "Neumann": {
        "type": "neumann",
        "neumann_iterations": 3,
        "neumann_alpha": 0.01,
    },
    "ConjugateGradient": {"type": "cg", "cg_iterations": 3},
}
BASELINE, NUM_PARTS = "baseline", 4
BETTY = {
    BASELINE: {},
    'precision="bf16"': {"precision": "bf16"},
    "autocast to bfloat16": {"in_16_bits": True},
    "gradient_accumulation=4": {"num_parts": NUM_PARTS},
    "both": {"in_16_bits": True, "num_parts": NUM_PARTS},
}
KMEM = {
    BASELINE: {},
    "mixed_precision": multilevel.MIXED,
    "microbatches=4": multilevel.PARTS,
    "remat": multilevel.REMAT,
    "all three": multilevel.ROWS[multilevel.TOGETHER],
}
# The ways that methods have whose numbers are not Betty's default's.
SHORT = {
    "Betty": (BASELINE, "autocast to bfloat16", "gradient_accumulation=4"),
    "kmem": (BASELINE, "all three"),
}
DIGITS = {"blocks": [1, 1, 1, 1], "width": 16, "batch": 20}
NUM_DIGIT_STEPS = 20
STAGES = {
    "imported": "the framework, imported",
    "library": "the library, imported too",
    "lower": "and the classifier alone, trained",
    "program": "or both levels, trained",
}


def train_kmem(method, way, settings, folder):
    """Trains until standard input ends; answers with each step's numbers."""
    program, data, _ = kmem_program(method, json.loads(settings), KMEM[way])
    fit(program, data, lambda epoch, logs: {})


def kmem_program(method, settings, options):
    from kmem.multilevel import Program

    levels, data, _ = multilevel.reweighting(
        multilevel.hypergradient(method), settings, options
    )
    return Program(levels), data, levels[0].model


def train_betty(method, way, settings, folder):
    """The same in PyTorch; the first answer has the peak of a step."""
    problems, engine, batches = betty_problems(
        METHODS[method] | BETTY[way], json.loads(settings), folder
    )
    # An update of the upper level takes so many of the lower one.
    num_updates = BETTY[way].get("num_parts", 1)

    def step():
        for _ in range(num_updates**2):
            engine.train_step()

    step()
    held_bytes = bytes_of(problems, batches)
    _, more_bytes = allocated(step)
    answer(peak_bytes=held_bytes + more_bytes)
    while sys.stdin.readline():
        start = time.perf_counter()
        step()
        answer(seconds=(time.perf_counter() - start) / num_updates)


def betty_problems(options, settings, folder):
    import multilevel_betty_models
    import numpy as np
    import torch

    torch.set_num_threads(2)
    batches = {}
    for name in ("classifier", "reweight"):
        with np.load(file_of(folder, name, settings)) as arrays:
            x = torch.tensor(arrays["x"]).movedim(-1, 1).contiguous()
            batches[name] = x, torch.tensor(arrays["y"]).long()
    problems, engine = multilevel_betty_models.problems(
        settings, batches, **options
    )
    return problems, engine, batches


def bytes_of(problems, batches):
    """What is held between steps: weights, momenta and batches."""
    tensors = list(itertools.chain(*batches.values()))
    for problem in problems:
        tensors += problem.module.parameters()
        for state in problem.optimizer.state.values():
            tensors += state.values()
    return sum(t.untyped_storage().nbytes() for t in tensors)


def file_of(folder, name, settings):
    return pathlib.Path(folder, f"{name} {settings['batch']}.npz")


def save_batches(settings, folder):
    """Kept in a folder, for Betty, are the batches that kmem trains on."""
    import numpy as np

    _, data, _ = kmem_program("Identity", settings, {})
    for name, dataset in data.items():
        ((x, y),) = dataset.as_numpy_iterator()
        np.savez(file_of(folder, name, settings), x=x, y=y)


def resident_kmem(stage, settings, folder):
    """The process's memory after a stage, with TensorFlow."""
    import keras
    import tensorflow  # noqa: F401

    settings = json.loads(settings)
    if stage != "imported":
        import kmem  # noqa: F401
    if stage in ("lower", "program"):
        program, data, classifier = kmem_program(
            "FiniteDifference", settings, {}
        )
        if stage == "lower":
            program, data = classifier, data["classifier"].repeat()
            program.compile(
                keras.optimizers.SGD(0.01, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        program.fit(data, steps_per_epoch=1, epochs=NUM_DIGIT_STEPS, verbose=0)
    answer(**resident())


def resident_betty(stage, settings, folder):
    """The process's memory after a stage, with PyTorch."""
    import torch

    torch.set_num_threads(2)
    if stage != "imported":
        import betty.engine
        import betty.problems  # noqa: F401
    if stage in ("lower", "program"):
        (lower, _), engine, batches = betty_problems(
            METHODS["FiniteDifference"], json.loads(settings), folder
        )
        step = engine.train_step
        if stage == "lower":
            step = plain_step(lower, *batches["classifier"])
        for _ in range(NUM_DIGIT_STEPS):
            step()
    answer(**resident())


def plain_step(problem, x, y):
    """A function that trains the module of a problem as PyTorch does."""
    from torch.nn.functional import cross_entropy

    def step():
        cross_entropy(problem.module(x), y).backward()
        problem.optimizer.step()
        problem.optimizer.zero_grad()

    return step


def resident():
    """The bytes of this process, and the most they were, by Linux."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    kilobytes = {k: int(found[k].split()[0]) for k in ("VmRSS", "VmHWM")}
    return {
        "now_bytes": 1024 * kilobytes["VmRSS"],
        "most_bytes": 1024 * kilobytes["VmHWM"],
    }


def rows(method, settings, folder, num_steps, python):
    """Gives the lines of the table for a way to pass gradients."""
    in_full = method == "FiniteDifference"
    arguments = json.dumps(settings), folder
    with Process(
        train_betty, method, BASELINE, *arguments, python=python
    ) as baseline:
        peak_bytes = baseline.ask().get("peak_bytes", 0)
        for library, function, ways, where in (
            ("Betty", train_betty, BETTY, python),
            ("kmem", train_kmem, KMEM, None),
        ):
            for way in ways if in_full else SHORT[library]:
                with Process(
                    function, method, way, *arguments, python=where
                ) as process:
                    turns = in_turns(process, baseline, num_steps)
                cells = cells_of(process.answers, turns, peak_bytes)
                yield f"| {method} | {library} | {way} | {cells} |"


def cells_of(answers, baseline, baseline_peak_bytes):
    if "error" in answers[-1]:
        return f"{answers[-1]['error']} | | "
    # In the first step of a process of TensorFlow it is traced.
    peaks = [a["peak_bytes"] for a in answers[1:] if "peak_bytes" in a]
    peak_bytes = max(peaks or [answers[0]["peak_bytes"]])
    pairs = zip(answers[1:], baseline, strict=True)
    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    return (
        f"{peak_bytes / 1e6:.0f} | {peak_bytes / baseline_peak_bytes:.2f} | "
        f"{ratio:.2f}"
    )


def resident_rows(folder, python):
    """Gives the lines of the table about whole processes."""
    for library, function, where in (
        ("kmem, TensorFlow and Keras", resident_kmem, None),
        ("Betty and PyTorch", resident_betty, python),
    ):
        for stage, words in STAGES.items():
            with Process(
                function, stage, json.dumps(DIGITS), folder, python=where
            ) as process:
                found = process.ask()
            yield (
                f"| {library} | {words} | {found['now_bytes'] / 1e6:.0f} | "
                f"{found['most_bytes'] / 1e6:.0f} |"
            )


def header(settings, num_steps, torch_version):
    return (
        "# A data reweighting in kmem, and in Betty\n\n"
        f"{made_by(__file__)} Betty at commit {SOURCE.split('@')[1]}, torch "
        f"{torch_version}.\n\n"
        f"A ResNet with blocks {settings['blocks']} of width "
        f"{settings['width']} for images of 32 x 32, and a Meta-Weight-Net "
        f"1-100-1; the same batches of {settings['batch']} at both levels; "
        "SGD with momentum below, Adam above; group normalization; 2 threads. "
        "kmem in graph mode, PyTorch eager. `FiniteDifference` is Betty's "
        '`"darts"`, its default; `Identity` is its `"neumann"` without '
        'iterations; `Neumann` and `ConjugateGradient` are `"neumann"` and '
        '`"cg"` with three. `precision="bf16"` is Betty\'s own option, which '
        "is an autocast for CUDA; in the rows with autocast to bfloat16 a "
        "problem has one for the CPU at the same spot. Peak: the most that is "
        "in memory during a step, with everything in it; and relative to that "
        "of Betty's baseline of the same method. Time: that of an update of "
        "the lower level and of what follows it above, relative to that "
        "baseline, whose process takes a step after each one; the median of "
        f"{num_steps}, on a machine that does other work meanwhile. With "
        "Betty's `gradient_accumulation` at both levels an upper batch is a "
        "part, and is followed by an update for every fourth only: its time "
        "is for less work, and its gradient is another one.\n\n"
        "Two devices are in multilevel.md for kmem. Betty's strategies for "
        "several devices ask CUDA for their number, and divide by it: without "
        "a GPU none of them starts.\n\n"
        "| method | library | way | peak, MB | of Betty's baseline | time |\n"
        "|---|---|---|---|---|---|\n"
    )


def resident_header():
    return (
        "\n## What a process takes\n\n"
        "Of the same program in small, on digits: blocks "
        f"{DIGITS['blocks']}, width {DIGITS['width']}, batches of "
        f"{DIGITS['batch']}, a finite difference, {NUM_DIGIT_STEPS} steps. "
        "Resident memory of a process of its own for each row, by Linux: at "
        "the end, and the most.\n\n"
        "| process | has | at the end, MB | at most, MB |\n"
        "|---|---|---|---|\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--methods", nargs="*", default=list(METHODS), choices=METHODS
    )
    parser.add_argument("--blocks", type=int, nargs=4, default=[1, 1, 1, 1])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--python",
        help="that of an environment which has PyTorch and Betty; by default, "
        "one is made and deleted",
    )
    add_output(parser)
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(
            [train_kmem, train_betty, resident_kmem, resident_betty],
            *arguments.run,
        )
        return
    # Threads that wait by spinning keep the other process from its step.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with environment(arguments.python, betty=SOURCE) as python:
        measure(arguments, python)


def measure(arguments, python):
    settings = {
        "blocks": arguments.blocks,
        "width": arguments.width,
        "batch": arguments.batch,
    }
    tell = [python, "-c", "import torch; print(torch.__version__)"]
    version = subprocess.check_output(tell, text=True).strip()
    write = writer(arguments.output, header(settings, arguments.steps, version))
    with tempfile.TemporaryDirectory() as folder:
        for each in (settings, DIGITS):
            save_batches(each, folder)
        for method in arguments.methods:
            for line in rows(method, settings, folder, arguments.steps, python):
                write(f"{line}\n")
        write(resident_header())
        for line in resident_rows(folder, python):
            write(f"{line}\n")


if __name__ == "__main__":
    main()
