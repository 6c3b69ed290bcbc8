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
_GROWTH = 3
_FIRST_SHARE = 16
_SMALL_ROW = 4096
# Elements that are added at once: they should stay in the cache.
_AT_ONCE = 131072
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
        begin = max(plain, self._least[last, first + 1] + kept, kept)
        enough = max(plain, self._enough[last, first + 1] + kept, kept)
        least, stop = begin, min(enough, self._width)
        row[:begin] = np.inf
        if begin < stop:
            row[begin:stop] = following[begin - kept : stop - kept]
        row[stop:] = 0
        if first < min(self._furthest[first] + 1, last):
            splits = self._splits(first, last)
            least = min(begin, splits.begins.min())
            self._improve(row, last, splits, least, stop)
        self._least[last, first] = least
        self._enough[last, first] = enough
        if last < self._line.num_blocks - 1:
            np.add(row, self._again[last, first], out=self._segment[last])

    def _splits(self, first: int, last: int) -> "_Splits":
        """The segments with which a sub-chain may begin."""
        final = min(self._furthest[first] + 1, last)
        held, waiting, forward = map(
            self._slots, self._line.splits(first, last, final)
        )
        stops = np.arange(first + 1, final + 1)
        begins = np.maximum(
            self._least[last, first + 1 : final + 1] + held,
            self._least[first:final, first] + waiting,
        )
        late = forward > begins
        late = late.nonzero()[0] if late.any() else ()
        begins = np.maximum(begins, forward)
        begins[~self._allowed[first, first + 1 : final + 1]] = _NEVER
        return _Splits(stops, held, waiting, begins, late)

    def _improve(self, row, last, splits, begin: int, stop: int) -> None:
        """Lowers a row from `begin` to `stop` to what segments allow."""
        stops, held, waiting, begins, _ = splits
        following, segment = self._extra[last], self._segment
        size, best = stop - begin, np.inf
        if size * len(stops) > _SMALL_ROW:
            size = max(size // _FIRST_SHARE, 1)
        while begin < stop:
            end = min(begin + size, stop)
            best = min(best, row[begin])
            bound = following[stops, end - 1 - held]
            bound += segment[stops - 1, end - 1 - waiting]
            # Not those that do not begin before `end`, which read nonsense.
            chosen = ((bound < best) & (begins < end)).nonzero()[0]
            if len(chosen):
                for group in splits.groups(chosen):
                    self._lower(row, last, splits, group, begin, end)
            part = row[begin:end]
            np.minimum(part, best, out=part)
            begin, size, best = end, size * _GROWTH, part[-1]

    def _lower(self, row, last, splits, group, begin: int, end: int) -> None:
        """Lowers it to what segments that hold the same allow."""
        stops, held, waiting = splits.stops[group], splits.held, splits.waiting
        if isinstance(held, np.ndarray):
            held = int(held[group[0]])
        if isinstance(waiting, np.ndarray):
            waiting = int(waiting[group[0]])
        left, count = max(begin, held, waiting), len(stops)
        size = max(_AT_ONCE // count, 64)
        while left < end:
            right = min(left + size, end)
            total = self._buffer[: count * (right - left)]
            total = total.reshape(count, right - left)
            here = slice(left - held, right - held)
            following = _rows(self._extra[last], stops, here)
            here = slice(left - waiting, right - waiting)
            segment = _rows(self._segment, stops - 1, here)
            np.add(following, segment, out=total)
            for index in splits.late:
                if index in group:
                    early = max(splits.begins[index] - left, 0)
                    total[group == index, :early] = np.inf
            part = row[left:right]
            np.minimum(part, total.min(axis=0), out=part)
            left = right

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
            first, slots, segment = self._split(first, last, slots)
            found.append(segment)
        return tuple(found)

    def _split(self, first: int, last: int, slots: int):
        """The best segment to begin with, what is after it, and its inside."""
        splits = self._splits(first, last)
        chosen = (splits.begins <= slots).nonzero()[0]
        stops = splits.stops[chosen]
        inside = slots - np.broadcast_to(splits.waiting, len(splits.stops))
        after = slots - np.broadcast_to(splits.held, len(splits.stops))
        total = self._extra[last][stops, after[chosen]]
        total += self._again[stops - 1, first]
        total += [
            self._extra[s - 1][first, inside[s - first - 1]] for s in stops
        ]
        best = chosen[np.argmin(total)]
        stop = int(splits.stops[best])
        inner = self._trace(first, stop - 1, int(inside[best]))
        return stop, int(after[best]), (first, stop, inner)


class _Splits(typing.NamedTuple):
    """The segments with which a sub-chain may begin, in slots.

    `begins` is the least memory for each. It is because of the forward pass
    of the segment, not of what follows, for the indexes in `late`.
    """

    stops: np.ndarray
    held: "int | np.ndarray"
    waiting: "int | np.ndarray"
    begins: np.ndarray
    late: "tuple[()] | np.ndarray"

    def groups(self, chosen: np.ndarray) -> list[np.ndarray]:
        """Splits indexes into those that hold the same."""
        change = np.zeros(len(chosen) - 1, bool)
        for same in (self.held, self.waiting):
            if isinstance(same, np.ndarray):
                change |= np.diff(same[chosen]) != 0
        if not change.any():
            return [chosen]
        return np.split(chosen, change.nonzero()[0] + 1)


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
