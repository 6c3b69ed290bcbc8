"""Chooses how a step is taken within a memory budget, for `memory_budget`.

A batch that does not fit can be computed in parts, recomputed in part, or
both (searching.py). Where the device is not the machine's own memory, weights
and optimizer may stay there (sharding/refusals.py). So there may be several
searches, of which the best is told, with what else there was.
"""

import dataclasses
import gc
import math
from typing import Any

import keras

from kmem import memory
from kmem.base.sizes import format_size
from kmem.budget import planner
from kmem.budget.choices import Choice
from kmem.budget.choices import MemoryReport
from kmem.budget.choices import describe
from kmem.budget.searching import Search
from kmem.fit.session import Session
from kmem.options import MemoryOptions
from kmem.options import MixedPrecision
from kmem.options import Sharding
from kmem.sharding import agreeing
from kmem.sharding import refusals
from kmem.step import batches
from kmem.step.accumulation import build_optimizer

# A step of a model whose rehearsals cannot be kept is rehearsed anew, and may
# need more then.
_ALLOWANCE = 0.02


class ImpossibleBudget(ValueError):
    """No step is known that keeps a `memory_budget`.

    Args:
        budget: The budget, as it was given.
        budget_bytes: What of it the device has.
        least: The smallest that was seen to be enough, and the options that
            keep it, if any was seen.
        left_bytes: What more is in memory when it is asked for.

    Attributes:
        smallest_bytes: The smallest budget that is known to be enough, or
            `None`.
        options: What it needs, or `None`.
    """

    def __init__(
        self,
        budget: int | float,
        budget_bytes: int,
        least: tuple[int, MemoryOptions] | None,
        left_bytes: int,
    ):
        self.smallest_bytes: int | None = None
        self.options: MemoryOptions | None = None
        message = (
            "`memory_budget` must leave room for a step, and the device had "
            "none for any that was tried."
        )
        if least is not None:
            peak, self.options = least
            smallest = math.ceil((1 + _ALLOWANCE) * peak) + left_bytes
            self.smallest_bytes = smallest
            message = (
                f"`memory_budget` must be at least {smallest} bytes "
                f"({format_size(smallest)}), the least that a step is known "
                f"to need ({describe(self.options)})."
            )
        received = received_budget(budget, budget_bytes)
        super().__init__(f"{message} Received: {received}")


def received_budget(budget: int | float, budget_bytes: int) -> str:
    """A budget as it was given, and in bytes, for an error message."""
    size = format_size(budget_bytes)
    if repr(budget) != str(budget_bytes):
        size = f"{budget_bytes} bytes, {size}"
    return f"memory_budget={budget!r} ({size})"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to take a step that fits.

    Attributes:
        choice: Its options, and what it takes.
        session: Trains so.
    """

    choice: Choice
    session: Session


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
        ImpossibleBudget: If nothing fits.
    """
    planner.build(model, batch)
    # Its variables are in memory in every step.
    build_optimizer(model.optimizer, model.trainable_variables)
    gc.collect()
    given = dataclasses.replace(options, memory_budget=None, allow=())
    is_counted = memory.is_counted()
    if not is_counted and agreeing.processes(given).size > 1:
        raise ValueError(
            "`memory_budget` must be of a single process where bytes cannot "
            "be counted: import kmem before the first TensorFlow operation, "
            "or train without it. Received: "
            f"memory_budget={options.memory_budget!r}"
        )
    in_use = planner.in_use_bytes(model, batch, given)
    search = Search(model, batch, budget_bytes, reserved_bytes, verbose)
    plain = search.run(given)
    for others in _allowed(model, given, options.allow):
        if search.best != plain:
            search.run(others)
    search.end()
    if search.best is None:
        # What it names has to do when it is asked for, when the search has
        # left its traces in memory.
        left = planner.in_use_bytes(model, batch, given) - in_use
        left = 2 * max(left, 0)
        raise ImpossibleBudget(
            options.memory_budget, budget_bytes, search.least, left
        )
    best = search.best
    others = [choice for choice in search.tried if choice != best]
    others.sort(key=lambda choice: choice.predicted_seconds)
    session = search.session or Session(model, best.options, best.plan)
    return Way(best, session), MemoryReport(
        budget_bytes=budget_bytes,
        plain=_in_fit(plain, reserved_bytes),
        chosen=_in_fit(best, reserved_bytes),
        alternatives=tuple(_in_fit(c, reserved_bytes) for c in others),
        in_use_bytes=in_use,
        parameter_bytes=batches.num_bytes(model.variables),
        optimizer_bytes=batches.num_bytes(model.optimizer.variables),
        batch=batches.to_json(batch),
        is_measured=is_counted,
    )


def _in_fit(choice: Choice, reserved_bytes: int) -> Choice:
    """What a way takes with what is not to be used."""
    peak = choice.predicted_peak_bytes + reserved_bytes
    return dataclasses.replace(choice, predicted_peak_bytes=peak)


def _allowed(model, given: MemoryOptions, allow: tuple[str, ...]) -> list:
    """Other options to hold, where they may be chosen."""
    found = [given]
    if refusals.can_be_offloaded(model, given):
        there = Sharding(cpu_offload=True)
        found.append(dataclasses.replace(given, sharding=there))
    if "sharding" in allow and given.sharding is not None:
        full = dataclasses.replace(given.sharding, stage="full")
        found.append(dataclasses.replace(given, sharding=full))
    if "mixed_precision" in allow and given.mixed_precision is None:
        half = MixedPrecision("bfloat16")
        found += [dataclasses.replace(o, mixed_precision=half) for o in found]
    return [options for options in found if options != given]
