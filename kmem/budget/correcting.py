"""Corrects a plan until it keeps its budget when it is rehearsed.

The solver plans for a drawing of the step. What a device really needs, with
what TensorFlow fuses, reorders and allocates besides, is measured: the step
is rehearsed with the plan, and if its peak is not as predicted, the
difference counts as resident and the budget is planned for again. So a plan's
predicted peak is one that was measured, where that was possible.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from typing import Literal

from kmem.budget.dry_run import Rehearsal
from kmem.planning.bounds import peak_lower_bound
from kmem.planning.choosing import Chooser
from kmem.planning.errors import InfeasibleBudget
from kmem.planning.flat import Point
from kmem.planning.plan import Plan
from kmem.step import batches

# How often a plan is corrected, and from what on that is worth it.
_MAX_REHEARSALS = 6
_SLACK = 0.05
# Steps do not all have the same peak: their operations' order differs. XLA's
# does not, but the input pipeline beside it may.
_MARGIN, _MARGIN_IN_XLA = 0.01, 0.003
_OUT_OF_MEMORY_STEP = 0.1
# How often less recomputation is tried where a peak is not as drawn.
_MAX_LESS = 3


@dataclasses.dataclass
class Learned:
    """What is known of models of one structure.

    Attributes:
        chooser: Their plans.
        extra_bytes: What their steps need beyond what the drawing tells.
        rehearsed: The plans that were run, with the same for each, and how
            much of it only some steps need.
    """

    chooser: Chooser
    extra_bytes: int = 0
    rehearsed: dict[Point, tuple[int, int]] = dataclasses.field(
        default_factory=dict
    )


class Corrector:
    """Plans one step, and corrects the plan by rehearsals.

    Args:
        learned: What is known of models of this structure; it is added to.
        part: What one of its micro-batches is given, as `tf.TensorSpec`s.
        mode: How the step runs.
        in_use: The bytes that are in memory before a step.
        rehearse: Runs the step by a plan, and tells what it took, or `None`
            if it ran out of memory. `None` leaves it at the drawing.
    """

    def __init__(
        self,
        learned: Learned,
        part: Any,
        mode: Literal["eager", "graph", "xla"],
        in_use: int,
        rehearse: Callable[[Plan], Rehearsal | None] | None,
    ):
        self._learned = learned
        self._chooser = learned.chooser
        self._part = part
        self._mode = mode
        # What else is in memory is part of the peak.
        self._in_use = in_use
        self._rehearse = rehearse
        self._margin = _MARGIN_IN_XLA if mode == "xla" else _MARGIN

    def plan(
        self, asked: int | float | str, reserved: int, argument: str = "budget"
    ) -> Plan:
        """Plans for a budget, of which so many bytes are not to be used.

        Args:
            asked: The budget, `"auto"`, or a share of the unplanned peak.
            reserved: The bytes.
            argument: What messages call the budget.

        Raises:
            InfeasibleBudget: If no plan keeps it.
        """
        resident = self._in_use + self._learned.extra_bytes
        if asked == "auto":
            return self._auto(resident)
        budget = asked
        if isinstance(asked, float):
            point = self._chooser.everything
            everything = self._measured(point, None, resident)
            unplanned = everything.highest_peak_bytes
            if asked == 1:
                # The peak that the share is one of: kept by definition.
                return dataclasses.replace(everything, budget_bytes=unplanned)
            budget = int(asked * (unplanned + reserved))
            resident = everything.resident_bytes + everything.spread_bytes
        target = int(budget) - reserved
        best = self._within(target, resident)
        if best is None:
            written = repr(asked)
            raise self._infeasible(target, reserved, argument, written)
        return best

    def _auto(self, resident: int) -> Plan:
        """The smallest peak for a bounded slowdown, and no more recomputation
        than that takes."""
        point = self._chooser.auto()
        best = self._measured(point, None, resident)
        if self._mode != "xla" or self._rehearse is None:
            return best
        # XLA orders operations itself: from some plan on, peaks stay the same.
        low, high = point.peak_bytes, best.highest_peak_bytes - self._in_use
        for _ in range(_MAX_LESS):
            if high - low <= _SLACK * high:
                break
            drawn = (low + high) // 2
            point = self._point(drawn, smallest=False)
            found = self._measured(point, None, resident)
            if found.highest_peak_bytes <= best.highest_peak_bytes:
                best, low = found, drawn
            else:
                high = drawn
        return best

    def _within(self, budget: int, resident: int) -> Plan | None:
        """The fastest plan that keeps the budget when it is rehearsed."""
        target = int((1 - self._margin) * budget)
        best = self._known_within(target, budget)
        if best and target - best.highest_peak_bytes <= _SLACK * budget:
            return best
        tried: set[tuple] = set()
        for attempt in range(_MAX_REHEARSALS):
            kept, broken = self._seen(target)
            drawn = target - resident
            if best is not None and broken is not None:
                if broken - kept <= self._margin * budget:
                    break
                if not kept < drawn < broken:
                    drawn = (kept + broken) // 2
            last = attempt == _MAX_REHEARSALS - 1
            point = self._point(drawn, smallest=last and best is None)
            if point.segments in tried and best is None:
                point = self._chooser.smallest
            if point.segments in tried:
                break
            tried.add(point.segments)
            found = self._measured(point, budget, resident)
            excess = found.highest_peak_bytes - target
            if excess <= 0:
                if best is None or found.slowdown < best.slowdown:
                    best = found
                if not found.segments or -excess <= _SLACK * budget:
                    break
            # The more attempts have failed, the more is left free.
            resident = found.resident_bytes + found.spread_bytes
            resident += attempt * max(excess, 0)
        return best

    def _seen(self, target: int) -> tuple[int, int | None]:
        """The highest drawn peak of a plan that was seen to keep the target,
        and the lowest above it of one that was not."""
        fit = self._rehearsed_within(target)
        kept = max((point.peak_bytes for point in fit), default=0)
        others = (p.peak_bytes for p in self._learned.rehearsed if p not in fit)
        return kept, min((peak for peak in others if peak > kept), default=None)

    def _rehearsed_within(self, target: int) -> list[Point]:
        """The plans that were seen to keep a target, with what is in use."""
        return [
            point
            for point, (extra, _) in self._learned.rehearsed.items()
            if point.peak_bytes + extra + self._in_use <= target
        ]

    def _point(self, budget_bytes: int, smallest: bool) -> Point:
        if not smallest:
            try:
                return self._chooser.within(budget_bytes)
            except InfeasibleBudget:
                # By the drawing; only a rehearsal can tell.
                pass
        return self._chooser.smallest

    def _known_within(self, target: int, budget: int) -> Plan | None:
        """The fastest of the plans that were rehearsed before."""
        fit = self._rehearsed_within(target)
        if not fit:
            return None
        point = min(fit, key=lambda point: point.seconds)
        return self._measured(point, budget, self._in_use)

    def _infeasible(
        self, budget: int, reserved: int, argument: str, written: str
    ) -> InfeasibleBudget:
        drawn = self._chooser.smallest.peak_bytes
        rehearsed = self._learned.rehearsed.items()
        seen = [point.peak_bytes + extra for point, (extra, _) in rehearsed]
        smallest = min(seen, default=drawn)
        bound = min(peak_lower_bound(self._chooser.network.graph), drawn)
        bound = min(bound + self._learned.extra_bytes, smallest)
        # A little more is in memory when it is asked for.
        least = (smallest + self._in_use) / (1 - 2 * self._margin)
        return InfeasibleBudget(
            budget + reserved,
            math.ceil(least) + reserved,
            bound + self._in_use + reserved,
            argument,
            written,
        )

    def _measured(self, point: Point, budget, resident) -> Plan:
        """A plan, with the peak that it was seen to have if it can be run."""
        made = self._made(point, budget, resident)
        if self._rehearse is None:
            return made
        if point not in self._learned.rehearsed:
            seen = self._rehearse(made)
            if seen is None:
                peak = made.predicted_peak_bytes
                peak += int(_OUT_OF_MEMORY_STEP * point.peak_bytes)
                seen = Rehearsal(peak, math.inf)
            extra = seen.peak_bytes - point.peak_bytes - self._in_use
            self._learned.rehearsed[point] = extra, seen.spread_bytes
        extra, spread = self._learned.rehearsed[point]
        self._learned.extra_bytes = extra
        resident = self._in_use + extra - spread
        return self._made(point, budget, resident, spread)

    def _made(self, point: Point, budget, resident, spread: int = 0) -> Plan:
        solver = self._chooser.solver
        within = point.peak_bytes if budget is None else budget - resident
        return Plan(
            network=self._chooser.network,
            segments=point.segments,
            batch=batches.to_json(self._part),
            mode=self._mode,
            solver=solver if isinstance(solver, str) else "genetic",
            budget_bytes=budget,
            resident_bytes=resident,
            lower_bound_seconds=self._chooser.lower_bound_seconds(within),
            spread_bytes=spread,
        )
