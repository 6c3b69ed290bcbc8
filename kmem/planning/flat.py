"""Flat plans: a network cut into segments that hold no others.

A set of cuts becomes a plan, and a plan is judged by the simulator. The stages
after the last cut are kept, since nothing would be freed by running them again
at once. Two solvers make such plans: `sqrt`, and MegEngine's search, from its
description. Like `SublinearMemoryConfig`, that cuts the stages into blocks
whenever they keep more than a threshold, tries thresholds on a logarithmic and
then a linear scale and again around the best, improves the set of cuts by a
genetic search if asked to, and gives speed back at the end. It looks for the
smallest peak: time counts only between equals. It knows no bound on what it
misses.
"""

import dataclasses
import functools
import math
import os
import random

import numpy as np

from kmem.base.checks import non_negative_int
from kmem.base.checks import positive_int
from kmem.base.checks import set_fields
from kmem.planning.bounds import check_budget
from kmem.planning.graph import simulate
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.tiles import contracted


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan and what it costs, as it was simulated."""

    peak_bytes: int
    seconds: float
    segments: tuple[Segment, ...]


def evaluate(network: Network, segments: tuple[Segment, ...]) -> Point:
    """Simulates a plan."""
    drawn, others = contracted(network, segments)
    result = simulate(drawn.graph, drawn.schedule(others))
    return Point(result.peak_bytes, result.seconds, segments)


class Cutter:
    """Makes plans of cuts, which are stages before which to cut.

    Attributes:
        places: Where it may be cut, in order, without its first stage.
    """

    def __init__(self, network: Network):
        self.network = network
        self.places = places(network)
        self._starts = [0, *self.places]
        self._allowed = network.allowed(self._starts)
        self._block = {start: n for n, start in enumerate(self._starts)}

    def cut(self, cuts) -> tuple[Segment, ...]:
        """The segments between cuts, and before the first.

        Where a part between cuts may not be a segment, the longest within it
        that may be are.
        """
        segments, begin = [], 0
        for end in sorted(self._block[cut] for cut in cuts):
            while begin < end:
                stops = np.flatnonzero(self._allowed[begin, : end + 1])
                stop = int(stops[-1]) if len(stops) else begin + 1
                if len(stops):
                    starts = self._starts
                    segments.append(Segment(starts[begin], starts[stop]))
                begin = stop
        return tuple(segments)

    def evaluate(self, cuts) -> Point:
        """Simulates the plan of cuts."""
        return evaluate(self.network, self.cut(cuts))


def places(network: Network) -> list[int]:
    """Where a network may be cut: stages, without the first, in order."""
    count = len(network.stages)
    allowed = {p for line in network.lines for p in line} or range(count)
    return [p for p in sorted(allowed) if 0 < p < count]


def crossing_bytes(network: Network) -> np.ndarray:
    """Stage -> the bytes made before it that it or a later one reads."""
    last_reader: dict[int, int] = {}
    for index, stage in enumerate(network.stages):
        for value in stage.inputs:
            last_reader[value] = index
    change = np.zeros(len(network.stages) + 1, np.int64)
    for index, stage in enumerate(network.stages):
        for value in stage.outputs:
            if value in last_reader:
                size = network.value_bytes[value]
                change[index + 1] += size
                change[last_reader[value] + 1] -= size
    return np.cumsum(change)[:-1]


def kept_bytes(network: Network) -> np.ndarray:
    """Stage -> the bytes that it makes for a backward pass to read."""
    stages = [stage for stage in network.stages if stage.has_backward]
    kept_values = {value for stage in stages for value in stage.kept}
    sizes = network.value_bytes
    return np.array(
        [
            sum(sizes[v] for v in kept_values.intersection(stage.outputs))
            + stage.residual_bytes * stage.has_backward
            for stage in network.stages
        ]
    )


def sqrt(
    network: Network,
    num_segments: int | None = None,
    budget_bytes: int | None = None,
) -> Point:
    """Cuts a network into segments of about equal bytes.

    Chen, Xu, Zhang, Guestrin (2016): a network of n equal stages in sqrt(n)
    segments holds what enters each segment and, in turn, what one of them
    keeps: about 2 sqrt(n) values rather than n, for at most one more forward
    pass. Segments are equal here in the bytes that they keep, and are cut
    where little crosses. Nothing is optimal about it.

    Args:
        num_segments: How many parts; the last is kept. By default that with
            the smallest simulated peak of those up to twice the square root
            of the number of stages, or the fastest within the budget.
        budget_bytes: The peak, with everything that is in memory.

    Raises:
        InfeasibleBudget: If no number of segments fits.
    """
    most = 2 * math.isqrt(len(network.stages)) + 1
    numbers = [num_segments] if num_segments else range(1, most + 1)
    cutter = Cutter(network)
    points = [cutter.evaluate(_equal(cutter, n)) for n in numbers]
    smallest = min(points, key=lambda p: (p.peak_bytes, p.seconds))
    if budget_bytes is None:
        return smallest
    check_budget(network.graph, budget_bytes, smallest.peak_bytes)
    within = [p for p in points if p.peak_bytes <= budget_bytes]
    return min(within, key=lambda p: (p.seconds, p.peak_bytes))


def _equal(cutter: Cutter, num_segments: int) -> list[int]:
    """Cuts at the narrowest place near each of the equal shares."""
    total_kept = np.cumsum([0, *kept_bytes(cutter.network)])
    crossing = crossing_bytes(cutter.network)
    cuts = []
    for number in range(1, num_segments):
        share = total_kept[-1] / num_segments
        distance = abs(total_kept - number * share)
        near = [p for p in cutter.places if distance[p] <= share / 4]
        if near:
            # Of equally narrow ones, the nearest.
            cuts.append(min(near, key=lambda p: (crossing[p], distance[p])))
    return cuts


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
        num_worker: MegEngine's planner threads; has no effect.

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
            non_negative_int(getattr(self, name), name)


def search(
    network: Network,
    options: Genetic | None = None,
    budget_bytes: int | None = None,
) -> Point:
    """Searches for the flat segments with the smallest peak.

    Speed is given back while the peak stays below `options.lb_memory_mb`, or
    the budget, if these are larger than the smallest peak. `num_worker` has
    no effect: one worker takes less time than it takes to start others. The
    budget is that of the peak, with everything that is in memory;
    `InfeasibleBudget` if the smallest peak found is larger.
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
        cutter = Cutter(network)
        self._kept = np.cumsum([0, *kept_bytes(network)])
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


def _faster(network: Network, point: Point, enough_bytes: int) -> Point:
    """Keeps what is most expensive to run again while the peak allows."""
    enough_bytes = max(enough_bytes, point.peak_bytes)
    stages = network.stages

    def seconds(segment: Segment) -> float:
        again, _ = network.again(segment)
        return sum(stages[index].forward_seconds for index in again)

    for segment in sorted(point.segments, key=seconds, reverse=True):
        others = tuple(s for s in point.segments if s != segment)
        without = evaluate(network, others)
        if without.peak_bytes <= enough_bytes:
            point = without
    return point
