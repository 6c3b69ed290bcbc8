"""What a training step needs by the rows of its batch.

That is a line: weights, their gradients and the optimizer whatever the rows,
and activations for each of them. It is drawn through two steps that are
rehearsed with a few rows. With fewer rows than it takes for the activations
to matter, the line is flat, and more rows are tried.
"""

import dataclasses
import math
from typing import Any

from kmem import batches
from kmem.options import MemoryOptions
from kmem.rehearsal import Rehearsal
from kmem.rehearsal import rehearse_on_batch
from kmem.session import Session

# Each probe has so many times the rows of the one before, until that makes it
# need more.
_GROWTH, _LEAST_GROWTH = 4, 1.05
_AT_MOST_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Line:
    """A step's needs: a constant, and so much for each row.

    Attributes:
        base_bytes: The peak without rows.
        row_bytes: What each row adds.
        row_seconds: The time that each row takes.
    """

    base_bytes: float
    row_bytes: float
    row_seconds: float

    def peak_bytes(self, rows: int) -> int:
        """The peak of a step with so many rows."""
        return int(self.base_bytes + rows * self.row_bytes)


def draw(model, options: MemoryOptions, batch: Any, most_bytes: int) -> Line:
    """Rehearses steps with a few rows, and draws the line through them.

    Args:
        model: A compiled model, with its variables.
        options: Those of the steps.
        batch: The whole batch, as `tf.TensorSpec`s.
        most_bytes: Steps that need more than that need not be seen.

    Returns:
        The line. Where the device has no room for a step, the line tells of
        the least that this means.
    """
    total = batches.num_rows(batch) or 1
    first = _probe(model, options, batch, 1)
    if first is None:
        return Line(most_bytes, most_bytes, math.inf)
    last, last_rows = first, 1
    while last_rows < total and last.peak_bytes < most_bytes:
        last_rows = min(total, _GROWTH * last_rows)
        found = _probe(model, options, batch, last_rows)
        if found is None:
            # It is steeper than can be seen.
            return Line(0, most_bytes, first.seconds)
        last = found
        if last.peak_bytes > _LEAST_GROWTH * first.peak_bytes:
            break
    if last is first:
        return Line(0, first.peak_bytes, first.seconds)
    slope = max(0, last.peak_bytes - first.peak_bytes) / (last_rows - 1)
    base = last.peak_bytes - slope * last_rows
    return Line(base, slope, last.seconds / last_rows)


def _probe(model, options, batch, rows: int) -> Rehearsal | None:
    session = Session(model, options)
    some = batches.with_rows(batch, rows)
    return rehearse_on_batch(session, some, _AT_MOST_SECONDS)
