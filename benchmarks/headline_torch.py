"""The largest batch that PyTorch trains inside a device size.

    python benchmarks/headline_torch.py --output benchmarks/headline_torch.md

The PyTorch side of `headline.py`: the same ResNet50 and transformer, relative
to PyTorch's own plain training, in an environment of its own, for neither kmem
nor its tests need PyTorch. Peaks are exact: what PyTorch's profiler says is
allocated and freed during a step, on top of what is in memory before it. What
oneDNN allocates inside of a convolution is not known to that profiler.

A row is trainings in processes of their own. For times, a process and that of
plain PyTorch take steps in turns, and the median of the ratios counts.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time

from measured_steps import Process
from measured_steps import answer
from measured_steps import run
from table import add_output
from table import made_by
from table import writer
from torch_environment import environment

DEVICE_MB = {"ResNet50": 1000, "transformer": 500}
NUM_ROWS = 16
EAGER = "eager"
CHECKPOINTED = "torch.utils.checkpoint"
SHARES = (0.75, 0.5, 0.3, 0.1)
# Backends, and their budgets of memory for activations.
COMPILED = {
    "torch.compile": ("inductor", 1.0),
    **{f"torch.compile, budget {x}": ("inductor", x) for x in SHARES},
}
# Soon compiled, to the operations that inductor would fuse.
UNFUSED = {
    f"aot_eager, budget {x}": ("aot_eager_decomp_partition", x)
    for x in (1.0, *SHARES)
}
WAYS = (EAGER, CHECKPOINTED, *COMPILED)
NUM_LOSS_STEPS = 5
MAX_TRIES = 4


def train(name, way, num_rows):
    """Trains until standard input ends; answers with each step's numbers."""
    import headline_torch_models
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(2)
    torch.manual_seed(0)
    make, batch = headline_torch_models.MODELS[name]
    model = trained = make()
    x, y = batch(int(num_rows))
    # Slow, so that rounding does not grow into another training.
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    if way == CHECKPOINTED:
        trained = headline_torch_models.Checkpointed(model)
    elif way != EAGER:
        backend, budget = (COMPILED | UNFUSED)[way]
        torch._functorch.config.activation_memory_budget = budget
        trained = torch.compile(model, backend=backend, dynamic=False)

    def step():
        loss = cross_entropy(trained(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def timed():
        start = time.perf_counter()
        loss = step()
        answer(loss=loss, seconds=time.perf_counter() - start)

    def profiled():
        momenta = (m for s in optimizer.state.values() for m in s.values())
        tensors = (x, y, *model.parameters(), *model.buffers(), *momenta)
        held_bytes = sum(t.untyped_storage().nbytes() for t in tensors)
        loss, more_bytes = allocated(step)
        answer(loss=loss, peak_bytes=held_bytes + more_bytes)

    # The first step makes the momenta and, for the most part, compiles.
    for measure in itertools.chain((timed, profiled), itertools.repeat(timed)):
        measure()
        if not sys.stdin.readline():
            return


def allocated(step):
    """What a step returns, and the most that it has allocated at a time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile

    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        result = step()
    events = profiler.profiler.kineto_results.events()
    changes = [e.nbytes() for e in events if e.name() == "[memory]"]
    if sum(changes):
        raise ValueError(
            "A step must free what it allocates, or its peak is not known. "
            f"Received: {sum(changes)} bytes left"
        )
    return result, max(itertools.accumulate(changes, initial=0))


class Training(Process):
    """A training of a number of rows, whose first steps tell its peak."""

    def __init__(self, name, way, num_rows):
        super().__init__(train, name, way, str(num_rows))
        self.num_rows = num_rows
        self.ask()
        self.peak_bytes = self.ask().get("peak_bytes")

    def ask(self):
        result = super().ask()
        if "error" in result:
            raise RuntimeError(result["error"])
        return result


def rows(name, ways, device_bytes, num_steps):
    """Gives the lines of the table for a model."""
    with Training(name, EAGER, NUM_ROWS // 2) as half:
        half_bytes = half.peak_bytes
    with Training(name, EAGER, NUM_ROWS) as plain:
        # What does not grow with the batch: where each search begins.
        fixed_bytes = 2 * half_bytes - plain.peak_bytes
        with largest(name, EAGER, plain, fixed_bytes, device_bytes) as most:
            for way in ways:
                cells = beside(
                    name, way, plain, most, fixed_bytes, device_bytes, num_steps
                )
                yield f"| {name} | {way} | {cells} |"


def beside(name, way, plain, most, fixed_bytes, device_bytes, num_steps):
    """The cells of a way, in turns with plain training."""
    try:
        with Training(name, way, NUM_ROWS) as same:
            ratio = time_ratio(same, plain, num_steps)
            relative = same.peak_bytes / plain.peak_bytes
            cells = (
                f"{same.peak_bytes / 1e6:.1f} | {relative:.2f} | {ratio:.2f} | "
                f"{loss_difference(name, way, same, plain)}"
            )
        with largest(name, way, same, fixed_bytes, device_bytes) as more:
            ratio = time_ratio(more, most, num_steps)
            ratio *= most.num_rows / more.num_rows
            return (
                f"{cells} | {more.num_rows} | {more.peak_bytes / 1e6:.1f} | "
                f"{more.num_rows / most.num_rows:.2f} | {ratio:.2f}"
            )
    except RuntimeError as error:
        return f"{error} | | | | | | |"


def largest(name, way, first, fixed_bytes, device_bytes):
    """A training of about as many rows as fit into the device.

    Rows are tried where the line through the last two peaks meets the size,
    until they fit and another try would add few.
    """
    peaks = {0: fixed_bytes, first.num_rows: first.peak_bytes}
    num_rows = meeting(peaks, device_bytes)
    for _ in range(MAX_TRIES):
        training = Training(name, way, num_rows)
        peaks[num_rows] = training.peak_bytes
        next_rows = meeting(peaks, device_bytes)
        fits = training.peak_bytes <= device_bytes
        if fits and next_rows <= 1.03 * num_rows:
            return training
        training.__exit__()
        num_rows = next_rows
    raise RuntimeError(f"no largest batch, after peaks of {peaks}")


def meeting(peaks, peak_bytes):
    """The rows at which the line through the last two peaks has a peak."""
    first, second = list(peaks.items())[-2:]
    (first_rows, first_bytes), (second_rows, second_bytes) = first, second
    row_bytes = (second_bytes - first_bytes) / (second_rows - first_rows)
    return int(second_rows + (peak_bytes - second_bytes) // row_bytes)


def time_ratio(training, plain, num_steps):
    """Of the seconds of a step, after one of each that does not count."""
    if not num_steps:
        return float("nan")
    turns = [(training.ask(), plain.ask()) for _ in range(num_steps + 1)]
    return statistics.median(a["seconds"] / b["seconds"] for a, b in turns[1:])


def loss_difference(name, way, training, plain):
    is_known = len(training.answers) > NUM_LOSS_STEPS
    draws_others = name == "transformer" and way not in (EAGER, CHECKPOINTED)
    if draws_others or not is_known:
        return "-"
    pairs = zip(training.answers, plain.answers, strict=False)
    differences = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    return f"{max(differences[: NUM_LOSS_STEPS + 1]):.1e}"


def header(device_mb, num_steps):
    sizes = ", ".join(f"{size} MB for {name}" for name, size in device_mb)
    return (
        "# The largest batch of PyTorch\n\n"
        f"{made_by(__file__, ('torch',))}\n\n"
        "SGD with momentum, 2 threads. `torch.compile` is by inductor; "
        "`aot_eager` is its backend `aot_eager_decomp_partition`, which "
        "fuses nothing; a budget is `activation_memory_budget`. Peak: the "
        f"most that is in memory during a step of {NUM_ROWS} rows "
        "(parameters, momenta, batch, activations, gradients and workspace) "
        "by PyTorch's profiler, and relative to plain eager PyTorch. Time: a "
        "step's, relative to plain eager PyTorch, whose process takes a step "
        "after each one; the median "
        f"of {num_steps}, on a machine that does other work meanwhile. Loss: "
        f"the largest difference from plain in {NUM_LOSS_STEPS} steps, where "
        "dropout draws the same numbers. Largest: the rows that train inside "
        f"a device of a size ({sizes}), the peak at that size as it was "
        "measured, how many times plain's rows that is, and the time of a row "
        "relative to plain at its own largest.\n\n"
        "| model | way | peak, MB | of plain | time | loss | largest | "
        "peak, MB | times plain's | time of a row |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=list(DEVICE_MB), choices=DEVICE_MB
    )
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=(*WAYS, *UNFUSED)
    )
    parser.add_argument(
        "--device-mb", type=float, help="1000 for ResNet50, else 500"
    )
    parser.add_argument("--steps", type=int, default=7, help="0: no times")
    parser.add_argument(
        "--python",
        help="that of an environment which has PyTorch; by default, one is "
        "made and deleted",
    )
    add_output(parser)
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run([train], *arguments.run)
    elif arguments.run is not None:
        measure(arguments)
    else:
        with environment(arguments.python) as python:
            start(python)


def start(python):
    """Runs this script in an environment that has PyTorch."""
    # Threads that wait by spinning keep the other process from its step.
    variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(
        [python, __file__, *sys.argv[1:], "--run"], env=variables, check=True
    )


def measure(arguments):
    device_mb = {
        name: arguments.device_mb or DEVICE_MB[name]
        for name in arguments.models
    }
    write = writer(arguments.output, header(device_mb.items(), arguments.steps))
    for name, size in device_mb.items():
        for line in rows(name, arguments.ways, 1e6 * size, arguments.steps):
            write(f"{line}\n")


if __name__ == "__main__":
    main()
