"""Ends collectives that wait for another process for too long.

TensorFlow's own timeout of a collective is a thread that sleeps as long, for
every call: thousands of them in a training. Here one thread watches whatever
Python waits for, a step or a single collective, and ends all collectives of
this process when that takes too long. What this module does not do: tell a
step that is slow from one that waits.
"""

import contextlib
import contextvars
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# Private in TensorFlow: what its own strategies end collectives by.
# test_faults.py fails if it moves.
from tensorflow.python.eager import context

_LOOK_SECONDS = 1.0

_watched = contextvars.ContextVar("watched", default=False)


def is_watching() -> bool:
    """Whether what runs, or is traced, now is watched."""
    return _watched.get()


class Watchdog:
    """Watches one thing at a time, and what runs within it.

    Args:
        seconds: How long it may take.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, times: int = 1) -> Iterator[None]:
        """Within, collectives are ended after the time.

        Nothing in a graph that is traced: it runs at another time.

        Args:
            times: How many of them it may take.
        """
        if _watched.get() or not tf.executing_eagerly():
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        token = _watched.set(True)
        self._deadline = time.monotonic() + times * self._seconds
        try:
            yield
        finally:
            self._deadline = None
            _watched.reset(token)

    def _look(self) -> None:
        while True:
            time.sleep(min(_LOOK_SECONDS, self._seconds / 4))
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                current: Any = context.context()
                current.abort_collective_ops(
                    tf.errors.DEADLINE_EXCEEDED,
                    "Other processes must take part within "
                    f"{self._seconds:g} s (KMEM_TIMEOUT_SECONDS).",
                )
                return
