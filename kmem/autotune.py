"""Chooses how a step is taken within a memory budget, for `memory_budget`.

A batch that does not fit can be computed in parts, recomputed in part, or
both (searching.py). Where the device is not the machine's own memory, weights
and optimizer may stay there (sharding/offloading.py). So there may be several
searches, of which the best is told, with what else there was.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Callable
from typing import Any

import keras

from kmem import batches
from kmem import memory
from kmem import planner
from kmem.accumulation import build_optimizer
from kmem.choices import Choice
from kmem.choices import MemoryReport
from kmem.options import MemoryOptions
from kmem.options import MixedPrecision
from kmem.options import Sharding
from kmem.planning.errors import InfeasibleBudget
from kmem.searching import Search
from kmem.session import Session
from kmem.sharding import offloading

# What rehearsals of the same step differ by at the most, as far as seen.
_ALLOWANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to take a step that fits.

    Attributes:
        choice: Its options, and what it takes.
        session: Trains so.
    """

    choice: Choice
    session: Session

    @functools.cached_property
    def step(self) -> Callable:
        """Its function of a batch."""
        return self.session.on_batch()


def choose(
    model: keras.Model,
    options: MemoryOptions,
    batch: Any,
    budget_bytes: int,
    reserved_bytes: int = 0,
    verbose: int = 0,
) -> tuple[Way, MemoryReport]:
    """Looks for the quickest step of a model within a budget.

    The model and its state stay as they are.

    Args:
        model: A compiled model.
        options: Those that hold anyway, and what may be chosen besides.
        batch: What `train_step` gets, as `tf.TensorSpec`s.
        budget_bytes: The device's peak during a step.
        reserved_bytes: What of it is not to be used.
        verbose: 1 shows progress.

    Raises:
        ValueError: If nothing fits. It is an `InfeasibleBudget` that names the
            smallest budget known to be possible, unless plans cannot be made.
    """
    planner.build(model, batch)
    # Its variables are in memory in every step.
    build_optimizer(model.optimizer, model.trainable_variables)
    gc.collect()
    in_use = memory.current()
    given = dataclasses.replace(options, memory_budget=None, allow=())
    search = Search(model, batch, budget_bytes, reserved_bytes, verbose)
    plain = search.run(given)
    for others in _allowed(model, given, options.allow):
        if search.best != plain:
            search.run(others)
    search.end()
    if search.best is None:
        raise _named(search.error, memory.current() - in_use)
    best = search.best
    others = [choice for choice in search.tried if choice != best]
    others.sort(key=lambda choice: choice.predicted_seconds)
    session = search.session or Session(model, best.options)
    return Way(best, session), MemoryReport(
        budget_bytes=budget_bytes,
        plain=_in_fit(plain, reserved_bytes),
        chosen=_in_fit(best, reserved_bytes),
        alternatives=tuple(_in_fit(c, reserved_bytes) for c in others),
        in_use_bytes=in_use,
        parameter_bytes=batches.num_bytes(model.variables),
        optimizer_bytes=batches.num_bytes(model.optimizer.variables),
        batch=batches.to_json(batch),
    )


def _in_fit(choice: Choice, reserved_bytes: int) -> Choice:
    """What a way takes with what is not to be used."""
    peak = choice.predicted_peak_bytes + reserved_bytes
    return dataclasses.replace(choice, predicted_peak_bytes=peak)


def _named(error: ValueError, left_bytes: int) -> ValueError:
    """The error for `memory_budget`: what it names has to do when it is asked
    for, when the search has left so many bytes in memory, of its traces."""
    if not isinstance(error, InfeasibleBudget):
        return error
    smallest = (1 + _ALLOWANCE) * error.smallest_bytes + 2 * max(left_bytes, 0)
    return InfeasibleBudget(
        error.budget_bytes,
        math.ceil(smallest),
        error.lower_bound_bytes,
        "memory_budget",
    )


def _allowed(model, given: MemoryOptions, allow: tuple[str, ...]) -> list:
    """Other options to hold, where they may be chosen."""
    found = [given]
    if offloading.is_possible(model, given):
        there = Sharding(cpu_offload=True)
        found.append(dataclasses.replace(given, sharding=there))
    if "sharding" in allow and given.sharding is not None:
        full = dataclasses.replace(given.sharding, stage="full")
        found.append(dataclasses.replace(given, sharding=full))
    if "mixed_precision" in allow and given.mixed_precision is None:
        half = MixedPrecision("bfloat16")
        found += [dataclasses.replace(o, mixed_precision=half) for o in found]
    return [options for options in found if options != given]
