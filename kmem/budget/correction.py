"""Corrects a plan until it stays within its budget in a dry run.

The solver plans for a drawing of the step. What a device really needs, with
what TensorFlow fuses, reorders and allocates besides, is measured: the step
is run with the plan, and if its peak is not as predicted, the
difference counts as resident and the budget is planned for again. So a plan's
predicted peak is one that was measured, where that was possible.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from typing import Literal

from kmem.budget import tuning
from kmem.budget.dry_run import Measurement
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.choosing import Chooser
from kmem.planning.choosing import InTiles
from kmem.planning.flat import Point
from kmem.planning.plan import Plan
from kmem.step import batches


@dataclasses.dataclass
class Learned:
    """What is known of models of one structure.

    Attributes:
        chooser: Their plans.
        extra_bytes: What their steps need beyond what the drawing tells.
        measured: The plans that were run, with the same for each.
        in_tiles: The same of plans with segments in tiles, for budgets that
            no other plan stays within; `None` if these are not looked for.
    """

    chooser: Chooser | InTiles
    extra_bytes: int = 0
    measured: dict[Point, int] = dataclasses.field(default_factory=dict)
    in_tiles: "Learned | None" = None


@dataclasses.dataclass
class Corrector:
    """Plans one step, and corrects the plan by dry runs."""

    # Of models of this structure; it is added to.
    learned: Learned
    # What a micro-batch is given, as `tf.TensorSpec`s.
    microbatch: Any
    mode: Literal["eager", "graph", "xla"]
    # The bytes that are in memory before a step, which are part of its peak.
    in_use: int
    # Runs the step by a plan, and tells what it took, or `None` if it ran out
    # of memory. `None` leaves it at the drawing.
    run: Callable[[Plan], Measurement | None] | None

    def plan(
        self, asked: int | float | str, reserved: int, argument: str = "budget"
    ) -> Plan:
        """Plans for a budget, of which so many bytes are not to be used.

        Args:
            asked: The budget, `"auto"`, or a share of the unplanned peak.
            reserved: The bytes.
            argument: What messages call the budget.

        Raises:
            InfeasibleBudget: If no plan stays within it.
        """
        resident = self.in_use + self.learned.extra_bytes
        if asked == "auto":
            return self._auto(resident)
        budget = asked
        if isinstance(asked, float):
            point = self.learned.chooser.everything
            everything = self._measured(point, None, resident)
            unplanned = everything.predicted_peak_bytes
            if asked == 1:
                # The peak that the share is one of.
                return dataclasses.replace(everything, budget_bytes=unplanned)
            budget = int(asked * (unplanned + reserved))
            resident = everything.resident_bytes
        target = int(budget) - reserved
        refusals = []
        for learned in filter(None, (self.learned, self.learned.in_tiles)):
            if not learned.chooser.is_possible:
                continue
            corrector = dataclasses.replace(self, learned=learned)
            best = corrector._within(target, resident)
            if best is not None:
                return best
            refused = corrector._infeasible(
                target, reserved, argument, repr(asked)
            )
            refusals.append(refused)
        raise min(refusals, key=lambda refused: refused.smallest_bytes)

    def _auto(self, resident: int) -> Plan:
        """The smallest peak for a bounded slowdown, and no more recomputation
        than that takes."""
        point = self.learned.chooser.auto()
        best = self._measured(point, None, resident)
        if self.mode != "xla" or self.run is None:
            return best
        # XLA orders operations itself: from some plan on, peaks stay the same.
        low, high = point.peak_bytes, best.predicted_peak_bytes - self.in_use
        for _ in range(tuning.MAX_ATTEMPTS // 2):
            if high - low <= tuning.DOUBT * high:
                break
            drawn = (low + high) // 2
            plan = self._measured(self._point(drawn), None, resident)
            if plan.predicted_peak_bytes <= best.predicted_peak_bytes:
                best, low = plan, drawn
            else:
                high = drawn
        return best

    def _within(self, budget: int, resident: int) -> Plan | None:
        """The fastest plan that stays within the budget in a dry run."""
        room = max(budget - self.in_use, 0)
        target = budget - int(tuning.MARGIN * room)
        best = None
        if known := self._known_within(target):
            point = min(known, key=lambda point: point.seconds)
            best = self._measured(point, budget, self.in_use)
            if target - best.predicted_peak_bytes <= tuning.DOUBT * room:
                return best
        tried: set[tuple] = set()
        for attempt in range(tuning.MAX_ATTEMPTS):
            low, high = self._bounds(target)
            drawn = target - resident
            if best is not None and high is not None:
                if high - low <= tuning.MARGIN * room:
                    break
                if not low < drawn < high:
                    drawn = (low + high) // 2
            point = self._point(drawn)
            is_last = attempt == tuning.MAX_ATTEMPTS - 1
            if best is None and (is_last or point.segments in tried):
                point = self.learned.chooser.smallest
            if point.segments in tried:
                break
            tried.add(point.segments)
            plan = self._measured(point, budget, resident)
            excess = plan.predicted_peak_bytes - target
            if excess <= 0:
                if best is None or plan.slowdown < best.slowdown:
                    best = plan
                if not plan.segments or -excess <= tuning.DOUBT * room:
                    break
            # The more attempts have failed, the more is left free.
            resident = plan.resident_bytes + attempt * max(excess, 0)
        return best

    def _bounds(self, target: int) -> tuple[int, int | None]:
        """The highest drawn peak of a plan that stayed within the target, and
        the lowest above it of one that did not."""
        within = self._known_within(target)
        low = max((point.peak_bytes for point in within), default=0)
        peaks = [p.peak_bytes for p in self.learned.measured if p not in within]
        return low, min((peak for peak in peaks if peak > low), default=None)

    def _known_within(self, target: int) -> list[Point]:
        """The plans that stayed within a target, with what is in use now."""
        return [
            point
            for point, extra in self.learned.measured.items()
            if point.peak_bytes + extra + self.in_use <= target
        ]

    def _point(self, budget_bytes: int) -> Point:
        try:
            return self.learned.chooser.within(budget_bytes)
        except InfeasibleBudget:
            # By the drawing; only a dry run can tell.
            return self.learned.chooser.smallest

    def _infeasible(
        self, budget: int, reserved: int, argument: str, written: str
    ) -> InfeasibleBudget:
        chooser = self.learned.chooser
        drawn = chooser.smallest.peak_bytes
        measured = self.learned.measured.items()
        peaks = [point.peak_bytes + extra for point, extra in measured]
        smallest = min(peaks, default=drawn)
        bound = min(chooser.lower_bound_bytes, drawn)
        bound = min(bound + self.learned.extra_bytes, smallest)
        # A little more is in memory when it is asked for.
        least = self.in_use + smallest / (1 - 2 * tuning.MARGIN)
        return InfeasibleBudget(
            budget + reserved,
            math.ceil(least) + reserved,
            bound + self.in_use + reserved,
            argument,
            written,
        )

    def _measured(self, point: Point, budget, resident) -> Plan:
        """A plan, with the peak that it was seen to have if it can be run."""
        plan = self._drawn(point, budget, resident)
        if self.run is None:
            return plan
        if point not in self.learned.measured:
            measurement = self.run(plan)
            if measurement is None:  # How much more it needs is not known.
                peak = max(plan.predicted_peak_bytes, budget or 0)
                peak += int(tuning.DOUBT * point.peak_bytes)
                measurement = Measurement(peak, math.inf)
            extra = measurement.peak_bytes - point.peak_bytes - self.in_use
            self.learned.measured[point] = extra
        self.learned.extra_bytes = extra = self.learned.measured[point]
        return self._drawn(point, budget, self.in_use + extra)

    def _drawn(self, point: Point, budget, resident) -> Plan:
        chooser = self.learned.chooser
        solver = chooser.solver
        within = point.peak_bytes if budget is None else budget - resident
        return Plan(
            network=chooser.network,
            segments=point.segments,
            batch=batches.to_json(self.microbatch),
            mode=self.mode,
            solver=solver if isinstance(solver, str) else "genetic",
            budget_bytes=budget,
            resident_bytes=resident,
            lower_bound_seconds=chooser.lower_bound_seconds(within),
        )
