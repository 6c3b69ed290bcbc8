"""About sqrt(n) equal segments, as Chen, Xu, Zhang, Guestrin (2016) have it.

A network of n equal stages in sqrt(n) segments holds what enters each segment
and, in turn, what one of them keeps: about 2 sqrt(n) values rather than n,
for at most one more forward pass. Segments are equal here in the bytes that
they keep, and are cut where little crosses. Nothing is optimal about it; the
solver for chains gives more for less.
"""

import math

import numpy as np

from kmem.planning import flat
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.bounds import peak_lower_bound
from kmem.planning.network import Network
from kmem.planning.network import Segment


def segments(
    network: Network,
    num_segments: int | None = None,
    budget_bytes: int | None = None,
) -> tuple[Segment, ...]:
    """Cuts a network into segments of about equal bytes.

    Args:
        network: The network.
        num_segments: How many parts; the last is kept. By default that with
            the smallest simulated peak of those up to twice the square root
            of the number of stages, or the fastest within the budget.
        budget_bytes: The peak, with everything that is in memory.

    Raises:
        InfeasibleBudget: If no number of segments fits.
    """
    if num_segments is None:
        most = 2 * math.isqrt(len(network.stages)) + 1
        numbers = range(1, most + 1)
    else:
        numbers = [num_segments]
    cutter = flat.Cutter(network)
    points = [cutter.evaluate(_equal(cutter, n)) for n in numbers]
    smallest = min(points, key=lambda p: (p.peak_bytes, p.seconds))
    if budget_bytes is None:
        return smallest.segments
    within = [p for p in points if p.peak_bytes <= budget_bytes]
    if not within:
        raise InfeasibleBudget(
            budget_bytes,
            smallest.peak_bytes,
            peak_lower_bound(network.graph),
        )
    return min(within, key=lambda p: (p.seconds, p.peak_bytes)).segments


def _equal(cutter: flat.Cutter, num_segments: int) -> list[int]:
    """Cuts at the narrowest place near each of the equal shares."""
    kept = np.cumsum([0, *flat.kept_bytes(cutter.network)])
    crossing = flat.crossing_bytes(cutter.network)
    cuts = []
    for number in range(1, num_segments):
        share = kept[-1] / num_segments
        distance = abs(kept - number * share)
        near = [p for p in cutter.places if distance[p] <= share / 4]
        if near:
            # Of equally narrow ones, the nearest.
            cuts.append(min(near, key=lambda p: (crossing[p], distance[p])))
    return cuts
