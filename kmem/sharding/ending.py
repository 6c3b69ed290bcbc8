"""Ends a training by SIGTERM only once it is saved.

So are jobs ended that others take the place of, or whose time is over. The
signal may come to one process of several, and all of them have to save the
same step: after each step they ask each other. What this module does not do:
look for the signal within a step, or in validation. A second one ends the
process at once.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.sharding.engine import engine


class Ending:
    """SIGTERM, while a model is trained by this process's main thread.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._came = False
        # What SIGTERM did before.
        self._before: Any = None

    def begin(self) -> None:
        """Lets the signal wait."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def is_near(self) -> bool:
        """Whether the signal came to any process. All have to call it."""
        own = tf.constant([int(self._came)])
        return bool(np.any(engine().gather(own, "sigterm")))

    def end(self) -> None:
        """Lets the signal wait no more."""
        self._restore()
        if self._came:
            self.come()

    def come(self) -> None:
        """Does what the signal would have done."""
        self._restore()
        self._came = False
        os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # An error may have ended the training: nobody tells a callback.
        if self._came or not self._is_training(frame):
            self.come()
        self._came = True

    def _is_training(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "fit" and (
                frame.f_locals.get("self") is self._model
            ):
                return True
            frame = frame.f_back
        return False

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
