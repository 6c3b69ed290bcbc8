"""Flat plans: a network cut into segments that hold no others.

What `sqrt` here and `genetic` share: a set of cuts becomes a plan, and a plan
is judged by the simulator. The stages after the last cut are kept, since
nothing would be freed by running them again at once.
"""

import dataclasses
import math

import numpy as np

from kmem.planning.bounds import check_budget
from kmem.planning.graph import simulate
from kmem.planning.network import Network
from kmem.planning.network import Segment


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan and what it costs.

    Attributes:
        peak_bytes: Its simulated peak.
        seconds: Its simulated time.
        segments: The plan.
    """

    peak_bytes: int
    seconds: float
    segments: tuple[Segment, ...]


def evaluate(network: Network, segments: tuple[Segment, ...]) -> Point:
    """Simulates a plan."""
    result = simulate(network.graph, network.schedule(segments))
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
    return np.array(
        [
            sum(
                network.value_bytes[v]
                for v in stage.outputs
                if v in kept_values
            )
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
