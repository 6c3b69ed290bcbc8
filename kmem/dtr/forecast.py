"""What the simulator expects of a training step at a threshold of DTR.

A recorded step knows neither the workspace of its operators nor what is in
memory that it does not read, such as other batches. Both are taken to be what
they were in a step without a threshold: the peak that was measured there, less
the peak that is simulated. Where no step fits without evictions, workspace is
left out, and the rest is what is in memory between the steps.
"""

import dataclasses
import math
from collections.abc import Sequence

from kmem.dtr.program import Program
from kmem.dtr.simulator import BudgetFailed
from kmem.dtr.simulator import simulate
from kmem.options import DTR


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a step is expected to take; infinite if it cannot run.

    Attributes:
        more_seconds: How much longer it takes than without a threshold.
        peak_bytes: The device's peak.
    """

    more_seconds: float
    peak_bytes: float


class Forecast:
    """Simulates a training step with each of several batches.

    Args:
        programs: The recorded steps.
        peaks: The peaks that were measured in them, in bytes, or `None` if
            they did not fit without evictions.
        in_use: The bytes that are in memory between the steps.

    Attributes:
        peak_bytes: The largest peak of a step without evictions.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        peaks: Sequence[int] | None,
        in_use: int,
    ):
        self._programs = programs
        simulated = [simulate(program).peak_bytes for program in programs]
        if peaks is None:
            peaks = [
                peak + max(in_use - program.constant_bytes, 0)
                for peak, program in zip(simulated, programs, strict=True)
            ]
        self.peak_bytes = max(peaks)
        self._unknown_bytes = [
            measured - known
            for measured, known in zip(peaks, simulated, strict=True)
        ]

    def of(self, options: DTR) -> Expected:
        """What to expect of a threshold: means over the batches, and the
        largest peak."""
        threshold = int(options.eviction_threshold)
        seconds, peaks = [], []
        for program, unknown_bytes in zip(
            self._programs, self._unknown_bytes, strict=True
        ):
            try:
                found = simulate(
                    program,
                    threshold - unknown_bytes if threshold else None,
                    options.heuristic,
                    evictee_minimum_bytes=int(options.evictee_minimum_size),
                    sqrt_sampling=options.enable_sqrt_sampling,
                )
            except BudgetFailed:
                return Expected(math.inf, math.inf)
            seconds.append(found.seconds - program.seconds)
            peaks.append(found.peak_bytes + unknown_bytes)
        return Expected(sum(seconds) / len(seconds), max(peaks))
