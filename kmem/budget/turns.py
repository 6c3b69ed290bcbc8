"""Compares two ways to take a step, which take turns.

What else a machine does may slow a step down by a tenth for minutes, and so
decide between two ways that were measured one after the other. In turns both
are slowed down.
"""

import contextlib
import statistics
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kmem.budget.dry_run import installed
from kmem.budget.dry_run import timed
from kmem.budget.dry_run import unchanged
from kmem.fit.session import Session
from kmem.step import batches

# Of long steps fewer turns are taken, but three.
_NUM_TURNS, _LEAST_TURNS = 7, 3
_AT_MOST_SECONDS = 10.0


def compare(sessions: Sequence[Session], some: Sequence[Any]) -> float | None:
    """How many times as long a session's step takes as another one's.

    Everything that the steps change is given back.

    Args:
        sessions: Two sessions of one model.
        some: The batch of each, as `tf.TensorSpec`s.

    Returns:
        The median of some turns, or `None` if they ran out of memory.
    """
    data = [batches.made_up(batch) for batch in some]
    turns: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        for session in sessions:
            session.build()
            stack.enter_context(unchanged(session))
        try:
            # The first turn traces.
            while len(turns) <= _NUM_TURNS:
                seconds = [0.0, 0.0]
                # A step is slower behind one that has given much memory back.
                for which in (0, 1) if len(turns) % 2 else (1, 0):
                    seconds[which] = _turn(sessions[which], data[which])
                turns.append((seconds[0], seconds[1]))
                is_long = sum(map(sum, turns[1:])) > _AT_MOST_SECONDS
                if is_long and len(turns) > _LEAST_TURNS:
                    break
        except tf.errors.ResourceExhaustedError:
            return None
    return statistics.median(one / other for one, other in turns[1:])


def _turn(session: Session, data: Any) -> float:
    with installed(session):
        return timed(session.on_batch(), data)
