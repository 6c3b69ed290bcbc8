"""The smallest threshold that a training step gets through with, measured.

The step runs at a threshold that is raised where nothing is left to evict,
by what is asked for there. It is tried again from where that ends, as what is
evicted depends on it, until it does not have to be raised. That is often far
more than is needed, as what was evicted before has been kept until then: the
distance to what failed is halved by further steps.

It is not proved to be the smallest: a heuristic decides what is there when
room runs out. The times of operators have a say in that, so a margin is added.
"""

import gc
from collections.abc import Callable

import tensorflow as tf

from kmem import memory
from kmem.dtr.device import DeviceSession

_MOST_RAISED = 5
_MARGIN = 0.02


def with_least_threshold(
    session: DeviceSession, message: str, step: Callable[[int], None]
) -> Exception:
    """The error of a step that has failed, with a threshold that would do.

    Args:
        session: Where the step ran.
        message: The error's.
        step: Runs the step from a threshold in bytes, which may be raised;
            see `DeviceSession.scope`.
    """
    gc.collect()  # What the error's frames held.
    least = _least_threshold(session, step)
    if least is not None:
        message = (
            f"The threshold must be at least {round(least * (1 + _MARGIN))} "
            f"bytes for this step, which was tried with {least}. {message}"
        )
    return tf.errors.ResourceExhaustedError(None, None, message)


def _least_threshold(session: DeviceSession, step) -> int | None:
    fails = max(session.limit_bytes, memory.current())
    works = fails
    for _ in range(_MOST_RAISED):
        ended = _end_of(session, step, works)
        if ended is None:
            return None  # The device itself has no room, or it thrashes.
        if ended <= works:
            break
        works = ended
    else:
        return None
    while works - fails > _MARGIN * works:
        middle = (fails + works) // 2
        ended = _end_of(session, step, middle)
        if ended is not None and ended <= middle:
            works = middle
        else:
            fails = middle
    return works


def _end_of(session: DeviceSession, step, threshold: int) -> int | None:
    """Where the threshold is after a step from this one, if it ends."""
    try:
        step(threshold)
    except tf.errors.ResourceExhaustedError:
        return None
    return session.limit_bytes
