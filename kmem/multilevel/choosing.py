"""Chooses what a program's levels do to stay within one memory budget.

Levels compute one after another, so the budget is that of each level's step
(level_plan.py). What changes no number comes first, as in `fit` of one model.
A level that fits is left as it is. Else, if its loss assigns nothing, its
batches come in the fewest micro-batches that fit. Any other level, or one for
which none are enough, recomputes, in micro-batches if it must. Then whole
steps are run, and what they need beyond the budget is taken from that of the
levels. What this module does not do: look for the fastest of what fits, or for
what a model that validates needs.
"""

import bisect
import dataclasses
import math
from typing import Any

import tensorflow as tf

from kmem import memory
from kmem.base.sizes import format_size
from kmem.budget import inference
from kmem.budget import tuning
from kmem.budget.menu import even_counts
from kmem.budget.report import describe
from kmem.budget.report import received_budget
from kmem.budget.trial import with_count
from kmem.keras_graph import profiling
from kmem.multilevel import level_plan
from kmem.multilevel.level import Level
from kmem.options import MemoryOptions
from kmem.options import Remat
from kmem.planning.bounds import InfeasibleBudget
from kmem.step import batches
from kmem.step.metrics import innermost


def checked_bytes(levels: list[Level], options: MemoryOptions) -> int | None:
    """The bytes of `memory_budget`, if there is one; a `ValueError` if it
    cannot be kept."""
    if options.memory_budget is None:
        return None
    planned = [x for x in levels if x.given_options.remat is not None]
    if planned or options.sharding is not None:
        beside = [f"sharding={options.sharding}"] if options.sharding else []
        beside += [
            f"remat={x.given_options.remat} of level '{x.name}'"
            for x in planned
        ]
        raise ValueError(
            "`memory_budget` must be without `sharding`, and without `remat` "
            "of a level, which it chooses. Received: "
            f"memory_budget={options.memory_budget!r} beside "
            f"{', '.join(beside)}"
        )
    if not memory.is_counted():
        raise ValueError(
            "`memory_budget` of a program needs bytes that can be counted: "
            "import kmem before the first TensorFlow operation. Received: "
            f"memory_budget={options.memory_budget!r}"
        )
    return inference.budget_bytes(options)


@dataclasses.dataclass
class Choosing:
    """What the levels of a program can do to stay within a budget.

    Args:
        program: The `Program`, whose state is given back after each dry run.
        shares: For each level's name, a replica's batch as `tf.TensorSpec`s.
        options: Those of `fit`, with `memory_budget`.
        budget_bytes: The device's peak during a step.
    """

    program: Any
    shares: dict[str, Any]
    options: MemoryOptions
    budget_bytes: int

    def __post_init__(self):
        asked = self.options.memory_budget
        self._received = received_budget(asked, self.budget_bytes)
        self._mode: Any = profiling.mode(self.program)
        self._reserved = level_plan.reserved_bytes(self.program.element)
        self._room = self.budget_bytes
        # What the level that is looked at was seen to need at the least.
        self._least_bytes = math.inf

    def choose(self, verbose: int = 0) -> None:
        """Sets the levels' options.

        Raises:
            ValueError: If nothing that is known stays within the budget. The
                levels have the options then that they were given.
        """
        try:
            peak_bytes = self._choose_all()
        except BaseException:
            for level in self.program.levels:
                level.options, level.plan = level.given_options, None
            raise
        if verbose:
            print(self._summary(peak_bytes))

    def _choose_all(self) -> float:
        """Chooses for all levels; returns the peak of whole steps."""
        levels = self.program.levels
        for _ in range(tuning.MAX_ATTEMPTS):
            for level in levels:
                self._choose(level)
            peak_bytes = self._peak_bytes(levels)
            if peak_bytes <= self.budget_bytes:
                return peak_bytes
            if peak_bytes == math.inf:
                break
            alone = max(self._peak_bytes([level]) for level in levels)
            excess = int(peak_bytes) - self.budget_bytes
            self._room = int(min(alone, self._room)) - excess
        self._least_bytes = math.inf
        raise self._impossible("whole steps, in which all levels compute")

    def _choose(self, level: Level) -> None:
        """Sets a level's options, and its plan."""
        counts = self._counts(level)
        self._least_bytes = math.inf
        if self._fits(level, level.given_options):
            return
        # What it assigns, statistics or the states of random numbers, would
        # be made from one micro-batch at a time.
        if not level.state or not level.calls_model:
            if self._fewest(level, counts[1:], None):
                return
        if level.calls_model:
            if self._fewest(level, counts, Remat(max(self._room, 1))):
                return
        raise self._impossible(f"the level '{level.name}'")

    def _fewest(
        self, level: Level, counts: list[int], remat: Remat | None
    ) -> bool:
        """Sets the fewest micro-batches that fit; returns whether any do."""
        fitting: dict[int, tuple] = {}

        def fits(count: int) -> bool:
            options = with_count(level.given_options, count)
            options = dataclasses.replace(options, remat=remat)
            if self._fits(level, options):
                fitting[count] = options, level.plan
            return count in fitting

        # The first is likely, and takes the least time.
        if not counts[:1] or not fits(counts[0]):
            bisect.bisect_left(counts, True, lo=min(1, len(counts)), key=fits)
        if fitting:
            level.options, level.plan = fitting[min(fitting)]
        return bool(fitting)

    def _counts(self, level: Level) -> list[int]:
        """In how many micro-batches its batches may come."""
        given = level.given_options.num_parts
        share = self.shares[level.name]
        rows = batches.num_rows(share)
        if given > 1 or rows is None or not batches.can_be_split(share):
            return [given]
        return even_counts(rows)

    def _fits(self, level: Level, options: MemoryOptions) -> bool:
        """Whether the level's steps do under some options, which it keeps."""
        level.options = options
        part = batches.part_of(self.shares[level.name], options.num_parts)
        try:
            level.look(part, self._mode)
        except tf.errors.ResourceExhaustedError:
            # A layer alone needs more, and cannot be measured for a plan.
            return False
        if level.plan is None:
            least_bytes = self._peak_bytes([level])
        else:
            try:
                level.plan.find(lambda: self._measured([level]), self._reserved)
                return True
            except InfeasibleBudget as error:
                least_bytes = error.smallest_bytes
        self._least_bytes = min(self._least_bytes, least_bytes)
        return least_bytes <= self._room

    def _peak_bytes(self, levels: list[Level]) -> float:
        """The peak of steps in `fit`; infinite if they ran out of memory."""
        step = self._measured(levels)
        return math.inf if step is None else step.peak_bytes + self._reserved

    def _measured(self, levels: list[Level]):
        return level_plan.measure(self.program, levels)

    def _impossible(self, subject: str) -> ValueError:
        known = "a larger budget"
        if self._least_bytes < math.inf:
            least = self._least_bytes + self.budget_bytes - self._room
            # It is measured anew when it is asked for.
            least = math.ceil(least / (1 - 2 * tuning.MARGIN))
            known = f"a budget of {least} bytes ({format_size(least)}) or more"
        return ValueError(
            f"`memory_budget` must leave room for {subject}: give {known}, or "
            f"smaller batches. Received: {self._received}"
        )

    def _summary(self, peak_bytes: float) -> str:
        """One line for the log."""
        lines = []
        for level in self.program.levels:
            line = f"{level.name}: {describe(level.options)}"
            if level.options.num_parts > 1 and level.state:
                # What a loss assigns is made from what it is given.
                line += ", where one micro-batch at a time is seen by "
                state = {id(variable) for variable in level.state}
                owners = (
                    innermost(x, state, "variables") for x in level.models
                )
                line += ", ".join(x.name for each in owners for x in each)
            lines.append(line)
        peak = format_size(peak_bytes)
        return f"{self._received}: steps of {peak}; {'; '.join(lines)}"
