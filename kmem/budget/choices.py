"""What `memory_budget` chose, and what else there was, as data."""

import dataclasses

from kmem.base.sizes import format_size
from kmem.options import MemoryOptions
from kmem.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to take a step.

    Attributes:
        options: The options that take it.
        predicted_peak_bytes: The device's peak during the step.
        predicted_seconds: The step's time.
        measured_peak_bytes: The most that it was seen to need in training, or
            `None` if it has not trained.
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
        budget_bytes: The budget.
        plain: What a step would take without any of kmem's choices.
        chosen: What is done.
        alternatives: What else was looked at, the quickest first.
        in_use_bytes: What was in memory before the step; parameters and
            optimizer are among it.
        parameter_bytes: Of the model's variables.
        optimizer_bytes: Of the optimizer's.
        batch: The shapes and dtypes of the batches, as JSON.
        events: A line for each time that training had to adapt.
        is_measured: Whether peaks were measured. Where bytes cannot be
            counted they are predicted, and a step that needs more is neither
            seen nor undone.
        layers_that_see_parts: The layers whose numbers are not those of the
            whole batch, as they see one of its parts at a time (batch
            normalization): known after the first step.
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

    def summary(self) -> str:
        """One line for the log."""
        line = self._what_is_done()
        if self.layers_that_see_parts:
            line += "; one part at a time is seen by "
            line += ", ".join(self.layers_that_see_parts)
        if not self.is_measured:
            line += "; predicted: a step that needs more is not undone"
        return line

    def _what_is_done(self) -> str:
        chosen = f"memory_budget {format_size(self.budget_bytes)}: "
        if self.chosen.options == self.plain.options:
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
    if options.remat is not None:
        words.append("remat")
    if options.mixed_precision is not None:
        words.append(options.mixed_precision.dtype)
    if options.sharding is not None:
        words.append(f"sharding={options.sharding.stage}")
        if options.sharding.cpu_offload:
            words.append("cpu_offload")
    return ", ".join(words) or "plain"
