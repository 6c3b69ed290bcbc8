"""The least extra time of every sub-chain, for every amount of memory.

`extra(a, c, m)` is the time that blocks `a` to `c` take beyond running each
of them once, when `m` slots of memory are given. Beaumont, Eyraud-Dubois,
Herrmann, Joly, Shilova (2019) state the recurrence for chains: a sub-chain
either keeps what its first block leaves, or begins with a segment,

    extra(a, c, m) = min(extra(a + 1, c, m - kept(a)),
                         min_k again(a, k - 1) + extra(a, k - 1, m - waiting)
                               + extra(k, c, m - held(a, k)))

and `kmem.planning.line` says what is kept, held and waiting where values skip
stages. A row, over all m, is a step function that falls from infinity to 0; it
is computed in cells of neighbouring m. A segment is left out of a cell if at
the upper end it is no better than the best one at the lower end. Sub-chains of
one length do not depend on each other and are solved together; those that are
alike, as in repeated blocks, share a row; and `kmem.planning.slots` says which
memory is of use to each.

The cost is cubic in the number of blocks. Times are added in single precision.
"""

import math
import typing

import numpy as np

from kmem.planning.line import Line
from kmem.planning.slots import NEVER
from kmem.planning.slots import SlottedLine
from kmem.planning.slots import Splits
from kmem.planning.slots import most_memory

# Sums of times differ in their last bits by the order of the additions.
_TOLERANCE = 1e-6
# A row's cells: more of them leave out more, but take longer to choose from.
_CELLS = 6
_LARGEST_CELL = 128
# How many sums are looked at together.
_AT_ONCE = 2**16


class Table:
    """The recurrence, solved for all budgets up to a limit: see `SlottedLine`.

    Attributes:
        extra: The extra time of the whole line for 0, 1, 2, ... slots;
            infinite where it does not fit.
        num_rows: How many sub-chains were solved.
    """

    def __init__(self, line: Line, allowed, limit_bytes: int, num_slots: int):
        self._line = SlottedLine(line, allowed, limit_bytes, num_slots)
        count, width = line.num_blocks, self._line.width
        # By last and first block: the least memory that will do, the most
        # that is of use, and where the row begins in `_values`. Before the
        # least it is infinite and after its end the last value is repeated,
        # for cells that go further. The rows of no blocks are 0.
        self._least = np.zeros((count, count + 1), np.int64)
        self._most = most_memory(self._line)
        # There is room before the first row for any shift.
        self._base = np.full((count, count + 1), width)
        self._next = width + 3 * _LARGEST_CELL
        self.num_rows = 0
        num_values = sum(
            int((self._most[lasts, firsts] + 1 + 2 * _LARGEST_CELL).sum())
            for firsts, lasts in self._line.windows
        )
        self._values = np.full(self._next + num_values, np.inf, np.float32)
        self._values[width : width + 2 * _LARGEST_CELL] = 0
        for length in range(count):
            self._solve(length)
        memory = np.arange(width)
        self.extra = self._values[_at(self._row(0, count - 1, 0), memory)]
        self.extra[memory < self._least[-1, 0]] = np.inf

    def _row(self, first, last, shift) -> np.ndarray:
        """Where a row begins in `_values`, less a shift, and where it ends."""
        base = self._base[last, first]
        begin = base - np.minimum(shift, self._line.width)
        return np.array([begin, base + self._most[last, first]])

    def _solve(self, length: int) -> None:
        """Fills the rows of sub-chains of one length."""
        line = self._line
        firsts, lasts = line.windows[length]
        here = lasts, firsts
        split = line.splits(length, self._least)
        following = self._least[lasts, firsts + 1] + line.kept[here]
        keeps = np.maximum(line.plain[here], following)
        least = np.minimum(keeps, split.begins.min(axis=1, initial=NEVER))
        new = self._new_rows(firsts, lasts, split)
        sizes = self._most[here] - least + 1
        self._least[here] = np.where(sizes > 0, least, NEVER)
        # Together are rows of about the same size.
        new = new[np.argsort(-sizes[new], kind="stable")]
        new = new[sizes[new] > 0]
        while len(new):
            size = sizes[new[0]]
            cell = int(np.clip(size / _CELLS, 8, _LARGEST_CELL))
            num_sums = (size // cell + 2) * max(split.begins.shape[1], 1)
            num_rows = min(
                max(_AT_ONCE // num_sums, 1),
                np.count_nonzero(sizes[new] > size / 2),
            )
            rows, new = new[:num_rows], new[num_rows:]
            chunk = Splits(*(part[rows] for part in split))
            self._fill(firsts[rows], lasts[rows], keeps[rows], chunk, cell)

    def _new_rows(self, firsts, lasts, split) -> np.ndarray:
        """Finds a place for each row; returns those that are like no other.

        Rows are alike if all numbers of theirs are, and all rows that they
        are made of. The longest of them will do for all.
        """
        line, here, most = self._line, (lasts, firsts), self._most
        finals = np.minimum(line.furthest[firsts], lasts - 1)
        inside = np.where(finals >= firsts, self._base[finals, firsts], 0)
        own = line.kept[here], line.plain[here], line.again[here]
        numbers = self._base[lasts, firsts + 1], inside, *own
        keys = list(zip(*(part.tolist() for part in numbers), strict=True))
        new: list[int] = []
        # Most rows differ in these numbers: only few are compared in all.
        rows_by_key: dict[tuple, list[int]] = {}
        for row in np.argsort(-most[here], kind="stable").tolist():
            others = rows_by_key.setdefault(keys[row], [])
            for other in others:
                if all(np.array_equal(p[row], p[other]) for p in split[2:]):
                    base = self._base[lasts[other], firsts[other]]
                    break
            else:
                others.append(row)
                new.append(row)
                base = self._next
                self._next += int(most[lasts[row], firsts[row]]) + 1
                self._next += 2 * _LARGEST_CELL
            self._base[lasts[row], firsts[row]] = base
        self.num_rows += len(new)
        return np.array(new, np.int64)

    def _fill(self, firsts, lasts, keeps, split, size: int) -> None:
        """Fills rows, in cells of a size."""
        least, most = self._least[lasts, firsts], self._most[lasts, firsts]
        parts = self._parts(firsts, lasts, split)
        # The lower ends of cells, and the upper end of the last one.
        num_cells = -(-int((most + 1 - least).max()) // size)
        ends = least[:, None] + size * np.arange(num_cells + 1)
        best, useful = self._choose(parts, keeps, split.begins, ends)
        # By cell, those with the most useful segments first.
        rows, cells = np.nonzero(ends[:, :-1] <= most[:, None])
        counts = useful.sum(axis=1)[rows, cells]
        order = np.argsort(-counts, kind="stable")
        rows, cells, counts = rows[order], cells[order], counts[order]
        begins = ends[rows, cells]
        windows = np.lib.stride_tricks.sliding_window_view(
            self._values, size, writeable=True
        )
        values = windows[_at(parts.kept[:, rows], begins)]
        _forbid(values, keeps[rows] - begins)
        np.minimum(values, best[rows, cells, None], out=values)
        # By useful segment, the first ones of all cells first: the number
        # of its cell, and which of all segments it is.
        cell, index = useful.transpose(0, 2, 1)[rows, cells].nonzero()
        rank = np.arange(len(cell)) - (np.cumsum(counts) - counts)[cell]
        order = np.argsort(rank.astype(np.int16), kind="stable")
        cell = cell[order]
        index = index[order] + rows[cell] * split.stops.shape[1]
        begin = begins[cell]
        sums = windows[_at(parts.rest.reshape(2, -1)[:, index], begin)]
        sums += windows[_at(parts.inside.reshape(2, -1)[:, index], begin)]
        sums += parts.again.ravel()[index, None]
        _forbid(sums, split.forward.ravel()[index] - begin)
        done = 0
        for num in np.bincount(rank):
            lowest = values[:num]
            np.minimum(lowest, sums[done : done + num], out=lowest)
            done += num
        windows[_at(parts.row[:, rows], begins)] = values
        after = parts.row[1][:, None] + np.arange(_LARGEST_CELL + 1)
        self._values[after] = self._values[after[:, :1]]

    def _choose(self, parts, keeps, begins, ends):
        """The best at the ends of cells, `[row, end]`, and the segments that
        are better within a cell: `[row, segment, cell]`."""
        sums = self._values.take(_at(parts.rest[..., None], ends[:, None]))
        sums += self._values.take(_at(parts.inside[..., None], ends[:, None]))
        sums += parts.again[:, :, None]
        np.copyto(sums, np.inf, where=ends[:, None] < begins[:, :, None])
        best = self._values[_at(parts.kept[..., None], ends)]
        best[ends < keeps[:, None]] = np.inf
        np.minimum(best, sums.min(axis=1, initial=np.inf), out=best)
        return best, sums[:, :, 1:] < best[:, None, :-1]

    def _parts(self, firsts, lasts, split) -> "_Parts":
        kept = self._line.kept[lasts, firsts]
        rows, ends = firsts[:, None], lasts[:, None]
        return _Parts(
            row=self._row(firsts, lasts, 0),
            kept=self._row(firsts + 1, lasts, kept),
            rest=self._row(split.stops, ends, split.held),
            inside=self._row(rows, split.stops - 1, split.waiting),
            again=split.again,
        )

    def plan(self, slots: int) -> tuple[tuple, ...]:
        """The segments `(start, stop, inner, on_host)` of a best plan, in
        blocks, that may take so many slots, where `extra` is finite."""
        return self._trace(0, self._line.num_blocks - 1, slots)

    def _trace(self, first: int, last: int, slots: int):
        segments = []
        while first <= last:
            extra = self._extra(first, last, slots)
            kept = self._line.kept[last, first]
            again = self._line.again[last, first]
            limit = extra + _TOLERANCE * (extra + again)
            if (
                slots >= self._line.plain[last, first]
                and self._extra(first + 1, last, slots - kept) <= limit
            ):
                first, slots = first + 1, slots - kept
                continue
            first, slots, segment = self._split(first, last, slots)
            segments.append(segment)
        return tuple(segments)

    def _extra(self, first: int, last: int, slots: int) -> float:
        if slots < self._least[last, first]:
            return math.inf
        return float(self._values[_at(self._row(first, last, 0), slots)])

    def _split(self, first: int, last: int, slots: int):
        """The best segment to begin with, what is after it, and its inside."""
        firsts, lasts = self._line.windows[last - first]
        row = np.searchsorted(firsts, [first])
        split = self._line.splits(last - first, self._least, row)
        parts = self._parts(firsts[row], lasts[row], split)
        sums = self._values[_at(parts.rest, slots)]
        sums += self._values[_at(parts.inside, slots)]
        sums += parts.again
        sums[slots < split.begins] = np.inf
        best = int(np.argmin(sums))
        stop = int(split.stops[0, best])
        inner = self._trace(first, stop - 1, slots - split.waiting[0, best])
        on_host = best >= last - first
        return stop, slots - split.held[0, best], (first, stop, inner, on_host)


class _Parts(typing.NamedTuple):
    """What rows are made of, as `Table._row` has it.

    Attributes:
        row: `[sub-chain]`: the row itself.
        kept: `[sub-chain]`: that of what follows if the first block is kept.
        rest: `[sub-chain, segment]`: that of what follows a segment.
        inside: `[sub-chain, segment]`: that of the segment.
        again: `[sub-chain, segment]`: the time to run the segment again.
    """

    row: np.ndarray
    kept: np.ndarray
    rest: np.ndarray
    inside: np.ndarray
    again: np.ndarray


def _at(row, memory):
    """Where a row has its value for an amount of memory.

    What is there means nothing if the memory will not do.
    """
    return np.minimum(row[0] + memory, row[1])


def _forbid(values, counts) -> None:
    """Makes the first values of each row infinite, where `counts` > 0."""
    rows = np.flatnonzero(counts > 0)
    if len(rows):
        early = np.arange(values.shape[1]) < counts[rows, None]
        values[rows] = np.where(early, np.inf, values[rows])
