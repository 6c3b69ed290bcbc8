"""Memory options as callbacks, for code that keeps its `keras.Model`.

Give them to `fit` first in the list: what follows then sees a group of
batches applied before its epoch ends. Keras tells callbacks of an error only
if it happens in a step; if another callback raises, the model trains with
the options' function until its next `fit` or `compile`. Under `sharding` a
`fit` has to come before `compile` then: weights are in shards.

`MemoryMonitor` puts memory into the training logs.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import ParamSpec

import keras

# A dependency of TensorFlow's.
from typing_extensions import Unpack

from kmem import dtr
from kmem import memory
from kmem import options
from kmem.base import patching
from kmem.budget import planner
from kmem.budget.training import BudgetedSession
from kmem.fit.requirements import check
from kmem.fit.session import Session
from kmem.sharding.resuming import ShardedCheckpoint as ShardedCheckpoint
from kmem.step import batches

_P = ParamSpec("_P")


# The callback under whose options a model trains.
_OWNER = "_kmem_callback"


class EndOfGroup(keras.callbacks.Callback):
    """Applies an epoch's last, incomplete group of batches."""

    def __init__(self, session: Session | BudgetedSession | None = None):
        super().__init__()
        self._session = session
        # Whose `fit` it is: each has a history of its own, but in a
        # `CallbackList` that is used again.
        self._history: Any = None
        self._has_begun = False

    def on_train_begin(self, logs=None):
        if self.model is not None:
            self._take_over()

    def _take_over(self) -> None:
        """Becomes the one under whose options the model trains; refused if
        another one has in this `fit`."""
        history = getattr(self.model, "history", None)
        owner = vars(self.model).get(_OWNER, self)
        is_other = owner is not self and owner._history is history
        if is_other and not owner._has_begun:
            raise ValueError(
                "Memory options must be given in one place: to `fit`, or to "
                "one `kmem.callbacks.MemoryOptions(...)` that has all of them. "
                f"Received: {self._described()} beside {owner._described()}"
            )
        end_earlier(self.model)
        self._history, self._has_begun = history, False
        object.__setattr__(self.model, _OWNER, self)

    def _described(self) -> str:
        return "options of `fit`"

    def remove(self, failed: bool = False) -> None:
        """Takes off what an earlier `fit` has left on the model."""

    def on_epoch_begin(self, epoch, logs=None):
        self._has_begun = True

    def on_train_end(self, logs=None):
        if self.model is not None and vars(self.model).get(_OWNER) is self:
            end_earlier(self.model)

    def on_test_begin(self, logs=None):
        if self._session is not None:
            self._session.end_group()

    def on_epoch_end(self, epoch, logs=None):
        if self._session is not None:
            self._session.end_group()


@contextlib.contextmanager
def put_first(callbacks, callback):
    """Puts `callback` first, so that the others see a finished epoch.

    A `CallbackList` is the caller's: it is given back as it was.
    """
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield [callback, *keras.tree.flatten(callbacks or [])]
        return
    callback.set_model(getattr(callbacks, "model", None))
    callbacks.callbacks.insert(0, callback)
    try:
        yield callbacks
    finally:
        callbacks.callbacks.remove(callback)


def end_earlier(model: Any) -> None:
    """Takes off the options of a callback whose `fit` did not end."""
    owner = vars(model).pop(_OWNER, None)
    if owner is not None:
        owner.remove()


class MemoryOptions(EndOfGroup):
    """Trains a plain `keras.Model` under memory options.

    Under `sharding`, give all processes the same seed for shuffling: `fit`
    has begun when a callback is called.

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

    def __init__(self, **arguments: Unpack[options.MemoryArguments]) -> None:
        super().__init__()
        self.options = options.MemoryOptions(**arguments)
        # What plans with the first batch, and what it stands for.
        self._later: tuple[Callable, Any] | None = None

    def _described(self) -> str:
        names = [field.name for field in dataclasses.fields(self.options)]
        given = [name for name in names if getattr(self.options, name)]
        return f"a callback with {', '.join(given)}"

    def on_train_begin(self, logs=None):
        if not self.options or self.model is None:
            return
        self._take_over()
        remat = self.options.remat
        if self.options.memory_budget is not None:
            if self.options.sharding or "sharding" in self.options.allow:
                # It would choose within a step that others take as well.
                raise ValueError(
                    "`memory_budget` must be given to the `fit` of a "
                    "`kmem.Model` if the model trains in shards: use "
                    "`kmem.wrap(model)`. Received: "
                    f"sharding={self.options.sharding}, "
                    f"allow={self.options.allow}"
                )
            check(self.model, self.options)
            # It chooses when the first batch comes.
            self._begin(BudgetedSession.of(self.model, self.options))
        elif remat is None:
            self._begin(Session.of(self.model, self.options))
        elif remat.plan is not None:
            self._begin(planner.session_for(self.model, self.options, None))
        else:
            self._plan_later()

    def _plan_later(self):
        """A callback learns of the batches' shapes from the first one."""
        model: Any = self.model
        check(model, self.options)
        replicas = model.distribute_strategy.num_replicas_in_sync
        if model.steps_per_execution != 1 or replicas != 1:
            raise ValueError(
                "`remat` must be a `kmem.Plan` in a callback if the model "
                "runs several steps at once, or has several replicas. "
                f"Received: steps_per_execution={model.steps_per_execution}, "
                f"{replicas} replicas"
            )

        def first_step(iterator):
            self.remove()
            data = next(iterator)
            batch = batches.specs_of(data, examples=True)
            self._begin(planner.session_for(model, self.options, batch))
            return model.train_function(iter([data]))

        function = patching.guarded(self, "train_function", first_step)
        self._later = function, model.train_function
        model.train_function = function

    def _begin(self, session):
        self._session = session
        session.install(guard=True)

    def remove(self, failed: bool = False) -> None:
        if self._session is not None:
            self._session.remove(failed)
        if self._later is not None:
            model: Any = self.model
            function, plain = self._later
            # `compile` may have taken it off already.
            if model.train_function is function:
                model.train_function = plain
        self._session = self._later = None


def _of_one(
    name: str, option: Callable[_P, Any]
) -> Callable[_P, MemoryOptions]:
    """A callback of one option, made from the fields of the option's class."""

    @functools.wraps(option.__init__)
    def init(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        MemoryOptions.__init__(self, **{name: option(*args, **kwargs)})

    kind = option.__name__
    says = f"`MemoryOptions({name}=...)`, from `kmem.{kind}`'s fields."
    members = {"__init__": init, "__doc__": says, "__module__": __name__}
    callback: Any = type(kind, (MemoryOptions,), members)
    return callback


MicroBatches = _of_one("microbatches", options.MicroBatches)
GradientAccumulation = _of_one(
    "gradient_accumulation_steps", options.GradientAccumulation
)
MixedPrecision = _of_one("mixed_precision", options.MixedPrecision)
Remat = _of_one("remat", options.Remat)
DTR = _of_one("dtr", options.DTR)
Sharding = _of_one("sharding", options.Sharding)


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
    put it first in the list. Keras hands one dictionary of logs to all of
    them, in the order of the list, with `History` and the progress bar last.

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
