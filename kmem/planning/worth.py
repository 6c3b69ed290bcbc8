"""The most memory with which a part of a line is worth running again.

A sub-chain that is not the rest of the line is run within a segment with which
a rest of the line begins. Two recurrences over the rests alone bound the extra
time of each from both sides: with segments in which everything is kept (what
follows may be dropped again), and as if the insides of segments took no memory
and no time. Where a segment and the lower bound of what is after it take more
than the upper bound, no best plan has it, nor anything inside of it.

This leaves out most of the table of `kmem.planning.table` without changing
what it finds: on long chains the bounds are close to each other.
"""

import numpy as np

from kmem.planning.slots import SlottedLine

# Sums of times differ in their last bits by the order of the additions.
_TOLERANCE = 1e-5


def most_memory(line: SlottedLine) -> np.ndarray:
    """`[last, first]`: the memory beyond which sub-chains are of no use.

    Args:
        line: The line of blocks.
    """
    count, width = line.num_blocks, line.width
    lower = np.zeros((count + 1, width), np.float32)
    upper = np.zeros((count + 1, width), np.float32)
    sums = np.empty((count, width), np.float32)
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
    """Lowers both bounds of a rest to what segments to begin with allow.

    Returns:
        For each segment, the most memory with which it may be worth it.
    """
    last = line.num_blocks - 1
    # The rest is the last of the sub-chains that are as long.
    row = slice(-1, None)
    split = line.splits(last - first, np.zeros_like(line.enough), row)
    stops, held, waiting, _, begins = (part[0] for part in split)
    again = line.again[stops - 1, first]
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
    return np.where(worth.any(axis=1), most, -1)
