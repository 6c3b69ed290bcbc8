"""The smallest threshold that a training step gets through with, measured.

The step runs at a threshold that is raised where nothing is left to evict,
by what is asked for there. It is tried again from where that ends, as what is
evicted depends on it, until it does not have to be raised. The times of
operators have a say in what is evicted, so a margin is added.

It is not proved to be the smallest: a heuristic decides what is there when
room runs out.
"""

import gc
from collections.abc import Callable

import tensorflow as tf

from kmem import memory
from kmem.dtr.device import DeviceSession

_MOST_STEPS = 5
_MARGIN = 0.05


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
            f"The threshold must be at least {least} bytes for this step, "
            f"which was tried. {message}"
        )
    return tf.errors.ResourceExhaustedError(None, None, message)


def _least_threshold(session: DeviceSession, step) -> int | None:
    for _ in range(_MOST_STEPS):
        threshold = max(session.limit_bytes, memory.current())
        try:
            step(threshold)
        except tf.errors.ResourceExhaustedError:
            return None  # The device itself has no room, or it thrashes.
        if session.limit_bytes <= threshold:
            return round(threshold * (1 + _MARGIN))
    return None
