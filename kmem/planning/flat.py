"""Flat plans: a network cut into segments that hold no others.

What `sqrt` and `genetic` share: a set of cuts becomes a plan, and a plan is
judged by the simulator. The stages after the last cut are kept, since
nothing would be freed by running them again at once.
"""

import dataclasses

import numpy as np

from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.simulate import simulate


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
    """Simulates a plan.

    Args:
        network: The network.
        segments: The plan.
    """
    result = simulate(network.graph, network.schedule(segments))
    return Point(result.peak_bytes, result.seconds, segments)


class Cutter:
    """Makes plans of cuts, which are stages before which to cut.

    Args:
        network: The network.

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
    kept = {value for stage in stages for value in stage.kept}
    return np.array(
        [
            sum(network.value_bytes[v] for v in stage.outputs if v in kept)
            + stage.residual_bytes * stage.has_backward
            for stage in network.stages
        ]
    )
