"""DTR on a recorded training step: what a budget and a heuristic would cost.

The native core that drives eager programs (custom_ops/dtr/) runs here with
operators that take time and bytes but do nothing. As in the simulator of
Kirisame et al. (ICLR 2021), what exists before the step stays in memory
throughout, a change in place makes a new tensor, and the step's results have
to be in memory together at its end; the cost is

    time of all operators that ran / time of the program's operators.

What it does not know: workspace, and the time that deciding takes; nor, but
for a `simulate` in a pool, that what is free lies in pieces. An operator is
taken to run again with the same results. A `Forecast` adds what a recorded step
does not tell.
"""

import ctypes
import dataclasses
import math
from collections.abc import Sequence

from kmem.base import bindings
from kmem.base import native
from kmem.base.bindings import AUTO
from kmem.base.bindings import HEURISTICS as HEURISTICS
from kmem.base.checks import must_be
from kmem.dtr.trace import Program
from kmem.options import DTR

_NO_LIMIT = 2**63 - 1
_DONE, _NO_ROOM = range(2)  # Of custom_ops/dtr/status.h.


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a program took.

    Attributes:
        seconds: The time of all operators that ran.
        slowdown: That, over the time of the program's operators.
        peak_bytes: The most that was in memory.
        num_evictions: How often a tensor was chosen to be evicted.
        num_recomputations: How many operators ran again.
        num_accesses: How many tensors were looked at to choose.
        heuristic: What chose.
    """

    seconds: float
    slowdown: float
    peak_bytes: int
    num_evictions: int
    num_recomputations: int
    num_accesses: int
    heuristic: str


class BudgetFailed(ValueError):
    """A program cannot run in a budget, or not with this heuristic.

    Attributes:
        thrashed: Whether it would have gone on; otherwise nothing was left to
            evict.
    """

    def __init__(self, message: str, thrashed: bool):
        super().__init__(message)
        self.thrashed = thrashed


def simulate(
    program: Program,
    budget_bytes: int | None = None,
    heuristic: str = "dtr_eq",
    *,
    evictee_minimum_bytes: int = 0,
    sqrt_sampling: bool = False,
    seed: int = 0,
    slowdown_limit: float = 4.0,
    in_pool: bool = False,
) -> Simulation:
    """Runs a program in a budget.

    Args:
        program: What to run.
        budget_bytes: The peak to keep; `None` if there is none.
        heuristic: What to evict first, one of `HEURISTICS`, or `"auto"`: the
            best of all but "random".
        evictee_minimum_bytes: Smaller tensors go last.
        sqrt_sampling: Look at about the square root of the candidates.
        seed: Of what is drawn at random.
        slowdown_limit: When to give up, in times of the program.
        in_pool: Whether tensors lie in a pool of the budget's size, as under
            `kmem.memory.limit(pool=True)`. The peak is then the pool's.

    Returns:
        A `Simulation`.

    Raises:
        BudgetFailed: If the program cannot run like this.
        ValueError: If there is no such heuristic.
        NativeLibraryError: If the native library cannot be built.
    """
    known = AUTO, *HEURISTICS
    kind = f"one of {', '.join(known)}"
    must_be(heuristic in known, heuristic, "heuristic", kind)
    recomputed_seconds = (slowdown_limit - 1) * program.seconds
    options = bindings.Options(
        threshold_bytes=_NO_LIMIT if budget_bytes is None else budget_bytes,
        evictee_minimum_bytes=evictee_minimum_bytes,
        recomputation_limit=round(recomputed_seconds * 1e9),
        sqrt_sampling=sqrt_sampling,
        seed=seed,
    )
    found = bindings.Statistics()
    message = ctypes.create_string_buffer(500)
    code = native.library().kmem_dtr_simulate(
        program.numbers.ctypes.data,
        len(program.numbers),
        heuristic.encode(),
        ctypes.byref(options),
        options.threshold_bytes if in_pool else 0,
        ctypes.byref(found),
        message,
        len(message),
    )
    if code != _DONE:
        raise BudgetFailed(message.value.decode(), thrashed=code != _NO_ROOM)
    seconds = found.total_nanoseconds / 1e9
    return Simulation(
        seconds=seconds,
        slowdown=seconds / program.seconds if program.seconds else 1.0,
        peak_bytes=found.peak_bytes,
        num_evictions=found.num_evictions,
        num_recomputations=found.num_recomputations,
        num_accesses=found.num_accesses,
        heuristic=message.value.decode(),
    )


@dataclasses.dataclass(frozen=True)
class Expected:
    """A step's seconds beyond one without a threshold, and the device's peak,
    as expected; infinite if it cannot run."""

    more_seconds: float
    peak_bytes: float


class Forecast:
    """Simulates a training step with each of several batches.

    A recorded step knows neither the workspace of its operators nor what is in
    memory that it does not read, such as other batches. Both are taken to be
    what they were in a step without a threshold: the peak that was measured
    there, less the peak that is simulated. Where no step fits without
    evictions, workspace is left out, and the rest is what is in memory between
    the steps.

    Args:
        programs: The recorded steps.
        peaks: The peaks that were measured in them, in bytes, or `None` if
            they did not fit without evictions.
        in_use: The bytes that are in memory between the steps.
        in_pool: Whether the device's memory is a pool; then of its peaks.

    Attributes:
        peak_bytes: The largest peak of a step without evictions.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        peaks: Sequence[int] | None,
        in_use: int,
        in_pool: bool = False,
    ):
        self._in_pool = in_pool
        simulated = [
            simulate(program, in_pool=in_pool).peak_bytes
            for program in programs
        ]
        if peaks is None:
            peaks = [
                peak + max(in_use - program.constant_bytes, 0)
                for peak, program in zip(simulated, programs, strict=True)
            ]
        self.peak_bytes = max(peaks)
        self._programs = [
            (program, peak - known)
            for program, peak, known in zip(
                programs, peaks, simulated, strict=True
            )
        ]

    def of(self, options: DTR) -> Expected:
        """What to expect of a threshold: means over the batches, and the
        largest peak."""
        threshold = int(options.eviction_threshold)
        seconds, peaks = [], []
        for program, unknown_bytes in self._programs:
            try:
                found = simulate(
                    program,
                    threshold - unknown_bytes if threshold else None,
                    options.heuristic,
                    evictee_minimum_bytes=int(options.evictee_minimum_size),
                    sqrt_sampling=options.enable_sqrt_sampling,
                    in_pool=self._in_pool,
                )
            except BudgetFailed:
                return Expected(math.inf, math.inf)
            seconds.append(found.seconds - program.seconds)
            peaks.append(found.peak_bytes + unknown_bytes)
        return Expected(sum(seconds) / len(seconds), max(peaks))
