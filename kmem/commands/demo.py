"""`kmem demo`: a model that does not fit, and the argument that makes it fit.

A ConvNet learns handwritten digits on a CPU that is limited to the memory of a
small device. Plain Keras runs out of it; the same `fit` under a memory option
does not, and ends with the loss that plain Keras reaches without the limit.
The model is smooth (SiLU, average pooling), so that rounding does not grow
from step to step, and has no batch normalization, which sees micro-batches.
"""

import argparse
import dataclasses
import gc
import itertools
import math
import os
import pathlib
import sys
import textwrap
import time
from typing import Any

from kmem.base import checks
from kmem.base import drawing
from kmem.base import native
from kmem.commands import arguments

LIMIT_BYTES = 72_000_000
# What the options are given: the device holds more than the step.
STEP_BYTES = 64_000_000
NUM_EXAMPLES = 896
BATCH_SIZE = 128
EPOCHS = 2
STEPS_PER_EPOCH = NUM_EXAMPLES // BATCH_SIZE
# What float32 sums in another order may change the loss, after all steps.
TOLERANCE = 1e-5


UNLIMITED, PLAIN = "Keras, no limit", "Keras"
BUDGET, PLANNED = 'memory_budget="64MB"', 'remat="64MB"'
EVICTING, MICRO = 'dtr="64MB"', "microbatches=8"
# Each run of the same model on the same data, with its memory options.
RUNS: dict[str, dict[str, Any]] = {
    UNLIMITED: {},
    PLAIN: {},
    BUDGET: {"memory_budget": STEP_BYTES},
    PLANNED: {"remat": STEP_BYTES},
    EVICTING: {"dtr": STEP_BYTES},
    MICRO: {"microbatches": 8},
}


@dataclasses.dataclass
class Result:
    """What came of a run.

    Attributes:
        loss: That of the last epoch.
        error: What TensorFlow said if memory ran out.
        chosen: What `memory_budget` chose, in a few words.
        peak_bytes: The most bytes that were in use in the last epoch, past
            the tracing and the dry runs of a search.
        updates: The time of every update.
    """

    loss: float = math.nan
    error: str = ""
    chosen: str = ""
    peak_bytes: int = 0
    updates: list[float] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The fastest update, past the first epoch with its tracing."""
        updates = itertools.pairwise(self.updates[STEPS_PER_EPOCH:])
        return min(after - before for before, after in updates)


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.epilog = "Example: kmem demo --output memory.png"
    parser.add_argument(
        "--output",
        type=arguments.file_ending(*arguments.PICTURES),
        default=pathlib.Path("memory.png"),
        metavar="PATH",
        help="where to draw the peak of each run (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demonstration; 0 if everything went as it should."""
    checks.require("it", "demo", "sklearn", "matplotlib")
    # Not warned of: that memory runs out is meant.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Before the first TensorFlow operation, and compiled first if need be.
    native.allocator()
    import tensorflow as tf
    from sklearn.datasets import load_digits

    tf.config.set_visible_devices([], "GPU")
    digits: Any = load_digits()
    images = digits.images[:NUM_EXAMPLES, ..., None].astype("float32") / 16
    data = images, digits.target[:NUM_EXAMPLES]
    print(
        f"A ConvNet on {NUM_EXAMPLES} handwritten digits in batches of "
        f"{BATCH_SIZE}, on a CPU that is limited to {_megabytes(LIMIT_BYTES)}:"
        f"\n\n{'run':<26} {'peak':>13} {'time':>6} {'loss':>9} {'changed':>8}"
    )
    results: dict[str, Result] = {}
    for label in RUNS:
        result = results[label] = _train(label, *data)
        columns = _columns(result, results[UNLIMITED])
        print(f"{label:<26}", columns, flush=True)
    problems = _problems(results)
    for line in problems or _notes(results):
        print(line, file=sys.stderr if problems else sys.stdout)
    _draw(results, args.output)
    print(f"The peak of each run is drawn in {args.output}")
    return 1 if problems else 0


def _model() -> Any:
    import keras

    def block(x, num_filters):
        x = keras.layers.Conv2D(
            num_filters, 3, padding="same", kernel_initializer="he_normal"
        )(x)
        return keras.layers.Activation("silu")(x)

    inputs = keras.Input((8, 8, 1))
    x = keras.layers.UpSampling2D(4, interpolation="bilinear")(inputs)
    for _ in range(4):
        x = block(x, 16)
    x = keras.layers.AveragePooling2D(2)(x)
    x = block(block(x, 32), 32)
    x = keras.layers.AveragePooling2D(4)(x)
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.003),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _train(label: str, x: Any, y: Any) -> Result:
    """Trains from the same weights, on the same digits in the same order."""
    import keras
    import tensorflow as tf

    from kmem import callbacks
    from kmem import memory
    from kmem.budget.report import describe
    from kmem.model import wrap

    # What the run before has left would count as this one's.
    keras.backend.clear_session()
    gc.collect()
    keras.utils.set_random_seed(0)
    model = _model()
    if RUNS[label]:
        model = wrap(model)
    result = Result()

    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: result.updates.append(
            time.perf_counter()
        )
    )
    try:
        limit = None if label == UNLIMITED else LIMIT_BYTES
        memory.limit(limit, device="CPU")
        history = model.fit(
            x,
            y,
            batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[callbacks.MemoryMonitor("CPU"), clock],
            **RUNS[label],
        ).history
        result.loss = history["loss"][-1]
        result.peak_bytes = int(1e6 * history["memory_peak_mb"][-1])
        if label == BUDGET:
            report: Any = model.memory_report
            result.chosen = describe(report.chosen.options)
    except tf.errors.ResourceExhaustedError as error:
        # Of the many lines, the one that tells.
        lines = error.message.splitlines()
        lines = [line for line in lines if line.startswith("OOM")] or lines
        result.error = lines[0]
    finally:
        memory.limit(None, device="CPU")
    return result


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _columns(result: Result, reference: Result) -> str:
    if result.error:
        return f"{'out of memory':>13} {'-':>6} {'-':>9} {'-':>8}"
    changed = _difference(result, reference)
    return (
        f"{_megabytes(result.peak_bytes):>13} "
        f"{result.seconds / reference.seconds:>5.1f}x {result.loss:>9.6f} "
        f"{f'{changed:.0e}' if changed else '-':>8}"
    )


def _difference(result: Result, reference: Result) -> float:
    return abs(result.loss / reference.loss - 1)


def _problems(results: dict[str, Result]) -> list[str]:
    """What is not as it should be; empty if the story holds."""
    found = []
    if not results[PLAIN].error:
        found.append("plain Keras fits within the limit, and should not.")
    for label, result in results.items():
        if not RUNS[label]:
            continue
        difference = _difference(result, results[UNLIMITED])
        if result.error or result.peak_bytes > LIMIT_BYTES:
            found.append(f"{label}: does not fit within the limit.")
        elif not difference <= TOLERANCE:
            found.append(f"{label}: the loss is off by {difference:.1e}.")
    return [f"kmem demo: {line}" for line in found]


def _notes(results: dict[str, Result]) -> list[str]:
    error = f"Keras ends in ResourceExhaustedError: {results[PLAIN].error}"
    return [
        "",
        *textwrap.wrap(error, 78, break_on_hyphens=False),
        "",
        f"memory_budget chose {results[BUDGET].chosen}.",
        "peak: of the last epoch. time: of the fastest update, relative to the "
        "first row.",
        "changed: by which share the last loss differs from Keras's; sums in "
        f"another\norder change less than {TOLERANCE:.0e} of it.",
    ]


def _draw(results: dict[str, Result], path: pathlib.Path) -> None:
    """Draws the peak of each run against the limit, with what it took in words
    beside it, so that the picture can be read without its colours."""
    figure = drawing.new_figure("the demonstration")
    axes = figure.subplots()
    reference = results[UNLIMITED]
    for place, (label, result) in enumerate(results.items()):
        # Where memory runs out, all that there is was in use.
        peak_bytes = LIMIT_BYTES if result.error else result.peak_bytes
        color = drawing.BLUE if RUNS[label] else drawing.GREY
        axes.barh(place, peak_bytes / 1e6, color=color, alpha=0.4)
        words = _megabytes(peak_bytes)
        if result.error:
            axes.plot(peak_bytes / 1e6, place, "X", color=drawing.RED)
            words = "out of memory"
        elif RUNS[label]:
            slowdown = result.seconds / reference.seconds
            words += f", {slowdown:.1f}x the time, the same numbers"
        axes.text(1, place, words, va="center")
    axes.axvline(LIMIT_BYTES / 1e6, color="black", ls="--", linewidth=1)
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set_xlabel("peak of an epoch, MB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "The same model and batch, on a device of "
        f"{_megabytes(LIMIT_BYTES)} (dashed)",
        fontweight="bold",
    )
    figure.savefig(path, dpi=150)
