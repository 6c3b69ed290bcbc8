"""Memory in the training logs.

Keras hands one dictionary of logs to the callbacks, in the order of the list,
with `History` and the progress bar last. A callback that adds to it is
therefore seen by every callback after it.
"""

import contextlib

import keras

from kmem import dtr
from kmem import memory


class MemoryMonitor(keras.callbacks.Callback):
    """Adds memory in use, and its peak, to the logs of `fit`.

    Two entries, in MB (10**6 bytes):

    - `memory_peak_mb`: the most that was in use since the epoch began. In the
      logs of an epoch that is the peak of the epoch, with its validation.
    - `memory_mb`: what is in use, after the batch or the epoch.

    Under `fit(dtr=...)` there are two more, counted since the epoch began:

    - `dtr_evictions`: how often a tensor was evicted.
    - `dtr_recomputations`: how many operators ran again.

    They appear in the progress bar and in `History` always, and in
    `CSVLogger`, `TensorBoard` and other callbacks that come after this one:
    put it first in the list.

    Args:
        device: The device to watch, such as `"CPU"` or `"GPU:1"`. Defaults to
            `"GPU:0"` if there is one, else `"CPU:0"`.

    Raises:
        ValueError: If there is no such device.
        RuntimeError: If kmem's allocator, which does the counting on the CPU,
            could not be put in place: see `kmem.memory`.

    Example:

    ```python
    import keras
    import kmem
    import numpy as np

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(
        np.ones((32, 8)),
        np.ones((32, 1)),
        callbacks=[kmem.callbacks.MemoryMonitor()],
    )
    history.history["memory_peak_mb"]
    ```
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self._device = device
        self._track = contextlib.ExitStack()
        # Anything that is wrong is better said here than in `fit`: there may
        # still be time to put the allocator in place.
        memory.current(device)

    def on_epoch_begin(self, epoch, logs=None):
        # Still open if the last `fit` was interrupted.
        self._track.close()
        self._usage = self._track.enter_context(memory.track(self._device))
        self._dtr_before = dtr.statistics()

    def on_train_batch_end(self, batch, logs=None):
        self._add(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._add(logs)
        self._track.close()

    def _add(self, logs: dict[str, float] | None) -> None:
        if logs is not None:
            logs["memory_mb"] = memory.current(self._device) / 1e6
            logs["memory_peak_mb"] = self._usage.peak_bytes / 1e6
            logs.update(_dtr_counts(self._dtr_before, dtr.statistics()))


def _dtr_counts(before, now) -> dict[str, int]:
    """What DTR did meanwhile; nothing if it was not on."""
    if now is None or now == before:
        return {}
    same = before is not None and before.total_seconds <= now.total_seconds
    return {
        f"dtr_{name}": getattr(now, f"num_{name}")
        - (getattr(before, f"num_{name}") if same else 0)
        for name in ("evictions", "recomputations")
    }
