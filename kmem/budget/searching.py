"""Looks for the quickest step within a memory budget.

A line (probing.py) tells in how many parts a batch fits. More parts cost what
each does besides its rows, larger ones cost recomputation: steps in more parts
tell how much the first is, and whether a plan (planner.py) for larger ones can
be quicker. What is chosen was rehearsed, in parts of that size (excerpts.py),
and took steps in turns with what came close to it. What this does not do:
split a row.
"""

import dataclasses
import math

import keras
import tensorflow as tf

from kmem.budget import planner
from kmem.budget import probing
from kmem.budget.choices import Choice
from kmem.budget.dry_runs import Rehearsals
from kmem.budget.excerpts import Excerpt
from kmem.budget.excerpts import excerpt
from kmem.fit.session import Session
from kmem.options import MemoryOptions
from kmem.options import MicroBatches
from kmem.options import Remat
from kmem.planning.errors import InfeasibleBudget
from kmem.planning.plan import Plan
from kmem.sharding import agreeing
from kmem.step import batches

# Steps do not all have the same peak.
_MARGIN = 0.01
# The line may be wrong by this much: a rehearsal tells.
_TOLERANCE = 1.1
# By how much another number of parts, or a plan, has to be quicker: more than
# two measurements of the same step differ by.
_LEAST_GAIN = 0.05
# What the parts of a step can cost besides their rows, as a share of it.
_MOST_OVERHEAD = 0.5
_AT_MOST_SECONDS = 5.0
_MAX_PLANS = 3
# By how much a plan may be quicker than expected, as far as seen.
_PLAN_GAIN = 0.2
# Ways of which neither is quicker by that much take steps in turns.
_CLOSE = 0.25


class Search:
    """The ways that were tried.

    Args:
        model: The model, with its variables.
        batch: Its batch, as `tf.TensorSpec`s.
        budget_bytes: The budget.
        reserved_bytes: What of it is not to be used.

    Attributes:
        best: The quickest that fits, or `None`.
        tried: What each takes; of those that were not rehearsed, what the
            others let expect.
    """

    def __init__(self, model, batch, budget_bytes, reserved_bytes, verbose):
        self._model = model
        self._batch = batch
        self._rows = batches.num_rows(batch) or 1
        self._budget = budget_bytes
        self._reserved = reserved_bytes
        self._target = int((1 - _MARGIN) * (budget_bytes - reserved_bytes))
        self._verbose = verbose
        self._rehearsals = Rehearsals(model, batch)
        self.best: Choice | None = None
        # What it was rehearsed by, and what ran that, if it ran now.
        self._ran: tuple[Excerpt, Session | None] | None = None
        self.tried: list[Choice] = []
        # The least peaks of plans, where none fits.
        self._least_planned: list[tuple[int, MemoryOptions]] = []
        self._progress = keras.utils.Progbar(
            None, verbose=verbose, unit_name="rehearsal"
        )

    def _fits(self, choice: Choice) -> bool:
        """Whether it keeps the budget."""
        return choice.predicted_peak_bytes <= self._target

    @property
    def session(self) -> Session | None:
        """What took the best step, if it took the whole batch, and now."""
        if self.best is None or self._ran is None:
            return None
        some, session = self._ran
        return session if some.options == self.best.options else None

    @property
    def least(self) -> tuple[int, MemoryOptions] | None:
        """The smallest budget in bytes that is known to be enough, and what
        keeps it; `None` if every step ran out of memory."""
        tried = (
            (int(c.predicted_peak_bytes / (1 - _MARGIN)), c.options)
            for c in self.tried
        )
        found = [*tried, *self._least_planned]
        if not found:
            return None
        peak, options = min(found, key=lambda each: each[0])
        return peak + self._reserved, options

    def run(self, options: MemoryOptions) -> Choice:
        """Looks for the best way under options; returns the plain one."""
        num_processes = agreeing.processes(options).size
        is_alone = num_processes == 1
        counts = _counts(max(1, self._rows // num_processes))
        # Several would all end if one of them ran out of memory.
        most = self._target * (_TOLERANCE if is_alone else 1)
        if options.microbatches is not None:
            counts = [options.microbatches.count]
            options = dataclasses.replace(options, microbatches=None)
        line = probing.draw(
            self._rehearsals, options, self._batch, self._target
        )
        plain = self._expected(options, counts[0], line)
        for index, count in enumerate(counts):
            expected = self._expected(options, count, line)
            # A single row needs so little that its peaks differ most.
            is_row = is_alone and count == self._rows
            peak = expected.predicted_peak_bytes
            if peak > most and not is_row:
                continue
            first = self._rehearsed(expected.options)
            if first is None:
                continue
            if not self._fits(first):
                # The line is wrong by as much for the others.
                most = self._target + peak - first.predicted_peak_bytes
                continue
            if index == 0:
                return first
            second = self._smaller_parts(options, counts[index + 1 :], first)
            fewer = counts[:index][::-1]
            least = [_least_seconds(c, plain, first, second) for c in fewer]
            self._larger_parts(options, fewer, least)
            return dataclasses.replace(plain, predicted_seconds=least[-1])
        least = [plain.predicted_seconds] * len(counts)
        self._larger_parts(options, counts[::-1], least)
        return plain

    def end(self) -> None:
        """Ends the line that shows progress."""
        self._progress.update(len(self.tried), finalize=True)

    def _smaller_parts(
        self, options, counts: list[int], first: Choice
    ) -> Choice | None:
        """Goes on to more parts while that is quicker; returns what the first
        of these steps took, if it ran."""
        second, last = None, first
        for count in counts:
            found = self._rehearsed(_in_parts(options, count))
            if found is None:
                break
            second = second or found
            if not _is_quicker(found.predicted_seconds, last.predicted_seconds):
                break
            last = found
        return second

    def _larger_parts(self, options, counts: list[int], least: list[float]):
        """Goes on to fewer parts, with plans, while that is quicker.

        `least` is what a step in so many parts may take without a plan.
        """
        for count, seconds in zip(counts, least, strict=True):
            best = self.best
            if best and not _is_quicker(seconds, best.predicted_seconds):
                return
            if not self._plan(_in_parts(options, count), seconds):
                return

    def _plan(self, options: MemoryOptions, seconds: float) -> bool:
        """Tries the best plan for parts; returns whether it is the best way.

        `seconds` is what the step would take without it.
        """
        before, less = self.best, 0
        within = dataclasses.replace(options, remat=Remat(budget=self._budget))
        some = excerpt(self._batch, within)
        for _ in range(_MAX_PLANS):
            try:
                plan = planner.make_plan(
                    self._model,
                    some.batch,
                    some.options,
                    "measured",
                    self._verbose,
                    self._reserved + some.left_bytes + less,
                )
            except InfeasibleBudget as error:
                peak = error.smallest_bytes - self._reserved - less
                self._least_planned.append((peak, within))
                return False
            except (ValueError, tf.errors.ResourceExhaustedError):
                # It cannot be planned, or a layer by itself has no room.
                return False
            expected = seconds * plan.slowdown
            # A plan's time is predicted less well than it is measured.
            if before and _is_quicker(
                before.predicted_seconds, expected, _PLAN_GAIN
            ):
                peak = plan.highest_peak_bytes + some.left_bytes
                self.tried.append(Choice(within, peak, expected, plan=plan))
                return False
            choice = self._rehearsed(within, plan)
            if choice is not None and self._fits(choice):
                return choice is self.best
            # What is given a batch, not an iterator, needs a little more.
            room = self._budget - self._reserved
            less += int(_MARGIN * room)
            if choice is not None:
                less += max(choice.predicted_peak_bytes - room, 0)
        return False

    def _expected(self, options, count: int, line: probing.Line) -> Choice:
        """What a step in so many parts is going to take."""
        peak = line.peak_bytes(-(-self._rows // count))
        if count > 1 and agreeing.processes(options).size > 1:
            # The sum of the parts' gradients, which may take the place of a
            # part's own: who is alone can try.
            peak += batches.num_bytes(self._model.trainable_variables)
        seconds = self._rows * line.row_seconds
        return Choice(_in_parts(options, count), peak, seconds)

    def _rehearsed(
        self, options: MemoryOptions, plan: Plan | None = None
    ) -> Choice | None:
        """Tries a way; returns `None` if it ran out of memory."""
        some = excerpt(self._batch, options, plan)
        seen, session = self._rehearsals.run(some, _AT_MOST_SECONDS)
        if seen is None:
            return None
        choice = Choice(
            options,
            seen.peak_bytes + some.left_bytes,
            seen.seconds * some.times,
            plan=plan,
        )
        fits = self._fits(choice)
        if fits:
            choice = self._beside_best(choice, some, session)
        self.tried.append(choice)
        self._progress.update(len(self.tried), finalize=False)
        if fits and (
            self.best is None
            or choice.predicted_seconds < self.best.predicted_seconds
        ):
            self.best, self._ran = choice, (some, session)
        return choice

    def _beside_best(
        self, choice: Choice, some: Excerpt, session: Session | None
    ) -> Choice:
        """The same, its time that of steps in turns with the best so far, if
        the two are close."""
        if self.best is None or self._ran is None:
            return choice
        seconds, best = choice.predicted_seconds, self.best.predicted_seconds
        if (
            _is_quicker(seconds, best, _CLOSE)
            or _is_quicker(best, seconds, _CLOSE)
            # Weights would travel between any two steps.
            or some.options.sharding is not None
            or self._ran[0].options.sharding is not None
        ):
            return choice
        other, its_session = self._ran
        ratio = self._rehearsals.compare((some, other), (session, its_session))
        if ratio is None:
            return choice
        ratio *= some.times / other.times
        return dataclasses.replace(choice, predicted_seconds=ratio * best)


def _counts(rows: int) -> list[int]:
    """Numbers of parts: those that make equal ones, and the powers of two."""
    powers = {2**k for k in range(rows.bit_length()) if 2**k <= rows}
    return sorted({c for c in range(1, rows + 1) if rows % c == 0} | powers)


def _least_seconds(
    count: int, plain: Choice, first: Choice, second: Choice | None
) -> float:
    """The least that a step in fewer parts may take, if they had room.

    Args:
        count: How many parts.
        plain: What the fewest parts would take by their rows alone.
        first: What a step in more parts took.
        second: What one in still more took, if it ran.
    """
    parts, seconds = first.options.num_parts, first.predicted_seconds
    most = _MOST_OVERHEAD * seconds
    saved = most * (parts - count) / parts
    if second is not None:
        # Twice the rows in a part save no more than they did from the second
        # to the first.
        doublings = math.log2(second.options.num_parts / parts)
        each = (second.predicted_seconds - seconds) / doublings
        # Steps differ by more when the machine is busy.
        saved = min(most, each * math.log2(parts / count))
    # Steps with a few rows tell as well.
    told = seconds - plain.predicted_seconds
    told *= (parts - count) / (parts - plain.options.num_parts)
    return seconds - max(0.0, saved, told)


def _in_parts(options: MemoryOptions, count: int) -> MemoryOptions:
    parts = MicroBatches(count) if count > 1 else None
    return dataclasses.replace(options, microbatches=parts)


def _is_quicker(
    seconds: float, than_seconds: float, gain: float = _LEAST_GAIN
) -> bool:
    return seconds < (1 - gain) * than_seconds
