"""What the steps of a model are expected to take, by the options.

Of all options few are run: the layers tell of all sizes of micro-batches and
of all plans, and one trace serves all sizes (trial.py).
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf

from kmem.budget import tuning
from kmem.budget.report import Choice
from kmem.budget.report import describe
from kmem.budget.trial import Drawing
from kmem.budget.trial import Trial
from kmem.budget.trial import enough_parts
from kmem.budget.trial import model_key
from kmem.budget.trial import with_count
from kmem.graph import control
from kmem.keras_graph import profiling
from kmem.options import MemoryOptions
from kmem.options import Remat
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.choosing import Chooser
from kmem.planning.flat import Point
from kmem.planning.plan import Plan
from kmem.sharding import agreeing
from kmem.step import batches
from kmem.step import comparing

# Why layers tell nothing: a model cannot be recorded, or one of its layers has
# no room by itself.
NOT_DRAWN = ValueError, tf.errors.ResourceExhaustedError


class Menu:
    """The options for steps with one batch.

    Args:
        model: The model, with its variables.
        batch: Its batch, as `tf.TensorSpec`s.
        budget: The peak, less what of it is not to be used.
        in_use: What is in memory before a step, in bytes.
        verbose: 1 shows progress.
        spec: What `fit`'s graph knows of the batches.

    Attributes:
        room: What a step may take besides what is in memory.
        most_trials: How many options are going to be tried, at most.
        key: What the model's steps are known by; nothing if only it knows.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        budget: int,
        in_use: int,
        verbose: int,
        spec: Any = None,
    ):
        self.model = model
        self.batch = batch
        self.in_use = in_use
        self.room = int((1 - tuning.MARGIN) * max(budget - in_use, 0))
        self.most_trials = 1
        self._verbose = verbose
        self._spec = spec
        self._num_trials = 0
        self._remat = Remat(budget=max(budget, 1))
        self._batch_size = batches.num_rows(batch) or 1
        # How many replicas the memory is for: logical CPUs share theirs.
        self._sharing = 1
        strategy = model.distribute_strategy
        if (replicas := strategy.num_replicas_in_sync) > 1:
            on_cpu = "CPU" in strategy.extended.worker_devices[0]
            self._sharing = replicas if on_cpu else 1
        # By options with few micro-batches: steps without a plan, and
        # what a plan's step needs beyond what was expected, for each example.
        self._trials: dict[MemoryOptions, Trial] = {}
        self._learned: dict[MemoryOptions, float] = {}
        # How many times as long a step takes as its layers by themselves.
        self._pace = 1.0
        # By options without micro-batches: what can be planned.
        self._drawings: dict[MemoryOptions, Drawing] = {}
        plain = self._drawing(MemoryOptions())
        self.key = model_key(model, plain, self._batch_size)

    def fits(self, choice: Choice) -> bool:
        """Whether it stays within the budget."""
        return choice.predicted_peak_bytes <= self.in_use + self.room

    def counts(self, options: MemoryOptions) -> list[int]:
        """In how many micro-batches a batch may come."""
        if options.microbatches is not None:
            return [options.microbatches.count]
        own = self.size(options, 1) if batches.can_be_split(self.batch) else 1
        return even_counts(own)

    def is_for_one_size(self, options: MemoryOptions) -> bool:
        """Whether a layer is made for batches of one size."""
        if not comparing.may_mix(self.model):
            return False  # Keras's own take batches of any size.
        whole, half = (self.size(options, count) for count in (1, 2))
        takes = self._drawing(options).takes
        return takes(whole) and not takes(half)

    def size(self, options: MemoryOptions, count: int) -> int:
        """How many examples a micro-batch has in each process."""
        own = -(-self._batch_size // agreeing.processes(options).size)
        return -(-own // count)

    def trial(self, options: MemoryOptions) -> Trial:
        """Steps without a plan, in micro-batches of any size."""
        given = self._key(options, options.num_parts)
        if given not in self._trials:
            self.say(options)
            self._trials[given] = self.trial_of(given, None)
        return self._trials[given]

    def _drawing(self, options: MemoryOptions) -> Drawing:
        given = self._key(options, 1)
        if given not in self._drawings:
            self._drawings[given] = Drawing(
                *(self.model, self.batch, given, self.room, self._verbose)
            )
        return self._drawings[given]

    def chooser(self, options: MemoryOptions, count: int) -> Chooser:
        """The plans for so many micro-batches."""
        size = self.size(options, count)
        return self._drawing(options).at(size, count > 1)

    def may_fit(self, options: MemoryOptions, count: int) -> bool:
        """Whether a step without a plan is worth a run: what it makes, without
        workspace, is not too much beyond doubt. TensorFlow orders such a step,
        so that nothing but a run tells its peak."""
        drawing, size = self._drawing(options), self.size(options, count)
        try:
            least = drawing.least_bytes(size, count > 1)
        except ValueError:
            return True
        return self._sharing * least <= (1 + tuning.DOUBT) * self.room

    def expected(self, options: MemoryOptions, count: int) -> Choice:
        """What a step without a plan is going to take, by its layers."""
        given = with_count(options, count)
        try:
            everything = self.chooser(options, count).everything
        except NOT_DRAWN:
            return Choice(given, self.in_use + self.room + 1, math.inf)
        peak = self.in_use + self._sharing * everything.peak_bytes
        return Choice(given, peak, self._pace * count * everything.seconds)

    def planned_trial(self, options: MemoryOptions, point: Point) -> Trial:
        """Steps with a plan."""
        self.say(options)
        count = options.num_parts
        size = self.size(options, count)
        drawing = self._drawing(options)
        chooser = self.chooser(options, count)
        plan = Plan(
            network=drawing.network(size, count > 1),
            segments=point.segments,
            batch=batches.to_json(batches.with_rows(self.batch, size)),
            mode=profiling.mode(self.model, options),
            solver="optimal",
            budget_bytes=max(self.in_use + self.room, 1),
            resident_bytes=self.in_use,
            lower_bound_seconds=chooser.lower_bound_seconds(point.peak_bytes),
        )
        return self.trial_of(options, plan)

    def trial_of(self, options: MemoryOptions, plan: Plan | None) -> Trial:
        """Steps with a plan that was made, or without one."""
        drawing, recording = self._drawing(options), None
        if plan is not None:
            if plan.mode == "xla":
                control.prefer_little_memory()
            size = self.size(options, options.num_parts)
            recording = drawing.recording(size)
        return Trial(
            *(self.model, self.batch, options, drawing, self.key),
            *(plan, recording, self._spec),
        )

    def with_plan(self, options: MemoryOptions, count: int) -> MemoryOptions:
        """The options, with a plan for so many micro-batches."""
        return with_count(
            dataclasses.replace(options, remat=self._remat), count
        )

    def drawn(self, options: MemoryOptions, count: int) -> Choice | None:
        """What the best plan for so many micro-batches is expected to take;
        `None` if there is none."""
        point = self.point(options, count)
        if point is None:
            return None
        given = self.with_plan(options, count)
        peak = self.in_use + self._sharing * point.peak_bytes
        peak += self._more_bytes(options, count)
        return Choice(given, peak, self._pace * count * point.seconds)

    def point(
        self, options: MemoryOptions, count: int, in_tiles: bool = False
    ) -> Point | None:
        """The fastest plan that is expected to fit; the smallest if that is
        nearly so; `None` if there is none."""
        # One that needs a little more than expected is traced in vain.
        room = int((1 - tuning.MARGIN) * self.room)
        room = (room - self._more_bytes(options, count)) // self._sharing
        try:
            chooser = self.chooser(options, count)
            plans = chooser.in_tiles if in_tiles else chooser
            return plans.within(room)
        except InfeasibleBudget as error:
            nearly = error.smallest_bytes - room
            doubt = tuning.DOUBT * self.room / self._sharing
            return plans.smallest if nearly <= doubt else None
        except NOT_DRAWN:
            return None

    def _more_bytes(self, options: MemoryOptions, count: int) -> int:
        """What a planned step is expected to need beyond what is drawn."""
        learned = self._learned.get(self._key(options, count), 0)
        return int(learned * self.size(options, count))

    def learn(
        self, options: MemoryOptions, point: Point, choice: Choice | None
    ) -> None:
        """Takes note of what a planned step took beyond what is drawn; `None`
        ran out of memory."""
        count = options.num_parts
        # How much more that needs, who knows.
        own = (1 + tuning.DOUBT) * self.room
        if choice is not None:
            own = choice.predicted_peak_bytes - self.in_use
            self._pace = choice.predicted_seconds / (count * point.seconds)
        more = own - self._sharing * point.peak_bytes
        more /= self.size(options, count)
        self._learned[self._key(options, count)] = more

    def _key(self, options: MemoryOptions, count: int) -> MemoryOptions:
        """What options share that differ in the number of micro-batches, and
        in what is recomputed."""
        few = min(count, enough_parts(self.model, options))
        return dataclasses.replace(with_count(options, few), remat=None)

    def say(self, options: MemoryOptions, again: bool = False) -> None:
        """Shows what is tried, or again as it was chosen before."""
        self._num_trials += not again
        if self._verbose:
            number = f"{self._num_trials} of at most {self.most_trials}"
            which = "what it chose" if again else number
            print(f"memory_budget tries {which}: {describe(options)}")


def even_counts(rows: int) -> list[int]:
    """In how many micro-batches so many rows may come: equal ones, and powers
    of two where none has less than half the rows of another."""
    counts = []
    for count in range(1, rows + 1):
        size = -(-rows // count)
        first = rows - (-(-rows // size) - 1) * size
        is_power = count & (count - 1) == 0 and 2 * first >= size
        if rows % count == 0 or is_power:
            counts.append(count)
    return counts
