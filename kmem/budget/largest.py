"""The largest batch that trains in a memory, found by a few dry runs.

A step is traced once for batches of any size. What it needs is nearly a line
in the number of examples: a line through the last two runs predicts the next
size, and a dry run says whether it stays within the memory. What this does not
do: options whose choice depends on the batch (`remat`, `dtr`,
`memory_budget`), and processes that train together.
"""

import dataclasses
import gc
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import Unpack

from kmem import memory as device_memory
from kmem.base import checks
from kmem.base import drawing
from kmem.base.sizes import format_size
from kmem.base.sizes import parse_size
from kmem.budget import dry_run
from kmem.budget.inference_steps import InferenceSteps
from kmem.fit.session import Session
from kmem.keras_graph.profiling import check_built
from kmem.options import MemoryArguments
from kmem.options import MemoryOptions
from kmem.sharding.engine import Engine
from kmem.step import batches

# At most so many dry runs; the batch is right to so much of its size.
_MAX_RUNS = 10
_PRECISION = 0.02
_ALLOWED = ("microbatches", "mixed_precision")


@dataclasses.dataclass(frozen=True)
class LargestBatch(drawing.Shown):
    """The largest batch that trains in a given memory.

    Attributes:
        batch_size: Its number of examples; 0 if the smallest does not fit.
        seconds_per_example: The time of a step with it, per example.
        peak_bytes: What a step with it needs, with the next batch ready.
        memory_bytes: The memory, in bytes.
        num_runs: The number of dry runs that it took.
    """

    batch_size: int
    seconds_per_example: float
    peak_bytes: int
    memory_bytes: int
    num_runs: int

    def summary(self) -> str:
        """One line."""
        if not self.batch_size:
            return f"no batch trains in {format_size(self.memory_bytes)}"
        return (
            f"{self.batch_size} examples in {format_size(self.memory_bytes)} "
            f"(peak {format_size(self.peak_bytes)}, "
            f"{self.seconds_per_example * 1e3:.3g} ms an example, "
            f"{self.num_runs} dry runs)"
        )


def largest_batch(
    model: keras.Model,
    data: Any,
    memory: int | str | None = None,
    multiple_of: int = 8,
    **options: Unpack[MemoryArguments],
) -> LargestBatch:
    """Finds the largest batch with which a model trains in a given memory.

    It makes at most ten dry runs on random data. The model and its state stay
    as they are, except that the optimizer gets its variables.

    Args:
        model: A built and compiled `keras.Model`.
        data: A batch of any size, as `train_step` gets it: `x`, `(x, y)` or
            `(x, y, sample_weight)`, of arrays, tensors or `tf.TensorSpec`s.
        memory: What the device may have in use, with everything in it: bytes,
            or a size such as `"8GB"`. Defaults to its limit, or all of it.
        multiple_of: The batch size is a multiple of this.
        **options: Of `fit`: `microbatches`, `mixed_precision`.

    Returns:
        A `LargestBatch`. Where a step's order is fixed, as with micro-batches,
        a batch that is 5 % larger (or by `multiple_of`) does not train, or
        does not validate. Threads vary the peak of plain steps: leave room.

    Raises:
        ValueError: If the model is not built or compiled, or an argument is
            not of one of its forms.
        RuntimeError: If bytes cannot be counted, see `kmem.memory`.

    Example:

    ```python
    import keras
    import tensorflow as tf

    import kmem

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile("sgd", "mse")
    spec = tf.TensorSpec((1, 64))
    print(kmem.largest_batch(model, (spec, spec), memory="50MB").summary())
    ```
    """
    others = sorted(options.keys() - set(_ALLOWED))
    if others:
        raise ValueError(
            f"`largest_batch` must be given no options but {_ALLOWED}. "
            f"Received: {', '.join(others)}"
        )
    checks.positive_int(multiple_of, "multiple_of")
    check_built(model)
    if not device_memory.is_counted():
        raise RuntimeError(
            "`largest_batch` must count the bytes of dry runs, which needs "
            "kmem's allocator: import kmem before the first TensorFlow "
            "operation."
        )
    room = device_memory.capacity()
    if memory is not None:
        room = parse_size(memory, "memory")
    steps = _Steps(model, data, MemoryOptions(**options))
    return _search(steps, room, multiple_of)


class _Steps:
    """Takes steps with batches of any size, and leaves no trace."""

    def __init__(self, model: keras.Model, data: Any, options: MemoryOptions):
        self._batch = batches.specs_of(data, examples=True)
        # Without an option plain Keras trains, in any order.
        ordered = options != MemoryOptions()
        self._session = Session(model, options, ordered=ordered)
        specs = batches.with_rows(self._batch, None)
        self._step = self._session.on_batch(specs)
        self._inference = InferenceSteps(model, {"test": model.test_step})
        self.num_runs = 0

    def measure(self, rows: int) -> dry_run.Measurement | None:
        """What a step needs, with the batch that comes next."""
        specs = batches.with_rows(self._batch, rows)
        is_traced = self.num_runs > 0
        self.num_runs += 1
        measured = usage = None
        try:
            with self._session.changes.undone(specs):
                data = batches.random_data(specs)
                with dry_run.installed(self._session):
                    measured = dry_run.measured(
                        *(lambda: self._step(data), Engine()),
                        is_traced=is_traced,
                    )
                # Validation sees the whole batch at once.
                with device_memory.track() as usage:
                    _, message = self._inference.take("test", data, 1)
                measured = None if message else measured
        except tf.errors.ResourceExhaustedError:
            measured = None
        gc.collect()
        if measured is None or usage is None:
            return None
        # An input pipeline holds the batch that comes next.
        ahead = batches.num_bytes(specs)
        peak = max(measured.peak_bytes, usage.peak_bytes) + ahead
        return dataclasses.replace(measured, peak_bytes=peak)


def _search(steps: _Steps, room: int, multiple_of: int) -> LargestBatch:
    """Goes from one size to the next until the bracket is small."""
    fits: dict[int, dry_run.Measurement] = {}
    # What was run, by size, and the smallest size that does not fit.
    peaks: dict[int, int] = {}
    too_large: int | None = None
    best, size = 0, multiple_of
    while size and steps.num_runs < _MAX_RUNS:
        measured = steps.measure(size)
        if measured is not None:
            peaks[size] = measured.peak_bytes
        if measured is not None and measured.peak_bytes <= room:
            fits[size] = measured
        else:
            too_large = size if too_large is None else min(size, too_large)
        best = max(fits, default=0)
        size = _next(peaks, best, too_large, room, multiple_of)
    if not best:
        return LargestBatch(0, 0.0, 0, room, steps.num_runs)
    own = fits[best]
    return LargestBatch(
        best, own.seconds / best, own.peak_bytes, room, steps.num_runs
    )


def _next(peaks, best: int, too_large: int | None, room: int, multiple_of: int):
    """The next size to run, or `None` if the best is near enough."""
    if not best:
        return None
    near = max(multiple_of, int(_PRECISION * best))
    if too_large is not None and too_large - best <= near:
        return None
    if len(peaks) < 2:
        # Far enough away for a line.
        size = 4 * best
    else:
        low, high = sorted(peaks)[-2:]
        if high > best and low < best:
            low, high = best, high
        more = max((peaks[high] - peaks[low]) / (high - low), 1e-9)
        size = int(high + (room - peaks[high]) / more)
        # With few examples the line bends.
        size = min(size, 16 * best)
    size = size // multiple_of * multiple_of
    if size <= best:
        # The best was predicted: is a slightly larger one too large?
        size = best + max(multiple_of, near // multiple_of * multiple_of)
    if too_large is not None and size >= too_large:
        size = (best + too_large) // 2 // multiple_of * multiple_of
        size = max(size, best + multiple_of)
    return size
