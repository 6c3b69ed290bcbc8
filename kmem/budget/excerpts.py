"""Two parts of a batch, which tell what a step in many parts takes.

Parts run one after another, in one loop: from the second on each needs what
the one before did. What grows with their number is the batch, and the time.
"""

import dataclasses
from typing import Any

from kmem.options import MemoryOptions
from kmem.options import MicroBatches
from kmem.planning.plan import Plan
from kmem.step import batches

_NUM_PARTS = 2


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """A step in a part or two, in place of one in many.

    Attributes:
        batch: What it gets, as `tf.TensorSpec`s.
        options: Its options.
        plan: What it follows, if it follows one.
        left_bytes: The rest of the batch.
        times: How many times as long the whole step takes.
    """

    batch: Any
    options: MemoryOptions
    plan: Plan | None = None
    left_bytes: int = 0
    times: float = 1.0


def excerpt(
    batch: Any, options: MemoryOptions, plan: Plan | None = None
) -> Excerpt:
    """The first parts of a step.

    Args:
        batch: The whole batch, as `tf.TensorSpec`s.
        options: Those of the step.
        plan: What the step follows, if it follows one.
    """
    rows = batches.num_rows(batch)
    count = options.num_parts
    if rows is None or count <= _NUM_PARTS:
        return Excerpt(batch, options, plan)
    some_rows = min(rows, _NUM_PARTS * -(-rows // count))
    some = batches.with_rows(batch, some_rows)
    return Excerpt(
        some,
        dataclasses.replace(options, microbatches=MicroBatches(_NUM_PARTS)),
        plan,
        batches.num_bytes(batch) - batches.num_bytes(some),
        rows / some_rows,
    )
