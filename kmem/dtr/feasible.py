"""The smallest threshold that a training step gets through with, measured.

The step runs at a threshold that is raised where nothing is left to evict,
by what is asked for there. It is tried again from where that ends, as what is
evicted depends on it, until it does not have to be raised. That is often far
more than is needed, as what was evicted before has been kept until then: the
distance to what failed is halved by further steps.

It is not proved to be the smallest: a heuristic decides what is there when
room runs out, and more room may even be worse. The times of operators have a
say in that, so a threshold is tried twice, and what is named, with a margin,
again.
"""

import gc
from collections.abc import Callable

import tensorflow as tf

from kmem import memory

_MOST_RAISED = 5
_NUM_TRIES = 2
_MARGIN = 0.02


def with_least_threshold(
    threshold_bytes: int,
    message: str,
    step: Callable[[int], int],
    reserved_bytes: int = 0,
) -> Exception:
    """The error of a step that has failed, with a threshold that would do.

    Args:
        threshold_bytes: The threshold it failed with.
        message: The error's.
        step: Runs the step from a threshold in bytes, and returns what it was
            raised to; see `DeviceSession.scope`.
        reserved_bytes: Room that what runs beside steps may take; it is left
            free in each try.
    """
    gc.collect()  # What the error's frames held.
    fails = max(threshold_bytes - reserved_bytes, memory.current())
    least = _least_threshold(fails, step)
    if least is not None:
        message = (
            f"The threshold must be at least {least + reserved_bytes} bytes "
            f"for this step, which was tried with it. {message}"
        )
    return tf.errors.ResourceExhaustedError(None, None, message)


def _least_threshold(fails: int, step) -> int | None:
    works = _sufficient(step, fails)
    if works is None:
        return None
    while works - fails > _MARGIN * works:
        middle = (fails + works) // 2
        if _raised(step, middle) == middle:
            works = middle
        else:
            fails = middle
    return _sufficient(step, works, margin=_MARGIN)


def _sufficient(step, threshold: int, margin: float = 0.0) -> int | None:
    """A threshold from this one on, larger by a margin in each try, that need
    not be raised, if there is one."""
    for _ in range(_MOST_RAISED):
        tried = round(threshold * (1 + margin))
        raised = _raised(step, tried)
        if raised is None:
            break  # The device itself has no room, or it thrashes.
        if raised == tried:
            return tried
        threshold = raised
    return None


def _raised(step, threshold: int) -> int | None:
    """What a threshold is raised to in one of some steps from it, or itself;
    `None` if one of them fails."""
    for _ in range(_NUM_TRIES):
        try:
            raised = step(threshold)
        except tf.errors.ResourceExhaustedError:
            return None
        if raised > threshold:
            return raised
    return threshold
