"""What a training step needs by the rows of its batch.

That is a line: weights, their gradients and the optimizer whatever the rows,
and activations for each of them. With few rows it bends: the update of the
weights needs more than they do. So steps with more and more rows are
rehearsed, until that matters, and the line is drawn through the last two.
"""

import dataclasses
import math
from typing import Any

from kmem.budget.dry_run import Rehearsal
from kmem.budget.dry_runs import Rehearsals
from kmem.budget.excerpts import Excerpt
from kmem.options import MemoryOptions
from kmem.sharding import agreeing
from kmem.step import batches

# Each probe has so many times the rows of the one before, until that makes it
# need more.
_GROWTH, _LEAST_GROWTH = 4, 1.3
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


def draw(
    rehearsals: Rehearsals, options: MemoryOptions, batch: Any, most_bytes: int
) -> Line:
    """Rehearses steps with a few rows, and draws the line through them.

    Args:
        rehearsals: The model's.
        options: Those of the steps.
        batch: The whole batch, as `tf.TensorSpec`s.
        most_bytes: Steps that need more than that need not be seen.

    Returns:
        The line. Where the device has no room for a step, the line tells of
        the least that this means.
    """
    total = batches.num_rows(batch) or 1
    num_processes = agreeing.processes(options).size
    last_rows = min(total, num_processes)
    first = last = _probe(rehearsals, options, batch, last_rows)
    if first is None or last is None:
        return Line(most_bytes, most_bytes, math.inf)
    slope = first.peak_bytes / last_rows
    line = Line(0, slope, first.seconds / last_rows)
    while last_rows < total and last.peak_bytes < most_bytes:
        rows = min(total, _GROWTH * last_rows)
        is_known = last is not first
        if (
            num_processes > 1
            and is_known
            and line.peak_bytes(rows) > most_bytes
        ):
            # One that runs out of memory would end them all.
            break
        found = _probe(rehearsals, options, batch, rows)
        if found is None:
            # It is steeper than can be seen.
            return Line(0, most_bytes / last_rows, last.seconds / last_rows)
        growth = max(0, found.peak_bytes - last.peak_bytes)
        slope = growth / (rows - last_rows)
        base = found.peak_bytes - slope * rows
        line = Line(base, slope, found.seconds / rows)
        last, last_rows = found, rows
        if found.peak_bytes > _LEAST_GROWTH * first.peak_bytes:
            break
    return line


def _probe(rehearsals, options, batch, rows: int) -> Rehearsal | None:
    some = batches.with_rows(batch, rows)
    seen, _ = rehearsals.run(Excerpt(some, options), _AT_MOST_SECONDS)
    return seen
