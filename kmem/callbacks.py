"""Memory options as callbacks, for code that keeps its `keras.Model`.

Give them to `fit` first in the list: what follows then sees a group of
batches applied before its epoch ends. Keras tells callbacks of an error only
if it happens in a step; if another callback raises, the model trains with
the options' function until its next `fit` or `compile`.
"""

from typing import Any

import keras

# A dependency of TensorFlow's.
from typing_extensions import Unpack

from kmem import options
from kmem.budget import planner
from kmem.budget.training import BudgetedSession
from kmem.fit.monitor import MemoryMonitor as MemoryMonitor
from kmem.fit.requirements import check
from kmem.fit.session import Session
from kmem.planning.plan import Plan
from kmem.sharding.resuming import ShardedCheckpoint as ShardedCheckpoint
from kmem.step import batches


class EndOfGroup(keras.callbacks.Callback):
    """Applies an epoch's last, incomplete group of batches."""

    def __init__(self, session: Session | BudgetedSession | None = None):
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

    def __init__(self, **arguments: Unpack[options.MemoryArguments]) -> None:
        super().__init__()
        self.options = options.MemoryOptions(**arguments)

    def on_train_begin(self, logs=None):
        self._remove()
        if not self.options or self.model is None:
            return
        remat = self.options.remat
        if self.options.memory_budget is not None:
            _check_alone(self.options)
            check(self.model, self.options)
            # It chooses when the first batch comes.
            self._begin(BudgetedSession.of(self.model, self.options))
        elif remat is None:
            self._install()
        elif remat.plan is not None:
            self._install(planner.plan_for(self.model, self.options, None))
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
        plain = model.train_function

        def first_step(iterator):
            model.train_function = plain
            data = next(iterator)
            batch = batches.specs_of(data)
            self._install(planner.plan_for(model, self.options, batch))
            return model.train_function(iter([data]))

        model.train_function = first_step

    def _install(self, plan: Plan | None = None):
        model: Any = self.model
        self._begin(Session.of(model, self.options, plan))

    def _begin(self, session):
        self._session = session
        session.install(guard=True)

    def on_train_end(self, logs=None):
        self._remove()

    def _remove(self):
        if self._session is not None:
            self._session.remove()
        self._session = None


def _check_alone(option: options.MemoryOptions) -> None:
    """A callback would choose within a step that others take as well."""
    if option.sharding is not None or "sharding" in option.allow:
        raise ValueError(
            "`memory_budget` must be given to the `fit` of a `kmem.Model` if "
            "the model trains in shards: use `kmem.wrap(model)`. Received: "
            f"sharding={option.sharding}, allow={option.allow}"
        )


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


class Remat(MemoryOptions):
    """`MemoryOptions(remat=...)`, likewise."""

    def __init__(self, *args, **kwargs):
        super().__init__(remat=options.Remat(*args, **kwargs))


class DTR(MemoryOptions):
    """`MemoryOptions(dtr=...)`, likewise."""

    def __init__(self, *args, **kwargs):
        super().__init__(dtr=options.DTR(*args, **kwargs))


class Sharding(MemoryOptions):
    """`MemoryOptions(sharding=...)`, likewise.

    What shuffles the data has to be seeded alike in all processes: `fit` has
    begun when a callback is asked.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(sharding=options.Sharding(*args, **kwargs))
