"""Chooses a network's segments for a budget, by any of the solvers.

The optimal one: `kmem.planning.table` finds, for every budget at once, the
plan that takes the least time of all plans of nested segments (Beaumont et al.
2019), and `simulate` says what each of them takes to the byte. The table
counts some values for longer than they live, so a plan may be used for less
than what the table gave it. On a chain of values with sizes that fit in slots
both agree, and plans are optimal. Where the network has a host, what a segment
starts from may wait there (POFO, Beaumont et al. 2021, chooses among all
values). Not done: to send what is not recomputed, and schedules that are not
nested segments.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from kmem.planning import flat
from kmem.planning import tiles
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.bounds import check_budget
from kmem.planning.bounds import peak_lower_bound
from kmem.planning.bounds import seconds_lower_bound
from kmem.planning.line import Line
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.table import Table

# Enough for an exact division of small sizes, and for good plans of long
# networks in a few seconds: the slots are as many as make `_SPLITS` sums.
_SPLITS = 1e10
_FEWEST_SLOTS = 500
_MOST_SLOTS = 8000
_MOST_PLACES = 300


class ChainSolver:
    """The plans of a network for all budgets, from one table that tells
    `num_slots` sizes apart; by default what takes a few seconds."""

    def __init__(self, network: Network, num_slots: int | None = None):
        self._network = network
        places = _places(network)
        line = Line(network, places)
        if num_slots is None:
            slots = 6 * _SPLITS / line.num_blocks**3
            num_slots = int(np.clip(slots, _FEWEST_SLOTS, _MOST_SLOTS))
        self._starts = [0, *places, len(network.stages)]
        allowed = network.allowed(self._starts)
        self._table = Table(line, allowed, line.full_bytes, num_slots)
        extra = self._table.extra
        feasible = np.flatnonzero(np.isfinite(extra))
        lower = extra[feasible[1:]] < extra[feasible[:-1]]
        self._steps = feasible[np.concatenate([[True], lower])]
        self._points: dict[int, flat.Point] = {}

    def _point(self, step: int) -> flat.Point:
        """The plan at a step of the table, which falls at each."""
        if step not in self._points:
            blocks = self._table.plan(int(self._steps[step]))
            segments = _segments(blocks, self._starts)
            self._points[step] = flat.evaluate(self._network, segments)
        return self._points[step]

    @property
    def smallest(self) -> flat.Point:
        """The plan with the smallest peak."""
        return self._point(0)

    def within(self, budget_bytes: int) -> flat.Point:
        """The fastest plan whose peak is within a budget; `InfeasibleBudget` if
        there is none."""
        graph, smallest = self._network.graph, self.smallest.peak_bytes
        check_budget(graph, budget_bytes, smallest)
        steps = range(1, len(self._steps))
        step = bisect.bisect_right(
            steps, budget_bytes, key=lambda s: self._point(s).peak_bytes
        )
        return self._point(step)

    def smallest_within(self, seconds: float) -> flat.Point:
        """The plan with the smallest peak that takes at most this time, which
        is at least the network's."""
        steps = range(len(self._steps) - 1)
        step = bisect.bisect_left(
            steps, -seconds, key=lambda s: -self._point(s).seconds
        )
        return self._point(step)


def _places(network: Network) -> list[int]:
    """Where blocks begin.

    If there are too many places, one is taken of each few neighbours: that
    which the fewest bytes cross.
    """
    places = flat.places(network)
    if len(places) <= _MOST_PLACES:
        return places
    crossing = flat.crossing_bytes(network)
    groups = np.array_split(places, _MOST_PLACES)
    return [int(min(group, key=lambda p: crossing[p])) for group in groups]


def _segments(blocks, starts) -> tuple[Segment, ...]:
    return tuple(
        Segment(starts[first], starts[stop], _segments(inner, starts), on_host)
        for first, stop, inner, on_host in blocks
    )


MAX_SLOWDOWN = 1.3  # What "auto" accepts.


@dataclasses.dataclass(frozen=True)
class Chooser:
    """The plans of one solver (see `Remat`) for one network."""

    network: Network
    solver: str | flat.Genetic = "optimal"
    is_possible = True

    @functools.cached_property
    def everything(self) -> flat.Point:
        """The plan that keeps everything."""
        return flat.evaluate(self.network, ())

    @functools.cached_property
    def _chain(self) -> ChainSolver:
        return ChainSolver(self.network)

    @property
    def smallest(self) -> flat.Point:
        """The plan with the smallest peak."""
        if self.solver == "optimal":
            return self._chain.smallest
        return self._flat(None)

    def within(self, budget_bytes: int) -> flat.Point:
        """The fastest plan within a budget; `InfeasibleBudget` if the solver
        finds none."""
        if self.everything.peak_bytes <= budget_bytes:
            return self.everything
        if self.solver == "optimal":
            return self._chain.within(budget_bytes)
        return self._flat(budget_bytes)

    @functools.cached_property
    def in_tiles(self) -> "InTiles":
        """The same plans, and those with segments in tiles."""
        return InTiles(self)

    def auto(self) -> flat.Point:
        """The smallest peak whose slowdown is at most `MAX_SLOWDOWN`; of a
        solver that does not trade the two, the smallest peak."""
        if self.solver != "optimal":
            return self._flat(None)
        most = MAX_SLOWDOWN * self.everything.seconds
        return self._chain.smallest_within(most)

    @functools.cached_property
    def lower_bound_bytes(self) -> int:
        """No schedule has a smaller peak."""
        return peak_lower_bound(self.network.graph)

    def lower_bound_seconds(self, budget_bytes: int) -> float:
        """No schedule within the budget is faster, of segments or not."""
        bound = seconds_lower_bound(self.network.graph, budget_bytes)
        return bound if math.isfinite(bound) else self.everything.seconds

    def _flat(self, budget_bytes: int | None) -> flat.Point:
        if isinstance(self.solver, flat.Genetic):
            return flat.search(self.network, self.solver, budget_bytes)
        return flat.sqrt(self.network, budget_bytes=budget_bytes)


# In how many tiles a segment may run, how many such segments there may be in a
# row, and at how many places the last one may end.
_NUM_TILES = 2, 4, 8, 16
_NUM_SEGMENTS = 1, 2, 3, 4
_MOST_ENDS = 6
# Each tile's run of a stage is traced by itself, which takes 0.1 s or so.
_MOST_RUNS = 200


@dataclasses.dataclass(frozen=True)
class InTiles:
    """The same with one or more segments in tiles, one after another.

    These begin where a row of stages does that may run so, and are equal parts
    of it. A chooser plans for what is left of the network, with a stage for
    each of them.
    """

    plain: Chooser

    @property
    def network(self) -> Network:
        return self.plain.network

    @property
    def solver(self) -> str | flat.Genetic:
        return self.plain.solver

    @functools.cached_property
    def _choosers(self) -> list[tuple[tuple[Segment, ...], Chooser]]:
        """By the segments in tiles, the chooser of the rest."""
        network, solver = self.network, self.solver
        return [
            (each, Chooser(tiles.contracted(network, each)[0], solver))
            for each in dict.fromkeys(_candidates(network))
        ]

    @property
    def is_possible(self) -> bool:
        """Whether there are such segments."""
        return bool(self._choosers)

    @property
    def lower_bound_bytes(self) -> int:
        """No schedule with these segments has a smaller peak."""
        bounds = [rest.lower_bound_bytes for _, rest in self._choosers]
        return min(bounds, default=self.plain.lower_bound_bytes)

    @functools.cached_property
    def smallest(self) -> flat.Point:
        """The plan with the smallest peak."""
        best = self.plain.smallest
        for segments, rest in sorted(
            self._choosers, key=lambda pair: pair[1].lower_bound_bytes
        ):
            if rest.lower_bound_bytes >= best.peak_bytes:
                break
            if rest.smallest.peak_bytes < best.peak_bytes:
                best = self._point(segments, rest.smallest)
        return best

    def within(self, budget_bytes: int) -> flat.Point:
        """The fastest plan within a budget; `InfeasibleBudget` if there is
        none."""
        best = None
        for segments, rest in sorted(
            self._choosers, key=lambda pair: pair[1].everything.seconds
        ):
            if best and rest.everything.seconds >= best.seconds:
                break
            if rest.lower_bound_bytes > budget_bytes:
                continue
            try:
                point = rest.within(budget_bytes)
            except InfeasibleBudget:
                continue
            if best is None or point.seconds < best.seconds:
                best = self._point(segments, point)
        return best or self.plain.within(budget_bytes)

    def lower_bound_seconds(self, budget_bytes: int) -> float:
        """No schedule is faster."""
        return self.plain.everything.seconds

    def _point(self, in_tiles, point: flat.Point) -> flat.Point:
        segments = point.segments
        for each in in_tiles:
            segments = tiles.expanded(segments, each)
        return dataclasses.replace(point, segments=segments)


def _candidates(network: Network) -> Iterator[tuple[Segment, ...]]:
    """Segments in tiles that may be one after another."""
    for row in _rows(network):
        step = -(-(len(row) - 1) // _MOST_ENDS)
        for end, parts in itertools.product(
            range(len(row) - 1, 0, -step), _NUM_SEGMENTS
        ):
            cuts = np.linspace(0, end, parts + 1).round().astype(int)
            spans = [*itertools.pairwise(row[cut] for cut in cuts)]
            if parts > end or not all(_may_be(network, *s) for s in spans):
                continue
            for count in _NUM_TILES:
                cut = [tiles.tiles_of(network, *span, count) for span in spans]
                is_short = count * (row[end] - row[0]) <= _MOST_RUNS
                if is_short and min(map(len, cut)) > 1:
                    yield tuple(
                        Segment(*span, tiles=each)
                        for span, each in zip(spans, cut, strict=True)
                    )


def _rows(network: Network) -> Iterator[list[int]]:
    """Where segments in tiles may begin and end: for each row of stages that
    may run so its first place, and those up to which it may be one."""
    places = [0, *flat.places(network), len(network.stages)]
    row = places[:1]
    for start, stop in itertools.pairwise(places):
        stages = network.stages[start:stop]
        if all(stage.window and stage.recomputable for stage in stages):
            row += [stop] * _may_be(network, row[0], stop)
            continue
        if len(row) > 1:
            yield row
        row = [stop]


def _may_be(network: Network, start: int, stop: int) -> bool:
    """Whether stages `start` to `stop - 1` may be a segment in tiles."""
    is_one = tiles.ends(network, start, stop) is not None
    return is_one and network.allows(start, stop)
