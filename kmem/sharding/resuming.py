"""Goes on with a training that has ended before its time.

Like Keras's `BackupAndRestore`, for models in shards, and to the batch. What
it does not do: bring back the order in which `fit` shuffles. A training that
is to go on as if nothing had happened needs `shuffle=False`, or data whose
order depends on the epoch alone.

SIGTERM ends a training only once it is saved: so are jobs ended that others
take the place of, or whose time is over. The signal may come to one process of
several, and all of them have to save the same step: after each step they ask
each other. What this module does not do: look for the signal within a step, or
in validation.
"""

import os
import pathlib
import signal
import threading
from types import FrameType
from typing import Any

import keras

from kmem.base import private_keras
from kmem.base.checks import positive_int
from kmem.sharding import agreeing
from kmem.sharding import checkpoint
from kmem.sharding.engine import engine
from kmem.step.capture import optimizers


class ShardedCheckpoint(keras.callbacks.Callback):
    """Saves the training, and goes on from what was saved.

    When `fit` begins and the folder has a checkpoint, of any number of
    processes, the model, the optimizer and the state of its random numbers
    are loaded, and `fit` goes on with the epoch and batch that come next. So
    a script that is started again, as by `kmem launch --restarts 3`, needs no
    more than this callback. `History` has the epochs since then.

    SIGTERM, by which clusters end a job, ends the training after its step, or
    after validation, once that is saved: in all processes, whichever of them
    it came to. A second one ends a process at once.

    Args:
        folder: Where to save. All processes must see it.
        save_freq: `"epoch"`, or how many batches from one checkpoint to the
            next. Where several batches make an update, it waits for that.

    Raises:
        ValueError: If an argument is not of this form; when `fit` begins, if
            the model has optimizers besides `model.optimizer`.

    Example:

    ```python
    import keras

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = keras.random.normal((64, 8)), keras.random.normal((64, 1))
    kmem.wrap(model).fit(
        x,
        y,
        epochs=2,
        shuffle=False,
        sharding="full",
        callbacks=[kmem.callbacks.ShardedCheckpoint("checkpoint")],
        verbose=0,
    )
    ```
    """

    model: Any

    def __init__(
        self, folder: str | pathlib.Path, save_freq: str | int = "epoch"
    ):
        super().__init__()
        self._folder = pathlib.Path(folder)
        # `None`: at the end of each epoch.
        self._every = None
        if save_freq != "epoch":
            self._every = positive_int(save_freq, "save_freq")
        self._epoch = 0
        # Batches: those yet to skip, the last one trained on, those not saved.
        self._skipped = 0
        self._last_batch = -1
        self._unsaved = 0
        self._updates = 0
        self._train: Any = None
        self._ending: Any = None

    def on_train_begin(self, logs=None):
        if self._skipped:
            # An error ended the last `fit` while batches passed.
            self.model.train_function = self._train
        self._skipped = self._unsaved = 0
        checkpoint.check_optimizers(self.model)
        self._ending = _Ending(self.model)
        if not checkpoint.exists(self._folder):
            return
        position = checkpoint.load(self.model, self._folder)
        self._skipped = position.get("batch", 0)
        private_keras.begin_at(self.model, position.get("epoch", 0))

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._updates = self._num_updates()
        self._last_batch = self._skipped - 1
        if self._skipped:
            self._skip()

    def on_train_batch_end(self, batch, logs=None):
        self._unsaved += max(batch - self._last_batch, 0)
        self._last_batch = max(batch, self._last_batch)
        before, self._updates = self._updates, self._num_updates()
        ends = self._ending.is_near()
        # Not amid the batches of an update: their sum is not saved.
        if self._updates != before and (ends or self._is_due()):
            self._save(self._epoch, self._last_batch + 1, ends)

    def on_epoch_end(self, epoch, logs=None):
        if self._skipped:
            # It has fewer batches than when it was saved.
            self._skipped, self.model.train_function = 0, self._train
        ends = self._ending.is_near()
        if ends or self._every is None or self._is_due():
            self._save(epoch + 1, 0, ends)

    def on_train_end(self, logs=None):
        private_keras.begin_at(self.model, None)
        self._ending.end()

    def _save(self, epoch: int, batch: int, ends: bool) -> None:
        self._unsaved = 0
        position = {"epoch": epoch, "batch": batch}
        checkpoint.save(self.model, self._folder, position)
        if ends:
            self._ending.end(comes=True)

    def _is_due(self) -> bool:
        return self._every is not None and self._unsaved >= self._every

    def _num_updates(self) -> int:
        return sum(int(each.iterations) for each in optimizers(self.model))

    def _skip(self) -> None:
        """Lets the epoch's first batches pass, which have been trained on."""
        model = self.model
        self._train = model.train_function

        def skip(iterator):
            for _ in range(min(self._skipped, model.steps_per_execution)):
                next(iterator)
                self._skipped -= 1
            if self._skipped == 0:
                model.train_function = self._train
            return {}

        model.train_function = skip


class _Ending:
    """SIGTERM, which waits while this process's main thread trains a model."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._came = False
        # What SIGTERM did before.
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def is_near(self) -> bool:
        """Whether the signal came to any process. All have to call it."""
        return bool(agreeing.ranks_where(engine(), self._came, "sigterm"))

    def end(self, comes: bool = False) -> None:
        """Lets the signal wait no more: it comes now if it came before, or if
        `comes` says so."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
        comes, self._came = comes or self._came, False
        if comes:
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # An error may have ended the training: nobody tells a callback.
        if self._came or not self._is_training(frame):
            self.end(comes=True)
        self._came = True

    def _is_training(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "fit" and (
                frame.f_locals.get("self") is self._model
            ):
                return True
            frame = frame.f_back
        return False
