"""A line of blocks with memory in slots, and which memory is worth solving.

`kmem.planning.line` has them in bytes. Where all sizes are multiples of a slot
nothing is rounded; else sizes are rounded up, but for what blocks leave behind:
its sums are rounded, so that errors do not add up.

A sub-chain that is not the rest of the line is run within a segment with which
a rest of the line begins. Two recurrences over the rests alone bound the extra
time of each from both sides: with segments in which everything is kept (what
follows may be dropped again), and as if the insides of segments took no memory
and no time. Where a segment and the lower bound of what is after it take more
than the upper bound, no best plan has it, nor anything inside of it. This
leaves out most of the table of `kmem.planning.table` without changing what it
finds: on long chains the bounds are close to each other.
"""

import math
import typing

import numpy as np

from kmem.planning.line import Line

# More than any memory, and few enough bits for arrays of small integers.
NEVER = 2**28


class Splits(typing.NamedTuple):
    """The segments with which sub-chains may begin: `[sub-chain, segment]`.

    Attributes:
        stops: The block after the segment.
        again: The time to run it again.
        held: What it keeps for later.
        waiting: What is held over its backward pass.
        forward: The peak of its forward pass; `NEVER` if it is not allowed.
        begins: The least memory that will do; `NEVER` if none will.
    """

    stops: np.ndarray
    again: np.ndarray
    held: np.ndarray
    waiting: np.ndarray
    forward: np.ndarray
    begins: np.ndarray


class SlottedLine:
    """The blocks, with the memory that a plan may use divided into slots.

    Args:
        allowed: `[first, stop]`: whether blocks `first` to `stop - 1` may be
            a segment.
        limit_bytes: The largest budget, beyond the network's constants.
        num_slots: How many slots to divide it into; fewer are used where all
            sizes are multiples of a larger one.

    Attributes:
        slot_bytes: The size of a slot.
        width: How many amounts of memory there are: 0, 1, ... slots.
        furthest: Block -> the last one that may be in a segment with it.
        windows: Length -> first and last blocks of the sub-chains of
            `length + 1` blocks that are asked for.
        kept: `[last, block]`: what the block leaves behind.
        plain: `[last, block]`: the peak of running the block so.
        again: `[last, block]`: the time of running the blocks again.
        enough: `[last, block]`: the memory in which all can be kept.
    """

    def __init__(self, line: Line, allowed, limit_bytes: int, num_slots: int):
        self.num_blocks = line.num_blocks
        self._host_seconds = line.network.host_seconds
        self._num_reads = line.network.num_reads[line.places]
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
        self.windows = [self._windows(n) for n in range(self.num_blocks)]
        self._splits = self._measure_splits(line, allowed)

    def _slots(self, num_bytes):
        return -(-num_bytes // self.slot_bytes)

    def _windows(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """First and last blocks of the sub-chains of `length + 1` blocks.

        Only the rest of the line and what may be in a segment are asked for.
        """
        firsts = np.arange(self.num_blocks - length)
        lasts = firsts + length
        asked = (lasts == self.num_blocks - 1) | (
            lasts <= self.furthest[firsts]
        )
        return firsts[asked], lasts[asked]

    def _measure_splits(self, line: Line, allowed) -> list[np.ndarray]:
        """By length, `[part, sub-chain, segment]`: the parts of
        `Line.splits`."""
        final = self.num_blocks - 1
        parts_by_length = []
        for length, (firsts, _) in enumerate(self.windows):
            parts_by_length.append(np.zeros((4, len(firsts), length), np.int32))
            parts_by_length[-1][2] = NEVER
        rows = [0] * self.num_blocks
        for first in range(self.num_blocks):
            inside = np.arange(first, self.furthest[first] + 1)
            lasts = np.union1d(inside, [final])
            stop = min(self.furthest[first] + 1, final)
            parts = np.zeros((4, len(lasts), 0), np.int32)
            if stop > first:
                parts = line.splits(first, lasts, stop)
                parts = np.minimum(self._slots(parts), NEVER).astype(np.int32)
                parts[2, :, ~allowed[first, first + 1 : stop + 1]] = NEVER
            for number, length in enumerate((lasts - first).tolist()):
                row = parts_by_length[length][:, rows[length]]
                split = parts[:, number, :length]
                row[:, : split.shape[1]] = split
                rows[length] += 1
        return parts_by_length

    def splits(
        self, length: int, least, rows: slice | np.ndarray = slice(None)
    ) -> Splits:
        """The segments with which sub-chains of one length may begin.

        Where there is a host, each comes once more behind all of them: what it
        keeps is there then, and takes time instead of memory.

        Args:
            length: The number of blocks after the first.
            least: `[last, block]`: the least memory for shorter ones.
            rows: Which of `windows[length]`.
        """
        firsts, lasts = (blocks[rows, None] for blocks in self.windows[length])
        held, waiting, forward, staying = self._splits[length][:, rows]
        stops = firsts + np.arange(1, length + 1)
        again = self.again[stops - 1, firsts]
        if self._host_seconds is not None:
            slot_seconds = np.float32(self._host_seconds * self.slot_bytes)
            again = np.hstack([again, again + slot_seconds * (held - staying)])
            held = np.hstack([held, staying])
            reads = self._num_reads[stops] != self._num_reads[firsts]
            never = np.where(reads, np.int32(NEVER), forward)
            forward = np.hstack([forward, never])
            stops, waiting = np.hstack([stops] * 2), np.hstack([waiting] * 2)
        begins = np.maximum(
            least[lasts, stops] + held, least[stops - 1, firsts] + waiting
        )
        np.maximum(begins, forward, out=begins)
        return Splits(stops, again, held, waiting, forward, begins)


def _furthest(allowed) -> np.ndarray:
    """Block -> the last one in an allowed segment that contains it.

    It is the block itself if none does, or less.
    """
    count = len(allowed) - 1
    stops = np.where(allowed, np.arange(count + 1), 0).max(axis=1)
    return np.maximum.accumulate(stops)[:count] - 1


# Sums of times differ in their last bits by the order of the additions.
_TOLERANCE = 1e-5


def most_memory(line: SlottedLine) -> np.ndarray:
    """`[last, first]`: the memory beyond which sub-chains are of no use."""
    count, width = line.num_blocks, line.width
    lower = np.zeros((count + 1, width), np.float32)
    upper = np.zeros((count + 1, width), np.float32)
    # Of all segments, those on the host as well.
    sums = np.empty((2 * count, width), np.float32)
    most = np.full((count, count + 1), -1)
    for first in range(count - 1, -1, -1):
        kept = line.kept[-1, first]
        begin = max(line.plain[-1, first], kept)
        for bound in (lower, upper):
            bound[first, :begin] = np.inf
            bound[first, begin:] = bound[first + 1, begin - kept : width - kept]
        if first < count - 1:
            useful = _lower(line, first, lower, upper, sums)
            most[first : first + len(useful), first] = useful
    # What is in a segment ends no later than it, and begins no earlier.
    most = np.maximum.accumulate(most[::-1])[::-1]
    most = np.maximum.accumulate(most, axis=1)
    most[-1] = width - 1
    return np.minimum(most, line.enough)


def _lower(line: SlottedLine, first: int, lower, upper, buffer) -> np.ndarray:
    """Lowers both bounds of a rest to what segments to begin with allow; gives
    for each segment the most memory with which it may be worth it."""
    last = line.num_blocks - 1
    # The rest is the last of the sub-chains that are as long.
    row = slice(-1, None)
    split = line.splits(last - first, np.zeros_like(line.enough), row)
    stops, again, held, waiting, _, begins = (part[0] for part in split)
    inside = line.enough[stops - 1, first] + waiting
    # Beyond that everything is kept.
    width = line.enough[last, first] + 1
    sums = buffer[: len(stops), :width]
    sums[:] = np.inf
    best = upper[first, :width]
    for index in np.flatnonzero(begins < width):
        stop, shift, begin = stops[index], held[index], begins[index]
        here = slice(begin - shift, width - shift)
        np.add(lower[stop, here], again[index], out=sums[index, begin:])
        begin = max(begin, inside[index])
        if begin < width:
            here = slice(begin - shift, width - shift)
            total = upper[stop, here] + again[index]
            np.minimum(best[begin:], total, out=best[begin:])
    rest = lower[first, :width]
    np.minimum(rest, sums.min(axis=0), out=rest)
    worth = sums <= best + _TOLERANCE * (best + line.again[last, first])
    worth &= sums < np.inf
    most = width - 1 - np.argmax(worth[:, ::-1], axis=1)
    most = np.where(worth.any(axis=1), most, -1)
    return most.reshape(-1, last - first).max(axis=0)
