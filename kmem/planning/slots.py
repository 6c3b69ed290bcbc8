"""A line of blocks with memory in slots: the numbers of the recurrence.

`kmem.planning.line` has them in bytes. Where all sizes are multiples of a slot
nothing is rounded; else sizes are rounded up, but for what blocks leave behind:
its sums are rounded, so that errors do not add up. Nothing is solved here.
"""

import math
import typing

import numpy as np

from kmem.planning.line import Line

NEVER = 2**40


class Splits(typing.NamedTuple):
    """The segments with which sub-chains may begin: `[sub-chain, segment]`.

    Attributes:
        stops: The block after the segment.
        held: What it keeps for later.
        waiting: What is held over its backward pass.
        begins: The least memory that will do; `NEVER` if none will.
    """

    stops: np.ndarray
    held: np.ndarray
    waiting: np.ndarray
    begins: np.ndarray


class SlottedLine:
    """The blocks, with the memory that a plan may use divided into slots.

    Args:
        line: The network's blocks.
        allowed: `[first, stop]`: whether blocks `first` to `stop - 1` may be
            a segment.
        limit_bytes: The largest budget, beyond the network's constants.
        num_slots: How many slots to divide it into; fewer are used where all
            sizes are multiples of a larger one.

    Attributes:
        slot_bytes: The size of a slot.
        width: How many amounts of memory there are: 0, 1, ... slots.
        furthest: Block -> the last one that may be in a segment with it.
        kept: `[last, block]`: what the block leaves behind.
        plain: `[last, block]`: the peak of running the block so.
        again: `[last, block]`: the time of running the blocks again.
        enough: `[last, block]`: the memory in which all can be kept.
    """

    def __init__(self, line: Line, allowed, limit_bytes: int, num_slots: int):
        self.num_blocks = line.num_blocks
        self._line = line
        self._allowed = allowed
        self.slot_bytes = max(
            line.common_bytes, math.ceil(limit_bytes / num_slots)
        )
        # Two more than the limit takes: sizes are rounded up.
        self.width = int(self._slots(limit_bytes)) + 3
        self.furthest = _furthest(allowed)
        kept = np.rint(line.kept_bytes / self.slot_bytes).astype(np.int64)
        self.kept = np.diff(kept, axis=1)
        self.plain = self._slots(line.plain_bytes)
        self.again = line.again_seconds.astype(np.float32)
        self.enough = np.zeros_like(kept)
        for first in range(self.num_blocks - 1, -1, -1):
            following = self.enough[first:, first + 1]
            following = following + self.kept[first:, first]
            plain = self.plain[first:, first]
            self.enough[first:, first] = np.maximum(plain, following)
        np.minimum(self.enough, self.width - 1, out=self.enough)

    def _slots(self, num_bytes):
        return -(-num_bytes // self.slot_bytes)

    def splits(self, firsts, lasts, least) -> Splits:
        """The segments with which sub-chains of one length may begin.

        Args:
            firsts: Their first blocks.
            lasts: Their last blocks.
            least: `[last, block]`: the least memory for shorter ones.
        """
        length = int(lasts[0] - firsts[0])
        shape = len(firsts), length
        held, waiting = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        forward = np.full(shape, NEVER * self.slot_bytes)
        finals = np.minimum(self.furthest[firsts] + 1, lasts)
        for row in np.flatnonzero(finals > firsts):
            first, final = firsts[row], finals[row]
            split = self._line.splits(first, lasts[row], final)
            here = row, slice(final - first)
            held[here], waiting[here], forward[here] = split
        held, waiting = self._slots(held), self._slots(waiting)
        stops = firsts[:, None] + np.arange(1, length + 1)
        begins = np.maximum(
            least[lasts[:, None], stops] + held,
            least[stops - 1, firsts[:, None]] + waiting,
        )
        begins = np.maximum(begins, self._slots(forward))
        begins[~self._allowed[firsts[:, None], stops]] = NEVER
        return Splits(stops, held, waiting, begins)


def _furthest(allowed) -> np.ndarray:
    """Block -> the last one in an allowed segment that contains it.

    It is the block itself if none does, or less.
    """
    count = len(allowed) - 1
    stops = np.where(allowed, np.arange(count + 1), 0).max(axis=1)
    return np.maximum.accumulate(stops)[:count] - 1
