"""MegEngine's search for flat segments, from its description.

Like `SublinearMemoryConfig`, it cuts the stages into blocks whenever they keep
more than a threshold, tries thresholds on a logarithmic and then a linear
scale and again around the best, improves the set of cuts by a genetic search
if asked to, and gives speed back at the end. It looks for the smallest peak:
time counts only between equals. It knows no bound on what it misses.
"""

import dataclasses
import functools
import os
import random

import numpy as np

from kmem.base.checks import is_integer
from kmem.base.checks import positive_int
from kmem.base.checks import set_fields
from kmem.planning import flat
from kmem.planning.bounds import check_budget
from kmem.planning.network import Network
from kmem.planning.network import Segment

_SEED = 2016


@dataclasses.dataclass(frozen=True)
class Genetic:
    """MegEngine's search for a recompute plan, as a solver of `Remat`.

    The fields and their defaults are those of MegEngine's
    `SublinearMemoryConfig`.

    Args:
        thresh_nr_try: Number of block-size thresholds tried.
        genetic_nr_iter: Generations of the genetic search; 0 is off.
        genetic_pool_size: Plans kept in each generation.
        lb_memory_mb: Stop saving memory below this many MB.
        num_worker: Planner threads; half of the processors by default.

    Raises:
        ValueError: If a field is not an integer of its range.
    """

    thresh_nr_try: int = 10
    genetic_nr_iter: int = 0
    genetic_pool_size: int = 20
    lb_memory_mb: int = 0
    num_worker: int = max(1, (os.cpu_count() or 2) // 2)

    def __post_init__(self):
        for name in ("thresh_nr_try", "genetic_pool_size", "num_worker"):
            set_fields(self, **{name: positive_int(getattr(self, name), name)})
        for name in ("genetic_nr_iter", "lb_memory_mb"):
            value = getattr(self, name)
            if not (is_integer(value) and value >= 0):
                raise ValueError(
                    f"`{name}` must be a non-negative integer. "
                    f"Received: {name}={value!r}"
                )


def search(
    network: Network,
    options: Genetic | None = None,
    budget_bytes: int | None = None,
) -> flat.Point:
    """Searches for the flat segments with the smallest peak.

    Speed is given back while the peak stays below `options.lb_memory_mb`, or
    the budget, if these are larger than the smallest peak. `num_worker` has
    no effect: one worker takes less time than it takes to start others.

    Args:
        budget_bytes: The peak, with everything that is in memory.

    Raises:
        InfeasibleBudget: If the smallest peak found is larger.
    """
    options = options or Genetic()
    search = _Search(network)
    cuts = search.sweep(options.thresh_nr_try)
    if options.genetic_nr_iter:
        cuts = search.evolve(
            cuts, options.genetic_nr_iter, options.genetic_pool_size
        )
    best = search.point(cuts)
    if budget_bytes is not None:
        check_budget(network.graph, budget_bytes, best.peak_bytes)
    enough = max(options.lb_memory_mb * 10**6, budget_bytes or 0)
    return _faster(network, best, enough)


class _Search:
    """Sets of cuts, and the smallest peak among them."""

    def __init__(self, network: Network):
        cutter = flat.Cutter(network)
        self._kept = np.cumsum([0, *flat.kept_bytes(network)])
        self._places = cutter.places
        self._random = random.Random(_SEED)
        self.point = functools.cache(cutter.evaluate)

    def _rank(self, cuts: frozenset[int]):
        point = self.point(cuts)
        return point.peak_bytes, point.seconds, sorted(cuts)

    def sweep(self, num_tries: int) -> frozenset[int]:
        """Tries thresholds: halves, then `num_tries` twice."""
        total = float(self._kept[-1])
        halves = [total / 2**power for power in range(24)]
        best = self._best_threshold(halves)
        around = np.linspace(best / 2, best * 2, num_tries)
        best = self._best_threshold([best, *around])
        step = 1.5 * best / max(num_tries, 2)
        around = np.linspace(max(best - step, 0), best + step, num_tries)
        best = self._best_threshold([best, *around])
        return self._cut_above(best)

    def _best_threshold(self, thresholds: list[float]) -> float:
        return min(thresholds, key=lambda t: self._rank(self._cut_above(t)))

    def _cut_above(self, threshold: float) -> frozenset[int]:
        """Cuts as soon as a block keeps more than the threshold."""
        cuts, begin = [], 0
        for place in self._places:
            if self._kept[place] - begin > threshold:
                cuts.append(place)
                begin = self._kept[place]
        return frozenset(cuts)

    def evolve(
        self, cuts: frozenset[int], num_iterations: int, pool_size: int
    ) -> frozenset[int]:
        """Mutates and crosses a pool of sets, and keeps the best of them."""
        pool = [cuts]
        for _ in range(num_iterations):
            children = [self._mutated(parent) for parent in pool]
            children += [
                self._crossed(*self._random.sample(pool, 2))
                for _ in range(pool_size if len(pool) > 1 else 0)
            ]
            children += [self._mutated(cuts) for _ in range(pool_size)]
            pool = sorted({*pool, *children}, key=self._rank)[:pool_size]
            cuts = pool[0]
        return cuts

    def _mutated(self, cuts: frozenset[int]) -> frozenset[int]:
        """Inserts, removes or moves a cut."""
        free = [place for place in self._places if place not in cuts]
        action = self._random.choice(("insert", "remove", "move"))
        changed = set(cuts)
        if cuts and action in ("remove", "move"):
            removed = self._random.choice(sorted(cuts))
            changed.remove(removed)
            if action == "move":
                free.sort(key=lambda place: abs(place - removed))
                free = free[:2]
        if free and action in ("insert", "move"):
            changed.add(self._random.choice(free))
        return frozenset(changed)

    def _crossed(self, one, other) -> frozenset[int]:
        """The cuts of one before some place, and of the other after it."""
        place = self._random.choice(self._places)
        return frozenset(
            {cut for cut in one if cut < place}
            | {cut for cut in other if cut >= place}
        )


def _faster(
    network: Network, point: flat.Point, enough_bytes: int
) -> flat.Point:
    """Keeps what is most expensive to run again while the peak allows."""
    enough_bytes = max(enough_bytes, point.peak_bytes)
    stages = network.stages

    def seconds(segment: Segment) -> float:
        again = network.recomputed(segment)
        return sum(stages[index].forward_seconds for index in again)

    for segment in sorted(point.segments, key=seconds, reverse=True):
        others = tuple(s for s in point.segments if s != segment)
        without = flat.evaluate(network, others)
        if without.peak_bytes <= enough_bytes:
            point = without
    return point
