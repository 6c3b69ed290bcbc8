"""`kmem demo`: a model that does not fit, and the argument that makes it fit.

A ConvNet learns handwritten digits on a CPU that is limited to the memory of a
small device. Plain Keras runs out of it; the same `fit` under a memory option
does not, and ends with the loss that plain Keras reaches without the limit.
The model is smooth (SiLU, average pooling), so that rounding does not grow
from step to step, and has no batch normalization, whose statistics would be
those of a part.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import math
import os
import pathlib
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any

from kmem.base import native
from kmem.commands import arguments

if TYPE_CHECKING:
    import keras
    import numpy as np

LIMIT_BYTES = 100_000_000
NUM_ROWS = 1792
BATCH_SIZE = 256
EPOCHS = 3
STEPS_PER_EPOCH = NUM_ROWS // BATCH_SIZE
# What float32 sums in another order may change the loss, after all steps.
TOLERANCE = 1e-5


# Compared by identity: the runs below are keys.
@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """One training of the same model on the same data: a row of the table.

    Attributes:
        label: What the table calls it.
        options: The memory options of `fit`.
        num_batches: The number of batches that make one update.
        limited: Whether the device has the limit.
        rounds: Whether the options change the numbers by their nature.
    """

    label: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_batches: int = 1
    limited: bool = True
    rounds: bool = False


UNLIMITED = Run("Keras, no limit", limited=False)
PLAIN = Run("Keras")
PARTS = Run("kmem, microbatches=8", {"microbatches": 8})
GROUPS = Run(
    "kmem, gradient_accumulation_steps=8",
    {"gradient_accumulation_steps": 8},
    num_batches=8,
)
ROUNDED = Run(
    "kmem, microbatches=8, bfloat16 *",
    {"microbatches": 8, "mixed_precision": "bfloat16"},
    rounds=True,
)


@dataclasses.dataclass
class Result:
    """What came of a run.

    Attributes:
        loss: That of the last epoch.
        error: What TensorFlow said if memory ran out.
        peak_bytes: The most bytes that were in use.
        samples: `(time, bytes)`, the peak of every millisecond or two.
        updates: The time of every update.
    """

    loss: float = math.nan
    error: str = ""
    peak_bytes: int = 0
    samples: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    updates: list[float] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The fastest update, past the first epoch with its tracing."""
        updates = itertools.pairwise(self.updates[STEPS_PER_EPOCH:])
        return min(after - before for before, after in updates)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: kmem demo --output memory.png"
    parser.add_argument(
        "--output",
        type=arguments.picture_file,
        default=pathlib.Path("memory.png"),
        metavar="PATH",
        help="where to draw the memory of the first steps "
        "(default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demonstration; 0 if everything went as it should."""
    _require("sklearn", "matplotlib")
    # Before the first TensorFlow operation, and compiled first if need be.
    native.allocator()
    data = _digits()
    limit = f"{LIMIT_BYTES / 1e6:.0f}"
    print(
        f"A ConvNet on {NUM_ROWS} handwritten digits, {BATCH_SIZE} for an "
        f"update, on a CPU limited to {limit} MB:\n\n"
        f"{'run':<36} {'limit MB':>8} {'peak MB':>13} {'loss':>9} {'time':>5}"
    )
    results: dict[Run, Result] = {}
    runs = [UNLIMITED, PLAIN, PARTS, GROUPS]
    if _computes_bfloat16():
        runs.append(ROUNDED)
    for item in runs:
        result = results[item] = _train(item, *data)
        print(
            f"{item.label:<36} {limit if item.limited else '-':>8}",
            _numbers(result, results[UNLIMITED]),
            flush=True,
        )
    problems = _problems(results)
    for line in problems or _notes(results):
        print(line, file=sys.stderr if problems else sys.stdout)
    _draw(results, args.output)
    print(f"Memory during the first steps: {args.output}")
    return 1 if problems else 0


def _require(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        names = " and ".join(missing).replace("sklearn", "scikit-learn")
        raise ImportError(f'it needs {names}: pip install "kmem[demo]"')


def _computes_bfloat16() -> bool:
    """Whether the CPU has instructions for it; without, it may be slow."""
    try:
        flags = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _digits() -> "tuple[np.ndarray, np.ndarray]":
    from sklearn.datasets import load_digits

    data: Any = load_digits(return_X_y=True)
    images, labels = data
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return images[:NUM_ROWS], labels[:NUM_ROWS]


def _model() -> "keras.Model":
    import keras

    def block(x, num_filters):
        x = keras.layers.Conv2D(num_filters, 3, padding="same")(x)
        x = keras.layers.GroupNormalization(4)(x)
        return keras.layers.Activation("silu")(x)

    inputs = keras.Input((8, 8, 1))
    x = keras.layers.UpSampling2D(4, interpolation="bilinear")(inputs)
    x = block(block(x, 16), 16)
    x = keras.layers.AveragePooling2D(2)(x)
    x = block(block(x, 32), 32)
    x = keras.layers.AveragePooling2D(4)(x)
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _train(item: Run, x: "np.ndarray", y: "np.ndarray") -> Result:
    """Trains from the same weights, on the same digits in the same order."""
    import keras
    import tensorflow as tf

    from kmem.model import wrap

    # What the run before has left would count as this one's.
    keras.backend.clear_session()
    gc.collect()
    keras.utils.set_random_seed(0)
    model = _model()
    if item.options:
        model = wrap(model)
    result = Result()

    def note_update(batch, logs):
        if (batch + 1) % item.num_batches == 0:
            result.updates.append(time.perf_counter())

    clock = keras.callbacks.LambdaCallback(on_train_batch_end=note_update)
    with _limited(item), _sampling(result), _quiet(item is PLAIN):
        try:
            history = model.fit(
                x,
                y,
                batch_size=BATCH_SIZE // item.num_batches,
                epochs=EPOCHS,
                shuffle=False,
                # Keras declares a string, and documents integers.
                verbose=0,  # pyright: ignore[reportArgumentType]
                callbacks=[clock],
                **item.options,
            )
            result.loss = history.history["loss"][-1]
        except tf.errors.ResourceExhaustedError as error:
            # Of the many lines, the one that tells.
            lines = error.message.splitlines()
            lines = [line for line in lines if line.startswith("OOM")] or lines
            result.error = lines[0]
    return result


@contextlib.contextmanager
def _limited(item: Run) -> Iterator[None]:
    from kmem import memory

    if item.limited:
        memory.limit(LIMIT_BYTES, device="CPU")
    try:
        yield
    finally:
        memory.limit(None, device="CPU")


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Keeps TensorFlow's warnings of an error that is meant to the error."""
    if not quiet:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@contextlib.contextmanager
def _sampling(result: Result) -> Iterator[None]:
    from kmem import memory

    done = threading.Event()

    def sample():
        while not done.is_set():
            with memory.track("CPU") as usage:
                time.sleep(0.001)
            result.samples.append((time.perf_counter(), usage.peak_bytes))

    thread = threading.Thread(target=sample, daemon=True)
    with memory.track("CPU") as usage:
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            result.peak_bytes = usage.peak_bytes


def _numbers(result: Result, reference: Result) -> str:
    if result.error:
        return f"{'out of memory':>13} {'-':>9} {'-':>5}"
    relative = result.seconds / reference.seconds
    peak = result.peak_bytes / 1e6
    return f"{peak:>13.1f} {result.loss:>9.6f} {relative:>5.1f}"


def _difference(result: Result, reference: Result) -> float:
    return abs(result.loss / reference.loss - 1)


def _problems(results: dict[Run, Result]) -> list[str]:
    """What is not as it should be; empty if the story holds."""
    found = []
    if not results[PLAIN].error:
        found.append("plain Keras fits within the limit, and should not.")
    for item, result in results.items():
        if not item.options:
            continue
        difference = _difference(result, results[UNLIMITED])
        if result.error or result.peak_bytes > LIMIT_BYTES:
            found.append(f"{item.label}: does not fit within the limit.")
        elif not (item.rounds or difference <= TOLERANCE):
            found.append(f"{item.label}: the loss is off by {difference:.1e}.")
    return [f"kmem demo: {line}" for line in found]


def _notes(results: dict[Run, Result]) -> list[str]:
    reference = results[UNLIMITED]
    exact = max(
        _difference(result, reference)
        for item, result in results.items()
        if item.options and not item.rounds
    )
    error = f"Keras ends in ResourceExhaustedError: {results[PLAIN].error}"
    lines = [
        "",
        *textwrap.wrap(error, 78, break_on_hyphens=False),
        "",
        f"kmem's loss is Keras's: they differ by {exact:.1e} of it, at most.",
    ]
    if ROUNDED in results:
        changed = _difference(results[ROUNDED], reference)
        lines.append(f"* rounds to 16 bits: differs by {changed:.1e}.")
    lines.append("time: the fastest update's, relative to the first row.")
    return lines


def _draw(results: dict[Run, Result], path: pathlib.Path) -> None:
    """Draws the memory in use during the first steps, against the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reference = results[UNLIMITED]
    start = _first_steps(reference)[0][0]
    window = reference.updates[1] - start
    figure, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    for item, color, label in (
        (UNLIMITED, "#9aa0a6", "Keras, on a larger device"),
        (PLAIN, "#c5221f", "Keras: ResourceExhaustedError"),
        (PARTS, "#1a73e8", "kmem: microbatches=8"),
    ):
        times, megabytes = _first_steps(results[item])
        seconds = times - times[0]
        if item is PLAIN:
            axes.plot(seconds, megabytes, color=color, linewidth=2)
            last = (seconds[-1:], megabytes[-1:])
            axes.plot(*last, "X", color=color, markersize=11, label=label)
        else:
            axes.fill_between(seconds, megabytes, color=color, alpha=0.15)
            axes.plot(seconds, megabytes, color=color, label=label)
    limit = LIMIT_BYTES / 1e6
    axes.axhline(limit, color="black", linestyle="--", linewidth=1)
    beside = axes.get_yaxis_transform()
    axes.text(
        1.01, limit, f"limit:\n{limit:.0f} MB", va="center", transform=beside
    )
    axes.set_xlim(0, window)
    axes.set_ylim(0, 1.2 * reference.peak_bytes / 1e6)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("memory in use, MB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", ncols=3, frameon=False)
    times_less = reference.peak_bytes / results[PARTS].peak_bytes
    axes.set_title(
        f"The same model, batch and loss in {times_less:.1f} times less memory",
        loc="left",
        fontweight="bold",
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _first_steps(result: Result) -> "tuple[np.ndarray, np.ndarray]":
    """Times and MB, from when the first step begins to compute."""
    import numpy as np

    times, num_bytes = np.array(result.samples).T
    begin = np.argmax(num_bytes > num_bytes[0] + 0.02 * LIMIT_BYTES)
    end = len(times)
    if result.error:
        # What an error leaves is freed, which is no part of the step.
        end -= np.argmax(num_bytes[::-1] == num_bytes.max())
    return times[begin:end], num_bytes[begin:end] / 1e6
