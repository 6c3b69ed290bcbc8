"""The least extra time of every sub-chain, for every amount of memory.

`extra(a, c, m)` is the time that blocks `a` to `c` take beyond running each
of them once, when `m` slots of memory are given. Beaumont, Eyraud-Dubois,
Herrmann, Joly, Shilova (2019) state the recurrence for chains: a sub-chain
either keeps what its first block leaves, or begins with a segment,

    extra(a, c, m) = min(extra(a + 1, c, m - kept(a)),
                         min_k again(a, k - 1) + extra(a, k - 1, m - waiting)
                               + extra(k, c, m - held(a, k)))

and `kmem.planning.line` says what is kept, held and waiting where values skip
stages. Each row is a step function of the memory, and falls. So a range of
memory is computed at once, without the segments that at its upper end are no
better than the best at its lower end.

The cost is cubic in the number of blocks. Times are added in single precision.
"""

import math
import typing

import numpy as np

from kmem.planning.line import Line

# Sums of times differ in their last bits by the order of the additions.
_TOLERANCE = 1e-6
# A row is computed in ranges that grow by this factor, unless it is small.
_GROWTH = 4
_FIRST_SHARE = 64
_SMALL_ROW = 4096
# Elements that are added at once: they should stay in the cache.
_AT_ONCE = 32768
_NEVER = 2**40


class Table:
    """The recurrence, solved for all budgets up to a limit.

    Args:
        line: The network's blocks.
        allowed: `[first, stop]`: whether blocks `first` to `stop - 1` may be
            a segment.
        limit_bytes: The largest budget, beyond the network's constants.
        num_slots: How many slots to divide it into. Fewer are used where all
            sizes are multiples of a larger slot: they are exact then. Else
            they are rounded up, but for what blocks leave behind: its sums
            are rounded, so that errors do not add up.

    Attributes:
        slot_bytes: The size of a slot.
        extra: The extra time of the whole line for 0, 1, 2, ... slots;
            infinite where it does not fit.
    """

    def __init__(self, line: Line, allowed, limit_bytes: int, num_slots: int):
        count = line.num_blocks
        self._line = line
        self._allowed = allowed
        self._furthest = _furthest(allowed)
        self.slot_bytes = max(
            line.common_bytes, math.ceil(limit_bytes / num_slots)
        )
        self._width = -(-limit_bytes // self.slot_bytes) + 1
        kept = np.rint(line.kept_bytes / self.slot_bytes).astype(np.int64)
        self._kept = np.diff(kept, axis=1)
        self._plain = self._slots(line.plain_bytes)
        self._again = line.again_seconds.astype(np.float32)
        # The least memory that will do, and what is enough to keep all.
        self._least = np.zeros((count, count + 1), np.int64)
        self._enough = np.zeros((count, count + 1), np.int64)
        # By last block, first block, memory.
        self._extra = [
            np.empty((last + 2, self._width), np.float32)
            for last in range(count)
        ]
        for rows in self._extra:
            rows[-1] = 0
        # The rows of one first block by last block, with the time to run it
        # again.
        self._segment = np.empty((count, self._width), np.float32)
        self._buffer = np.empty(max(_AT_ONCE, 64 * count), np.float32)
        for first in range(count - 1, -1, -1):
            stop = min(self._furthest[first] + 1, count - 1)
            for last in (*range(first, stop), count - 1):
                self._solve(first, last)
        self.extra = self._extra[-1][0]

    def _slots(self, num_bytes):
        return -(-num_bytes // self.slot_bytes)

    def _solve(self, first: int, last: int) -> None:
        """Fills the row of a sub-chain; those it is made of are known."""
        row, following = self._extra[last][first : first + 2]
        kept, plain = self._kept[last, first], self._plain[last, first]
        begin = max(plain, self._least[last, first + 1] + kept, kept, 0)
        enough = max(plain, self._enough[last, first + 1] + kept, kept, 0)
        splits = self._splits(first, last)
        least = min(begin, splits.begins.min(initial=begin))
        stop = min(enough, self._width)
        row[:begin] = np.inf
        if begin < stop:
            row[begin:stop] = following[begin - kept : stop - kept]
        row[stop:] = 0
        if least < stop and len(splits.stops):
            self._improve(row, last, splits, least, stop)
        self._least[last, first] = least
        self._enough[last, first] = enough
        if last < self._line.num_blocks - 1:
            np.add(row, self._again[last, first], out=self._segment[last])

    def _splits(self, first: int, last: int) -> "_Splits":
        """The segments with which a sub-chain may begin."""
        furthest = min(self._furthest[first], last)
        splits = self._line.splits(first, last, furthest)
        held = self._slots(splits.held_bytes)
        waiting = self._slots(splits.waiting_bytes)
        forward = self._slots(splits.forward_bytes)
        ready = np.maximum(
            self._least[last, splits.stops] + held,
            self._least[splits.stops - 1, first] + waiting,
        )
        forward[~self._allowed[first, splits.stops]] = _NEVER
        begins = np.maximum(ready, forward)
        return _Splits(splits.stops, held, waiting, begins, forward > ready)

    def _improve(self, row, last, splits, begin: int, stop: int) -> None:
        """Lowers a row from `begin` to `stop` to what segments allow."""
        following, segment = self._extra[last], self._segment
        size, best = stop - begin, np.inf
        if size * len(splits.stops) > _SMALL_ROW:
            size = max(size // _FIRST_SHARE, 1)
        while begin < stop:
            end = min(begin + size, stop)
            best = min(best, row[begin])
            chosen = splits.take(np.flatnonzero(splits.begins < end))
            bound = (
                following[chosen.stops, end - 1 - chosen.held]
                + segment[chosen.stops - 1, end - 1 - chosen.waiting]
            )
            chosen = chosen.take(np.flatnonzero(bound < best))
            if len(chosen.stops):
                self._lower(row, last, chosen, begin, end)
            part = row[begin:end]
            np.minimum(part, best, out=part)
            begin, size, best = end, size * _GROWTH, part[-1]

    def _lower(self, row, last, chosen, begin: int, end: int) -> None:
        for group in chosen.groups():
            held, waiting = int(group.held[0]), int(group.waiting[0])
            start, count = max(begin, held, waiting), len(group.stops)
            late = np.flatnonzero(group.late & (group.begins > start))
            size = max(_AT_ONCE // count, 64)
            for left in range(start, end, size):
                right = min(left + size, end)
                total = self._buffer[: count * (right - left)]
                total = total.reshape(count, right - left)
                np.add(
                    _rows(
                        self._extra[last],
                        group.stops,
                        slice(left - held, right - held),
                    ),
                    _rows(
                        self._segment,
                        group.stops - 1,
                        slice(left - waiting, right - waiting),
                    ),
                    out=total,
                )
                for index in late:
                    total[index, : max(group.begins[index] - left, 0)] = np.inf
                part = row[left:right]
                np.minimum(part, total.min(axis=0), out=part)

    def plan(self, slots: int) -> tuple[tuple, ...]:
        """The segments `(start, stop, inner)` of a best plan, in blocks.

        Args:
            slots: The memory that it may take, where `extra` is finite.
        """
        return self._trace(0, self._line.num_blocks - 1, slots)

    def _trace(self, first: int, last: int, slots: int):
        found = []
        while first <= last:
            extra = self._extra[last][first, slots]
            kept = self._kept[last, first]
            limit = extra + _TOLERANCE * (extra + self._again[last, first])
            if (
                slots >= max(self._plain[last, first], kept)
                and self._extra[last][first + 1, slots - kept] <= limit
            ):
                first, slots = first + 1, slots - kept
                continue
            splits = self._splits(first, last)
            splits = splits.take(np.flatnonzero(splits.begins <= slots))
            inner = slots - splits.waiting
            total = self._again[splits.stops - 1, first]
            total += self._extra[last][splits.stops, slots - splits.held]
            total += [
                self._extra[stop - 1][first, left]
                for stop, left in zip(splits.stops, inner, strict=True)
            ]
            best = int(np.argmin(total))
            stop = int(splits.stops[best])
            inside = self._trace(first, stop - 1, int(inner[best]))
            found.append((first, stop, inside))
            first, slots = stop, slots - int(splits.held[best])
        return tuple(found)


class _Splits(typing.NamedTuple):
    """The segments with which a sub-chain may begin, in slots.

    `begins` is the least memory for each; `late` says that the forward pass
    of the segment is why, and not what follows.
    """

    stops: np.ndarray
    held: np.ndarray
    waiting: np.ndarray
    begins: np.ndarray
    late: np.ndarray

    def take(self, chosen) -> "_Splits":
        return _Splits(*(field[chosen] for field in self))

    def groups(self) -> "list[_Splits]":
        """Neighbours that hold the same."""
        change = (np.diff(self.held) != 0) | (np.diff(self.waiting) != 0)
        edges = [0, *(np.flatnonzero(change) + 1), len(self.stops)]
        return [
            self.take(slice(begin, end))
            for begin, end in zip(edges, edges[1:], strict=False)
        ]


def _rows(table, rows, columns: slice):
    """Rows of a table in rising order; a view if they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return table[rows[0] : rows[-1] + 1, columns]
    return table[rows, columns]


def _furthest(allowed) -> np.ndarray:
    """Block -> the last one in an allowed segment that contains it.

    It is the block itself if none does, or less.
    """
    count = len(allowed) - 1
    stops = np.where(allowed, np.arange(count + 1), 0).max(axis=1)
    return np.maximum.accumulate(stops)[:count] - 1
