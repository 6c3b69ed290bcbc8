"""Memory options as callbacks, for code that keeps its `keras.Model`.

Give them to `fit` first in the list: what follows then sees a group of
batches applied before its epoch ends. Keras tells callbacks of an error only
if it happens in a step; if another callback raises, the model trains with
the options' function until its next `fit` or `compile`.
"""

import keras

from kmem import options
from kmem.monitor import MemoryMonitor as MemoryMonitor
from kmem.session import Session


class EndOfGroup(keras.callbacks.Callback):
    """Applies an epoch's last, incomplete group of batches."""

    def __init__(self, session: Session | None = None):
        super().__init__()
        self._session = session

    def on_test_begin(self, logs=None):
        if self._session is not None:
            self._session.end_group()

    def on_epoch_end(self, epoch, logs=None):
        if self._session is not None:
            self._session.end_group()


class MemoryOptions(EndOfGroup):
    """Trains a plain `keras.Model` under memory options.

    Args:
        **arguments: The memory options of `kmem.Model.fit`.

    Raises:
        TypeError: If an option is not known.
        ValueError: If an option is not of one of its forms.

    Example:

    ```python
    import keras

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = keras.random.normal((64, 8)), keras.random.normal((64, 1))
    memory = kmem.callbacks.MemoryOptions(microbatches=4)
    model.fit(x, y, batch_size=32, callbacks=[memory], verbose=0)
    ```
    """

    def __init__(self, **arguments):
        super().__init__()
        self.options = options.split_options(arguments, set())

    def on_train_begin(self, logs=None):
        self._remove()
        if self.options and self.model is not None:
            self._session = Session.of(self.model, self.options)
            self._session.install(guard=True)

    def on_train_end(self, logs=None):
        self._remove()

    def _remove(self):
        if self._session is not None:
            self._session.remove()
        self._session = None


class MicroBatches(MemoryOptions):
    """`MemoryOptions(microbatches=...)`, from `kmem.MicroBatches`' fields."""

    def __init__(self, count: int):
        super().__init__(microbatches=options.MicroBatches(count))


class GradientAccumulation(MemoryOptions):
    """`MemoryOptions(gradient_accumulation_steps=...)`, likewise."""

    def __init__(self, steps: int):
        option = options.GradientAccumulation(steps)
        super().__init__(gradient_accumulation_steps=option)


class MixedPrecision(MemoryOptions):
    """`MemoryOptions(mixed_precision=...)`, likewise."""

    def __init__(self, *args, **kwargs):
        option = options.MixedPrecision(*args, **kwargs)
        super().__init__(mixed_precision=option)
