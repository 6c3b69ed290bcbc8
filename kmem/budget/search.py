"""Looks for the fastest step within a memory budget.

Numbers come first: what changes none (nothing, recomputation, and micro-batches
where no layer keeps statistics of one or draws random numbers for it) is
chosen before what does, and then the fewest micro-batches, unless time may
decide. What each is expected to take is computed (menu.py), so that little is
run of what is not chosen; what is chosen was measured in a dry run. Of two that
take the same time the one with larger micro-batches is chosen, and they do
unless each of some steps in turns says otherwise. What this does not do: split
an example.
"""

import contextlib
import dataclasses
import math
import warnings

from kmem import memory
from kmem.budget import tuning
from kmem.budget.menu import NOT_DRAWN
from kmem.budget.menu import Menu
from kmem.budget.report import Choice
from kmem.budget.trial import Trial
from kmem.budget.trial import longest_in_turns
from kmem.budget.trial import with_count
from kmem.fit.session import Session
from kmem.graph import control
from kmem.options import MemoryOptions
from kmem.planning.flat import Point
from kmem.step import batches
from kmem.step import capture

# How many plans are run for one number of micro-batches.
_MAX_PLANS = tuning.MAX_ATTEMPTS // 2


class Search:
    """The options that were tried.

    Args:
        menu: The options.
        may_differ: Whether time decides what changes statistics.

    Attributes:
        best: The best that fits, or `None`.
        tried: What each takes; of those that were not run, what is computed.
        least: What was seen to need the least.
    """

    def __init__(self, menu: Menu, may_differ: bool):
        self._menu = menu
        self._may_differ = may_differ
        # What ran each choice, in micro-batches of which size.
        self._ran: dict[Choice, tuple[Trial, int]] = {}
        self.best: Choice | None = None
        self.tried: list[Choice] = []
        self.least: Choice | None = None

    def session(self, best: Choice) -> Session:
        """What takes the best step."""
        if best.plan is not None and best.plan.mode == "xla":
            # Warns, as does a plan that was asked for.
            control.order_for_plans()
        session = self._ran[best][0].session
        if session is not None and session.options == best.options:
            return session
        # A few micro-batches of it were run, or it was measured before.
        return Session(self._menu.model, best.options, best.plan)

    def plain(self, options: MemoryOptions) -> None:
        """Tries a step without any of kmem's choices."""
        self._keep(self._unplanned(options, self._menu.counts(options)[:1]))

    def of(self, options: MemoryOptions) -> Choice:
        """What a step without any of kmem's choices takes, or would take."""
        (count, *_) = self._menu.counts(options)
        given = with_count(options, count)
        ran = [choice for choice in self.tried if choice.options == given]
        return ran[0] if ran else self._menu.expected(options, count)

    def run(
        self, allowed: list[MemoryOptions], evicting: list[MemoryOptions]
    ) -> None:
        """Looks for the best step under any of some options, of which a plain
        one under those that were given was tried; and under others, which stay
        within the budget by themselves, before numbers change."""
        self._menu.most_trials = len(allowed) * (2 + _MAX_PLANS)
        # No option changes which process has which examples.
        counts = exact = self._menu.counts(allowed[0])
        differing = []
        if counts[1:] and self._menu.is_for_one_size(allowed[0]):
            counts = exact = counts[:1]
        if counts[1:]:
            try:
                differing = self._layers_that_differ(allowed[0])
            except (capture.CannotSplit, TypeError):
                # A step of one's own may need a known number of rows.
                counts = exact = counts[:1]
        if differing and not self._may_differ:
            exact = counts[:1]
        for options in allowed:
            self._fastest(options, exact)
        self._in_tiles(allowed, exact)
        for options in evicting if self.best is None else []:
            # A model may have no evictions, or leave nothing to evict.
            with contextlib.suppress(ValueError):
                self._keep(self._fitting(options))
        if exact is not counts:
            self._differing(allowed, counts)
        for options in allowed:
            if self.best is None:
                self._smallest(options, self._leanest(options, counts))
        if self.best and self.best.options.num_parts > 1:
            self._check_loss(self.best.options, differing)

    def again(self, before: Choice) -> Choice | None:
        """What an earlier run chose, if it fits."""
        self._menu.say(before.options, again=True)
        try:
            if before.options.num_parts > 1:
                differing = self._layers_that_differ(before.options)
                self._check_loss(before.options, differing)
        except capture.CannotSplit:
            return None
        trial = self._menu.trial_of(before.options, before.plan)
        choice = self._run(before.options, trial)
        if choice is not None and self._menu.fits(choice):
            self.best = choice
        return self.best

    def _check_loss(self, options: MemoryOptions, differing: list) -> None:
        """Warns of a loss that may compare the examples of a batch."""
        if self._menu.model in differing:
            warnings.warn(
                "kmem takes the loss for a mean over the examples of each "
                "micro-batch. One that compares the examples of a batch, such "
                "as a contrastive one, needs them together: train with a "
                "larger `memory_budget`, or smaller batches. Received: "
                f"{self._menu.model.name}, in {options.num_parts} "
                "micro-batches, with a loss that is not Keras's alone",
                stacklevel=2,
            )

    def _in_tiles(self, allowed: list, counts: list[int]) -> None:
        """Tries images in tiles, if nothing else fits."""
        for options in allowed:
            if self.best is None:
                count = self._leanest(options, counts)
                given = self._menu.with_plan(options, count)
                self._menu.most_trials += _MAX_PLANS
                self._keep(self._planned(given, in_tiles=True))

    def _differing(self, allowed: list, counts: list[int]) -> None:
        """Tries the fewest micro-batches, whose numbers are others, if nothing
        else fits: what nearly does is known for sure once it was run."""
        for options in allowed:
            nearly = self._menu.drawn(options, counts[0]) is not None
            if self.best is None and nearly:
                self._smallest(options, counts[0])
        for count in counts[1:]:
            if self.best is None:
                for options in allowed:
                    self._fastest(options, [count])
        self._in_tiles(allowed, counts)

    def _layers_that_differ(self, options: MemoryOptions) -> list:
        """The layers whose numbers are others in micro-batches."""
        # They are the same in shards.
        two = dataclasses.replace(with_count(options, 2), sharding=None)
        session = Session(self._menu.model, two)
        specs = batches.with_rows(self._menu.batch, None)
        try:
            return session.layers_that_differ(specs)
        except capture.NO_VALUE:
            if not self._menu.model.run_eagerly:
                raise
            return self._menu.model.layers  # Nobody knows.

    def _fastest(self, options: MemoryOptions, counts: list[int]) -> None:
        """Tries the fewest micro-batches that fit, more of them while that is
        faster, and a plan for fewer if that may be."""
        choice = self._unplanned(options, counts)
        fewer = counts
        if choice is not None:
            place = counts.index(choice.options.num_parts)
            fewer = counts[:place]
            # In a trace that is there. What fits as a whole is not split.
            is_split = choice.options.num_parts > 1
            while self._keep(choice) and is_split and counts[place + 1 :]:
                place += 1
                choice = self._unplanned(options, counts[place : place + 1])
                if choice is None:
                    break
        drawn = (self._menu.drawn(options, count) for count in fewer)
        expected = list(filter(None, drawn))
        while expected:
            least = min(each.predicted_seconds for each in expected)
            # Of those that take about as long the one in the largest.
            first = next(
                each
                for each in expected
                if each.predicted_seconds <= (1 + tuning.DOUBT) * least
            )
            best = self.best.predicted_seconds if self.best else math.inf
            if first.predicted_seconds > (1 + tuning.DOUBT) * best:
                break
            planned = self._planned(first.options)
            # What was run is told of as it was measured.
            expected.remove(first)
            if planned is not None:
                self._keep(planned)
                break
        self.tried += expected

    def _leanest(self, options: MemoryOptions, counts: list[int]) -> int:
        """The most micro-batches or the fewest, whichever can do with less: a
        whole batch has more activations, and no second sum of gradients."""

        def least_bytes(count: int) -> float:
            with contextlib.suppress(*NOT_DRAWN):
                return self._menu.chooser(options, count).smallest.peak_bytes
            return math.inf

        return min(counts[-1], counts[0], key=least_bytes)

    def _smallest(self, options: MemoryOptions, count: int) -> None:
        """Tries what needs the least: an error tells of it if nothing fits."""
        menu = self._menu
        plain = with_count(options, count)
        planned = menu.with_plan(options, count)
        ran = {(c.options, c.plan and c.plan.segments) for c in self._ran}
        try:
            chooser = menu.chooser(options, count)
            points = chooser.smallest, chooser.in_tiles.smallest
        except NOT_DRAWN:
            return
        if (plain, None) not in ran and menu.may_fit(options, count):
            self._keep(self._fitting(plain))
        for point in dict.fromkeys(points):
            if (planned, point.segments) not in ran:
                self._keep(self._fitting(planned, point))

    def _unplanned(
        self, options: MemoryOptions, counts: list[int]
    ) -> Choice | None:
        """The first number of micro-batches that fits."""
        ran = {choice.options for choice in self.tried}
        for count in counts:
            given = with_count(options, count)
            if given not in ran and self._menu.may_fit(options, count):
                choice = self._fitting(given)
                if choice is not None:
                    return choice
        return None

    def _fitting(
        self, options: MemoryOptions, point: Point | None = None
    ) -> Choice | None:
        """Runs a step, and learns from it; returns what it takes if it fits."""
        if point is None:
            trial = self._menu.trial(options)
        else:
            trial = self._menu.planned_trial(options, point)
        choice = self._run(options, trial)
        if point is not None:
            self._menu.learn(options, point, choice)
        if choice is None:
            return None
        peak = choice.predicted_peak_bytes
        self.tried.append(choice)
        least = self.least.predicted_peak_bytes if self.least else math.inf
        if peak < (1 - tuning.MARGIN) * least:
            self.least = choice
        return choice if self._menu.fits(choice) else None

    def _run(self, options: MemoryOptions, trial: Trial) -> Choice | None:
        """What a step takes; `None` if it runs out of memory."""
        size = self._menu.size(options, options.num_parts)
        measurement = trial.measure(size)
        if measurement is None:
            return None
        peak, plan = self._menu.in_use + measurement.peak_bytes, trial.plan
        if plan is not None:
            more = peak - plan.simulation.peak_bytes
            plan = dataclasses.replace(plan, resident_bytes=more)
        choice = Choice(options, peak, measurement.seconds, None, plan)
        self._ran[choice] = trial, size
        return choice

    def _keep(self, choice: Choice | None) -> bool:
        """Keeps what fits, if anything does, if it is better than the best;
        returns whether it is."""
        if choice is None or (
            self.best is not None and not self._is_better(choice, self.best)
        ):
            return False
        self.best = choice
        return True

    def _is_better(self, choice: Choice, best: Choice) -> bool:
        """Whether it is faster, or takes as long in larger micro-batches."""
        ran, ran_best = self._ran[choice], self._ran[best]
        is_faster = choice.predicted_seconds < best.predicted_seconds
        is_larger = ran[1] >= ran_best[1]
        # Weights in shards would travel between any two steps.
        is_single = choice.options.sharding is best.options.sharding is None
        if is_faster == is_larger:
            return is_faster
        if is_single and memory.is_counted():
            larger, smaller = (ran, ran_best) if is_larger else (ran_best, ran)
            is_tie = longest_in_turns(smaller, larger) >= 1
        else:
            # One of them is to be faster beyond doubt.
            two = choice.predicted_seconds, best.predicted_seconds
            is_tie = min(two) >= (1 - tuning.DOUBT) * max(two)
        return is_larger if is_tie else is_faster

    def _planned(
        self, options: MemoryOptions, in_tiles: bool = False
    ) -> Choice | None:
        """Runs the best plan, and corrects it by what that tells; returns the
        fastest that fits."""
        menu, best = self._menu, None
        tried: set[tuple] = set()
        for _ in range(_MAX_PLANS):
            point = menu.point(options, options.num_parts, in_tiles)
            if point is None or point.segments in tried:
                break
            tried.add(point.segments)
            choice = self._fitting(options, point)
            if choice is not None:
                if best is None or (
                    choice.predicted_seconds < best.predicted_seconds
                ):
                    best = choice
                least = menu.in_use + (1 - tuning.DOUBT) * menu.room
                if choice.predicted_peak_bytes >= least:
                    break
        return best
