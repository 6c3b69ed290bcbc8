"""Looks for the fastest step within a memory budget.

A batch that does not fit can be computed in micro-batches, recomputed in part,
or both. A line (timing.py) tells in how many micro-batches it fits. More of
them cost what each does besides its examples, larger ones cost recomputation:
steps in more micro-batches tell how much the first is, and whether a plan
(planner.py) for larger ones can be faster. What is chosen was measured in a
dry run, in micro-batches of that size, and took steps in turns with what came
close to it. Where the device is not the host, weights and optimizer may stay
on the host (sharding/refusals.py). What this does not do: split an example.
"""

import dataclasses
import gc
import math
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.budget import planner
from kmem.budget import tuning
from kmem.budget.report import Choice
from kmem.budget.report import ImpossibleBudget
from kmem.budget.report import MemoryReport
from kmem.budget.timing import Excerpt
from kmem.budget.timing import Line
from kmem.budget.timing import Timing
from kmem.budget.timing import excerpt
from kmem.fit.session import Session
from kmem.options import MemoryOptions
from kmem.options import MicroBatches
from kmem.options import MixedPrecision
from kmem.options import Remat
from kmem.options import Sharding
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.plan import Plan
from kmem.sharding import agreeing
from kmem.sharding import refusals
from kmem.step import batches
from kmem.step.accumulation import build_optimizer


def choose(
    model: keras.Model,
    options: MemoryOptions,
    batch: Any,
    budget_bytes: int,
    reserved_bytes: int = 0,
    verbose: int = 0,
) -> tuple[Session, MemoryReport]:
    """Looks for the fastest step of a model within a budget.

    The model and its state stay as they are.

    Args:
        model: A compiled model.
        options: Those that hold anyway, and what may be chosen besides.
        batch: What `train_step` gets, as `tf.TensorSpec`s.
        budget_bytes: The device's peak during a step.
        reserved_bytes: What of it is not to be used.
        verbose: 1 shows progress.

    Returns:
        What trains so, and what there was to choose from.

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
    search = _Search(model, batch, budget_bytes, reserved_bytes, verbose)
    plain = search.run(given)
    for others in _allowed(model, given, options.allow):
        if search.best != plain:
            search.run(others)
    search.end()
    best = search.best
    if best is None:
        # What it names has to do when it is asked for, when the search has
        # left its traces in memory.
        left = planner.in_use_bytes(model, batch, given) - in_use
        asked: Any = options.memory_budget
        raise ImpossibleBudget(
            *(asked, budget_bytes, search.least), 2 * max(left, 0)
        )
    others = [choice for choice in search.tried if choice != best]
    others.sort(key=lambda choice: choice.predicted_seconds)

    def in_fit(choice: Choice) -> Choice:
        peak_bytes = choice.predicted_peak_bytes + reserved_bytes
        return dataclasses.replace(choice, predicted_peak_bytes=peak_bytes)

    return search.session(best), MemoryReport(
        budget_bytes=budget_bytes,
        plain=in_fit(plain),
        chosen=in_fit(best),
        alternatives=tuple(map(in_fit, others)),
        in_use_bytes=in_use,
        parameter_bytes=batches.num_bytes(model.variables),
        optimizer_bytes=batches.num_bytes(model.optimizer.variables),
        batch=batches.to_json(batch),
        is_measured=is_counted,
    )


def _allowed(model, given: MemoryOptions, allow: tuple[str, ...]) -> list:
    """Other options to hold, where they may be chosen."""
    allowed = [given]
    if refusals.can_be_offloaded(model, given):
        there = Sharding(cpu_offload=True)
        allowed.append(dataclasses.replace(given, sharding=there))
    if "sharding" in allow and given.sharding is not None:
        full = dataclasses.replace(given.sharding, stage="full")
        allowed.append(dataclasses.replace(given, sharding=full))
    if "mixed_precision" in allow and given.mixed_precision is None:
        half = MixedPrecision("bfloat16")
        allowed += [
            dataclasses.replace(each, mixed_precision=half) for each in allowed
        ]
    return allowed[1:]


class _Search:
    """The options that were tried.

    Args:
        model: The model, with its variables.
        batch: Its batch, as `tf.TensorSpec`s.
        budget_bytes: The budget.
        reserved_bytes: What of it is not to be used.
        verbose: 1 shows progress.

    Attributes:
        best: The fastest that fits, or `None`.
        tried: What each takes; of those that were not run, what the others
            let expect.
    """

    def __init__(self, model, batch, budget_bytes, reserved_bytes, verbose):
        self._model = model
        self._batch = batch
        self._batch_size = batches.num_rows(batch) or 1
        self._room = budget_bytes - reserved_bytes
        self._reserved = reserved_bytes
        self._target = int((1 - tuning.MARGIN) * self._room)
        self._verbose = verbose
        self._timing = Timing(model, batch)
        self.best: Choice | None = None
        # By what the best was measured, and what ran that, if it ran now.
        self._excerpt: Excerpt | None = None
        self._session: Session | None = None
        self.tried: list[Choice] = []
        # Budgets that are enough, as far as is known, each with for what.
        self._enough: list[tuple[int, MemoryOptions]] = []
        self._progress = keras.utils.Progbar(
            None, verbose=verbose, unit_name="dry run"
        )

    def _fits(self, choice: Choice) -> bool:
        """Whether it stays within the budget."""
        return choice.predicted_peak_bytes <= self._target

    @property
    def _best_seconds(self) -> float:
        return self.best.predicted_seconds if self.best else math.inf

    def session(self, best: Choice) -> Session:
        """What takes the best step."""
        if self._session and self._session.options == best.options:
            return self._session
        # It was measured with an excerpt, or before.
        return Session(self._model, best.options, best.plan)

    @property
    def least(self) -> tuple[int, MemoryOptions] | None:
        """The smallest budget in bytes that is known to be enough, and what
        stays within it; `None` if every step ran out of memory."""
        return min(self._enough, key=lambda each: each[0], default=None)

    def run(self, options: MemoryOptions) -> Choice:
        """Looks for the best step under options; returns the plain one."""
        num_processes = agreeing.processes(options).size
        is_alone = num_processes == 1
        counts = _counts(max(1, self._batch_size // num_processes))
        # Several would all end if one of them ran out of memory.
        most = self._target * (tuning.LINE_TOLERANCE if is_alone else 1)
        if options.microbatches is not None:
            counts = [options.microbatches.count]
            options = dataclasses.replace(options, microbatches=None)
        line = self._timing.line(options, self._target)
        plain = self._expected(options, counts[0], line)
        for index, count in enumerate(counts):
            expected = self._expected(options, count, line)
            # A single example needs so little that its peaks differ most.
            is_example = is_alone and count == self._batch_size
            peak = expected.predicted_peak_bytes
            if peak > most and not is_example:
                continue
            first = self._try(expected.options)
            if first is None:
                continue
            if not self._fits(first):
                # The line is wrong by as much for the others.
                most = self._target + peak - first.predicted_peak_bytes
                continue
            if index == 0:
                return first
            more, fewer = counts[index + 1 :], counts[:index][::-1]
            second = self._more_microbatches(options, more, first)
            least = [_least_seconds(c, plain, first, second) for c in fewer]
            self._fewer_microbatches(options, fewer, least)
            return dataclasses.replace(plain, predicted_seconds=least[-1])
        least = [plain.predicted_seconds] * len(counts)
        self._fewer_microbatches(options, counts[::-1], least)
        return plain

    def _add(self, choice: Choice) -> None:
        self.tried.append(choice)
        enough = int(choice.predicted_peak_bytes / (1 - tuning.MARGIN))
        self._enough.append((enough + self._reserved, choice.options))
        self._progress.update(len(self.tried), finalize=False)

    def end(self) -> None:
        """Ends the line that shows progress."""
        self._progress.update(len(self.tried), finalize=True)

    def _more_microbatches(
        self, options, counts: list[int], first: Choice
    ) -> Choice | None:
        """Goes on to more micro-batches while that is faster; returns what
        the first of these steps took, if it ran."""
        second, last = None, first
        for count in counts:
            choice = self._try(_with_count(options, count))
            second = second or choice
            if choice is None or not _is_faster(
                choice.predicted_seconds, last.predicted_seconds
            ):
                break
            last = choice
        return second

    def _fewer_microbatches(
        self, options, counts: list[int], least: list[float]
    ) -> None:
        """Goes on to fewer micro-batches, with plans, while that is faster.

        `least` is what a step in so many may take without a plan.
        """
        for count, seconds in zip(counts, least, strict=True):
            if not _is_faster(seconds, self._best_seconds):
                return
            if not self._plan(_with_count(options, count), seconds):
                return

    def _plan(self, options: MemoryOptions, seconds: float) -> bool:
        """Tries the best plan for options; returns whether it is the best of
        all that was tried.

        `seconds` is what the step would take without it.
        """
        best_seconds, less = self._best_seconds, 0
        budget = self._room + self._reserved
        options = dataclasses.replace(options, remat=Remat(budget=budget))
        step = excerpt(self._batch, options)
        for _ in range(tuning.MAX_PLANS):
            try:
                plan = planner.make_plan(
                    *(self._model, step.batch, step.options),
                    *("measured", self._verbose),
                    self._reserved + step.left_bytes + less,
                )
            except InfeasibleBudget as error:
                self._enough.append((error.smallest_bytes - less, options))
                return False
            except (ValueError, tf.errors.ResourceExhaustedError):
                # It cannot be planned, or a layer by itself has no room.
                return False
            expected = seconds * plan.slowdown
            if _is_faster(best_seconds, expected, tuning.DOUBT):
                peak = plan.highest_peak_bytes + step.left_bytes
                self._add(Choice(options, peak, expected, plan=plan))
                return False
            choice = self._try(options, plan)
            if choice is not None and self._fits(choice):
                return choice is self.best
            # What is given a batch, not an iterator, needs a little more.
            less += int(tuning.MARGIN * self._room)
            if choice is not None:
                less += max(choice.predicted_peak_bytes - self._room, 0)
        return False

    def _expected(self, options, count: int, line: Line) -> Choice:
        """What a step in so many micro-batches is going to take."""
        peak = line.peak_bytes(-(-self._batch_size // count))
        if count > 1 and agreeing.processes(options).size > 1:
            # The sum of gradients, which may take the place of those of a
            # micro-batch: who is alone can try.
            peak += batches.num_bytes(self._model.trainable_variables)
        seconds = self._batch_size * line.example_seconds
        return Choice(_with_count(options, count), peak, seconds)

    def _try(
        self, options: MemoryOptions, plan: Plan | None = None
    ) -> Choice | None:
        """Tries an option; returns `None` if it ran out of memory."""
        step = excerpt(self._batch, options, plan)
        measurement, session = self._timing.measure(step)
        if measurement is None:
            return None
        peak = measurement.peak_bytes + step.left_bytes
        seconds = measurement.seconds * step.times
        choice = Choice(options, peak, seconds, plan=plan)
        fits = self._fits(choice)
        if fits:
            choice = self._beside_best(choice, step, session)
        self._add(choice)
        if fits and choice.predicted_seconds < self._best_seconds:
            self.best, self._excerpt, self._session = choice, step, session
        return choice

    def _beside_best(
        self, choice: Choice, step: Excerpt, session: Session | None
    ) -> Choice:
        """The same, its time that of steps in turns with the best so far, if
        the two are close."""
        best, other = self.best, self._excerpt
        if best is None or other is None:
            return choice
        one, two = choice.predicted_seconds, best.predicted_seconds
        is_close = not (
            _is_faster(one, two, tuning.DOUBT)
            or _is_faster(two, one, tuning.DOUBT)
        )
        # Sharded weights would travel between any two steps.
        if not is_close or step.options.sharding or other.options.sharding:
            return choice
        ratio = self._timing.compare((step, other), (session, self._session))
        if ratio is None:
            return choice
        return dataclasses.replace(choice, predicted_seconds=ratio * two)


def _counts(batch_size: int) -> list[int]:
    """Numbers of micro-batches: those that make equal ones, and the powers of
    two."""
    powers = {2**k for k in range(batch_size.bit_length())}
    equal = {c for c in range(1, batch_size + 1) if batch_size % c == 0}
    return sorted(equal | powers)


def _least_seconds(
    count: int, plain: Choice, first: Choice, second: Choice | None
) -> float:
    """The least that a step in fewer micro-batches may take, if they had room.

    Args:
        count: How many micro-batches.
        plain: What the fewest would take by their examples alone.
        first: What a step in more took.
        second: What one in still more took, if it ran.
    """
    tried, seconds = first.options.num_parts, first.predicted_seconds
    most = tuning.MOST_OVERHEAD * seconds
    saved = most * (tried - count) / tried
    if second is not None:
        # Twice the examples save no more than they did from the second to
        # the first.
        doublings = math.log2(second.options.num_parts / tried)
        each = (second.predicted_seconds - seconds) / doublings
        # Steps differ by more when the machine is busy.
        saved = min(most, each * math.log2(tried / count))
    # Steps with a few examples tell as well.
    told = seconds - plain.predicted_seconds
    told *= (tried - count) / (tried - plain.options.num_parts)
    return seconds - max(0.0, saved, told)


def _with_count(options: MemoryOptions, count: int) -> MemoryOptions:
    microbatches = MicroBatches(count) if count > 1 else None
    return dataclasses.replace(options, microbatches=microbatches)


def _is_faster(one: float, other: float, gain=tuning.LEAST_GAIN) -> bool:
    return one < (1 - gain) * other
