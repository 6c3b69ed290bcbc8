"""What `memory_budget` chose, and what else there was, as data."""

import dataclasses
import html
import math

import tensorflow as tf

from kmem.base.sizes import format_size
from kmem.budget import tuning
from kmem.options import MemoryOptions
from kmem.planning.plan import Plan
from kmem.step import batches

# So many of the largest tensors are named in an error.
_NUM_NAMED = 5
_LARGEST = "The largest tensors at the peak of a plain step of a micro-batch:"
NOTHING_LESS = (
    "A step ran out of memory, and so did every option that is known to need "
    "less. The model is as it was before the step: make the batch smaller or "
    "the budget larger."
)
NOT_UNDONE = (
    "A step ran out of memory, and neither replicas nor processes that train "
    "in shards can undo theirs: start again, from the last checkpoint, with a "
    "smaller `memory_budget`."
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """An option for a step, which was tried or ruled out by its prediction.

    Attributes:
        options: The options of the step.
        predicted_peak_bytes: The device's peak during the step.
        predicted_seconds: The step's time: the fastest of some that were
            taken, if it was tried.
        measured_peak_bytes: The highest peak of a step in training, or `None`
            if it has not trained.
        plan: What it recomputes, if it does.
    """

    options: MemoryOptions
    predicted_peak_bytes: int
    predicted_seconds: float
    measured_peak_bytes: int | None = None
    plan: Plan | None = None

    def __str__(self) -> str:
        peak, seconds = self.predicted_peak_bytes, self.predicted_seconds
        name = describe(self.options)
        return f"{name} ({format_size(peak)}, {seconds:.3g} s a step)"


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What was chosen for batches of one shape, and why.

    Attributes:
        budget_bytes: The budget, in bytes.
        plain: A step without any of kmem's options.
        chosen: The option that trains.
        alternatives: The other options, the fastest first.
        in_use_bytes: What was in memory before the step, parameters and
            optimizer included.
        parameter_bytes: All variables of the model.
        optimizer_bytes: All variables of the optimizer.
        batch: The shapes and dtypes of the batches, as JSON.
        events: A line for each time that training had to adapt, or validates
            in parts.
        is_measured: Whether peaks were measured. If bytes cannot be counted,
            peaks are predicted, and a step that exceeds the budget is neither
            noticed nor undone.
        layers_that_see_parts: The layers whose numbers are not those of the
            whole batch, as they see one micro-batch at a time (batch
            normalization). They are known after the first step.
    """

    budget_bytes: int
    plain: Choice
    chosen: Choice
    alternatives: tuple[Choice, ...]
    in_use_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    batch: str
    events: tuple[str, ...] = ()
    is_measured: bool = True
    layers_that_see_parts: tuple[str, ...] = ()

    @property
    def choices(self) -> list[Choice]:
        """The chosen one, the others from the best on, and the plain one."""
        others = [c for c in self.alternatives if c != self.plain]
        return list(dict.fromkeys([self.chosen, *others, self.plain]))

    @property
    def is_plain(self) -> bool:
        """Whether nothing was chosen: the step fits as it is."""
        return self.chosen.options == self.plain.options

    def slowdown(self, choice: Choice) -> float:
        """The time of a choice's step, relative to the plain one's."""
        return choice.predicted_seconds / self.plain.predicted_seconds

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        lines = [self.summary(), *map(str, self.choices), *self.events]
        return f"<pre>{html.escape(chr(10).join(lines))}</pre>"

    def summary(self) -> str:
        """One line for the log."""
        line = self._what_is_done()
        if self.layers_that_see_parts:
            line += "; one micro-batch at a time is seen by "
            line += ", ".join(self.layers_that_see_parts)
            total = batches.num_rows(batches.from_json(self.batch)) or 1
            size = -(-total // self.chosen.options.num_parts)
            line += f" ({size} of {total} examples)"
        if not self.is_measured:
            line += "; predicted: a step that needs more is not undone"
        return line

    def _what_is_done(self) -> str:
        chosen = f"memory_budget {format_size(self.budget_bytes)}: "
        if self.is_plain:
            return f"{chosen}fits as it is ({self._numbers(self.chosen)})"
        chosen += f"{describe(self.chosen.options)} "
        chosen += f"({self._numbers(self.chosen)}; without it "
        chosen += f"{format_size(self.plain.predicted_peak_bytes)})"
        others = ", ".join(map(str, self.alternatives[:2]))
        return f"{chosen}; next: {others}" if others else chosen

    def _numbers(self, choice: Choice) -> str:
        peak = format_size(choice.predicted_peak_bytes)
        return f"peak {peak}, {choice.predicted_seconds:.3g} s a step"


def describe(options: MemoryOptions) -> str:
    """What options do to a step, in a few words."""
    words = []
    if options.microbatches is not None:
        words.append(f"microbatches={options.microbatches.count}")
    names = ("remat", "dtr", "chunked_loss", "chunked_attention")
    words += [name for name in names if getattr(options, name)]
    if options.mixed_precision is not None:
        words.append(options.mixed_precision.dtype)
    if options.sharding is not None:
        words.append(f"sharding={options.sharding.stage}")
        if options.sharding.cpu_offload:
            words.append("cpu_offload")
    return ", ".join(words) or "plain"


class ImpossibleBudget(ValueError):
    """No step is known that stays within a `memory_budget`.

    Args:
        budget: The budget, as it was given.
        budget_bytes: What of it the device has.
        least: The step that needs the least of those that were run, if one was.
        in_use_bytes: What was in memory besides it.
        left_bytes: What more is there when it is asked for.
        tensors: See `Attributes`.
        reason: Why nothing needs less, if that is known.

    Attributes:
        smallest_bytes: The smallest budget that is known to be enough, or
            `None`.
        options: What it needs, or `None`.
        tensors: The largest that a step of its micro-batches holds at its
            peak without kmem's choices, as `kmem.estimate` tells them.
    """

    def __init__(
        self,
        budget: int | float | None,
        budget_bytes: int,
        least: Choice | None,
        in_use_bytes: int,
        left_bytes: int = 0,
        tensors: tuple = (),
        reason: str = "",
    ):
        self.tensors = tensors
        self.smallest_bytes: int | None = None
        self.options: MemoryOptions | None = None
        message = (
            "`memory_budget` must leave room for a step, and the device had "
            "none for any that was tried."
        )
        if least is not None:
            self.options = least.options
            # It is measured anew when it is asked for.
            own = least.predicted_peak_bytes - in_use_bytes
            own = math.ceil(own / (1 - 2 * tuning.MARGIN))
            self.smallest_bytes = smallest = in_use_bytes + left_bytes + own
            message = (
                f"`memory_budget` must be at least {smallest} bytes "
                f"({format_size(smallest)}), the least that a step is known "
                f"to need ({describe(self.options)})."
            )
        received = received_budget(budget, budget_bytes)
        message = f"{message}{reason} Received: {received}"
        if tensors:
            largest = map(str, tensors[:_NUM_NAMED])
            message = "\n  ".join([f"{message}\n{_LARGEST}", *largest])
        super().__init__(message)


def exhausted(
    advice: str, message: str, received: str
) -> tf.errors.ResourceExhaustedError:
    """An error of a step that ran out of memory, with what to do."""
    text = f"{advice} {message} Received: {received}"
    return tf.errors.ResourceExhaustedError(None, None, text)


def received_budget(budget: int | float | None, budget_bytes: int) -> str:
    """A budget as it was given, and in bytes, for an error message."""
    size = format_size(budget_bytes)
    if repr(budget) != str(budget_bytes):
        size = f"{budget_bytes} bytes, {size}"
    return f"memory_budget={budget!r} ({size})"
