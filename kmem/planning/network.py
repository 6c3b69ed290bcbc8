"""A model as a planner sees it: stages, each with a forward and a backward.

A plan for it is a list of segments: contiguous stages that keep nothing of
their forward pass but what enters them, and run again before their backward
pass, where segments within may again keep nothing. That is what
`remat.recompute` can do, and on a chain it is the class of schedules that
Beaumont et al. (2019) call memory-persistent.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from kmem.planning.graph import Graph
from kmem.planning.graph import Operation

# Of a stage, what is measured, and grows with the examples.
MEASURED = tuple(
    "residual_bytes forward_workspace_bytes backward_workspace_bytes "
    "forward_seconds backward_seconds".split()
)


@dataclasses.dataclass(frozen=True)
class Window:
    """Which rows of what it reads a stage computes a row from, of images.

    Row i of its `made` rows is computed from the `size` rows that begin with
    row i * `stride` - `before` of the `given` ones; what lies outside of these
    is its padding.
    """

    given: int
    made: int
    size: int = 1
    stride: int = 1
    before: int = 0


@dataclasses.dataclass(frozen=True)
class Stage:
    """One operation of the model, forward and backward.

    Attributes:
        name: The layer's name, or another that a person knows it by.
        inputs: The values it reads.
        outputs: The values it makes. One that shares its memory with an
            input (a reshape) is that input, and is not listed.
        kept: Those of its inputs and outputs that its backward pass reads.
        gradients: Those of its inputs that get a gradient.
        shares: For each of them, of how many addends that gradient is the
            sum: its stage may use the value more than once.
        passed: Those of them whose gradient is that of the only output, in
            the same memory, as an addition's inputs'.
        residual_bytes: What the backward pass reads besides `kept`.
        gradient_bytes: The gradients of its parameters.
        forward_seconds: The time of the forward pass.
        backward_seconds: The time of the backward pass.
        forward_workspace_bytes: What it needs besides, while it runs.
        backward_workspace_bytes: The same, of its backward pass.
        recomputable: Whether it may run twice.
        window: What its rows are computed from, if it may run in tiles.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()
    residual_bytes: int = 0
    gradient_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    recomputable: bool = True
    window: Window | None = None

    @property
    def has_backward(self) -> bool:
        return bool(self.gradients) or self.gradient_bytes > 0


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a segment's rows, the places along the first axis of images.

    It reads rows `start` to `stop - 1` of what enters the segment. Of the rows
    that are computed from these, `first` to `last - 1` are those of the tile.
    """

    start: int
    stop: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """Stages `start` to `stop - 1`, and the segments within, in order.

    What enters one that is `on_host` waits for its backward pass in host
    memory. One with `tiles` runs, both times, one of them after another.
    """

    start: int
    stop: int
    inner: tuple["Segment", ...] = ()
    on_host: bool = False
    tiles: tuple[Tile, ...] = ()


@dataclasses.dataclass(frozen=True)
class Network:
    """Stages in the order in which the model runs them.

    Attributes:
        stages: What one reads is an input or was made before it.
        value_bytes: The size of each value, which is a number.
        inputs: Values that exist before the step: the batch.
        lines: Where segments may begin and end: at two places of the same
            line. A place is the number of the stage after it. Without lines,
            anywhere.
        shared: For each parameter that several stages use, these stages.
        resident_bytes: Parameters, optimizer, and what else stays.
        keeps_gradients: Whether the parameters' gradients stay until the step
            ends; else each is used up by an update at once.
        adds_gradients: Whether it is a sum that uses them up, in its place.
        late: The stages whose gradients stay even so.
        host_seconds: The time that a byte takes to host memory and back;
            `None` where no segment is `on_host`.
    """

    stages: tuple[Stage, ...]
    value_bytes: tuple[int, ...]
    inputs: frozenset[int] = frozenset()
    lines: tuple[tuple[int, ...], ...] = ()
    shared: tuple[tuple[int, ...], ...] = ()
    resident_bytes: int = 0
    keeps_gradients: bool = True
    adds_gradients: bool = False
    late: frozenset[int] = frozenset()
    host_seconds: float | None = None

    def scaled(self, ratio: float) -> "Network":
        """The same for so many times the examples: all but gradients of
        weights grows."""
        stages = []
        for stage in self.stages:
            numbers = {name: getattr(stage, name) for name in MEASURED}
            scaled = {n: type(v)(ratio * v) for n, v in numbers.items()}
            stages.append(dataclasses.replace(stage, **scaled))
        values = tuple(int(ratio * size) for size in self.value_bytes)
        return dataclasses.replace(
            self, stages=tuple(stages), value_bytes=values
        )

    def allows(self, start: int, stop: int) -> bool:
        """Whether stages `start` to `stop - 1` may be a segment."""
        return bool(self.allowed([start, stop])[0, 1])

    def allowed(self, places: Sequence[int]) -> np.ndarray:
        """Which pairs of places, in order, may be a segment's ends.

        A segment hands back one gradient of a value that it reads, the sum of
        those within it, and is given one of a value that it makes. If such a
        sum is a part of a larger one, the larger one is rounded otherwise
        than without segments. These pairs are left out: the numbers are to be
        the same to the bit.
        """
        at = np.asarray(places)
        fixed = np.cumsum([0] + [not s.recomputable for s in self.stages])[at]
        pairs = np.triu(fixed[:, None] == fixed[None, :], 1)
        if self.lines:
            on_line = np.array([np.isin(at, line) for line in self.lines])
            pairs &= on_line.T.astype(int) @ on_line.astype(int) > 0
        for starts, stops in self._split_sums:
            rows = (starts[0] <= at) & (at <= starts[1])
            columns = (stops[0] <= at) & (at <= stops[1])
            pairs[np.ix_(rows, columns)] = False
        return pairs

    @functools.cached_property
    def _split_sums(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Ranges of starts and of stops that would split a gradient's sum."""
        makers: dict[int, int] = {}
        readers: dict[int, list[tuple[int, int]]] = {}
        for index, stage in enumerate(self.stages):
            makers.update(dict.fromkeys(stage.outputs, index))
            shares = stage.shares or (1,) * len(stage.gradients)
            for value, share in zip(stage.gradients, shares, strict=True):
                readers.setdefault(value, []).append((index, share))
        ranges = []
        for value, reads in readers.items():
            ranges += _split_sums(makers.get(value, -1), reads)
        for stages in self.shared:
            ranges += _split_sums(-1, [(index, 1) for index in stages])
        return ranges

    @functools.cached_property
    def backward_index(self) -> dict[int, int]:
        """Stage -> its backward operation in `graph`."""
        stages = range(len(self.stages) - 1, -1, -1)
        present = [s for s in stages if self.stages[s].has_backward]
        return {s: len(self.stages) + i for i, s in enumerate(present)}

    @functools.cached_property
    def graph(self) -> Graph:
        """The step as operations: stage `i`'s forward pass is operation `i`.

        Every reader of a value hands its gradient back in a tensor of its
        own; the value's maker adds them up.
        """
        sizes = list(self.value_bytes)
        forward, residuals = [], {}

        def new(num_bytes: int) -> int:
            sizes.append(num_bytes)
            return len(sizes) - 1

        for index, stage in enumerate(self.stages):
            outputs = list(stage.outputs)
            if stage.residual_bytes:
                residuals[index] = new(stage.residual_bytes)
                outputs.append(residuals[index])
            forward.append(
                Operation(
                    name=stage.name,
                    inputs=stage.inputs,
                    outputs=tuple(outputs),
                    seconds=stage.forward_seconds,
                    workspace_bytes=stage.forward_workspace_bytes,
                    recomputable=stage.recomputable,
                )
            )
        backward, results = [], set()
        shares: dict[int, list[int]] = {}
        for index in self.backward_index:
            stage = self.stages[index]
            inputs = list(stage.kept)
            if index in residuals:
                inputs.append(residuals[index])
            outputs, added = [], 0
            for value in stage.outputs:
                parts = shares.get(value, [])
                inputs += parts
                if len(parts) > 1:
                    added += self.value_bytes[value]
            if stage.passed and added:
                shares[stage.outputs[0]] = parts = [new(added)]
                outputs += parts
                added = 0
            for value in stage.gradients:
                given = shares.setdefault(value, [])
                if value in stage.passed:
                    given += shares.get(stage.outputs[0], [])
                else:
                    outputs.append(new(self.value_bytes[value]))
                    given.append(outputs[-1])
            workspace_bytes = stage.backward_workspace_bytes + added
            if stage.gradient_bytes:
                outputs.append(new(stage.gradient_bytes))
                if self.keeps_gradients or index in self.late:
                    results.add(outputs[-1])
                elif not self.adds_gradients:
                    # What its update computes is as large.
                    update_bytes = stage.gradient_bytes
                    workspace_bytes = max(workspace_bytes, update_bytes)
            backward.append(
                Operation(
                    name=f"{stage.name}, backward",
                    inputs=tuple(inputs),
                    outputs=tuple(outputs),
                    seconds=stage.backward_seconds,
                    workspace_bytes=workspace_bytes,
                    recomputable=False,
                )
            )
        return Graph(
            operations=(*forward, *backward),
            tensor_bytes=tuple(sizes),
            constants=self.inputs,
            results=frozenset(results),
            num_forward=len(forward),
            resident_bytes=self.resident_bytes,
            host_seconds=self.host_seconds,
        )

    def schedule(self, segments: tuple[Segment, ...]) -> tuple[int, ...]:
        """The order in which a plan's operations run, for `graph`.

        A recomputation runs only what the backward pass of its segment
        reads, or what leads to that: not, say, a convolution whose output
        nobody within needs.
        """
        count = len(self.stages)
        return (*range(count), *self._backward(0, count, segments))

    def _backward(self, start: int, stop: int, segments) -> Iterator[int]:
        for item in reversed(_items(start, stop, segments)):
            if isinstance(item, Segment):
                again, read = self.again(item)
                if item.on_host:
                    yield from (~value for value in sorted(read))
                yield from again
                yield from self._backward(item.start, item.stop, item.inner)
            elif item in self.backward_index:
                yield self.backward_index[item]

    @functools.cached_property
    def num_reads(self) -> np.ndarray:
        """How many stages before each place read the batch."""
        reads = [not self.inputs.isdisjoint(s.inputs) for s in self.stages]
        return np.cumsum([0, *reads])

    def may_wait(self, start: int, stop: int) -> bool:
        """Whether what enters stages `start` to `stop - 1` may wait in host
        memory: there is one, and none of them reads the batch, which stays."""
        is_free = self.num_reads[start] == self.num_reads[stop]
        return self.host_seconds is not None and bool(is_free)

    def again(self, segment: Segment) -> tuple[list[int], set[int]]:
        """The stages that run again before a segment's backward pass, and the
        values from before the segment that they read."""
        needed: set[int] = set()
        order: list[int] = []

        def run(index: int) -> None:
            stage = self.stages[index]
            order.append(index)
            needed.difference_update(stage.outputs)
            needed.update(stage.inputs)

        items = _items(segment.start, segment.stop, segment.inner)
        for item in reversed(items):
            if isinstance(item, Segment):
                _, inner = self.again(item)
                for index in range(item.stop - 1, item.start - 1, -1):
                    if needed.intersection(self.stages[index].outputs):
                        run(index)
                needed |= inner
                continue
            stage = self.stages[item]
            # Its backward pass reads them whether it runs again or not.
            kept_values = set(stage.kept) if stage.has_backward else set()
            if (
                needed.intersection(stage.outputs)
                or kept_values.intersection(stage.outputs)
                or (stage.residual_bytes and stage.has_backward)
            ):
                run(item)
            needed |= kept_values - set(stage.outputs)
        return order[::-1], needed


def _items(start: int, stop: int, segments) -> list["int | Segment"]:
    """Stages that are in no segment, and segments, in order."""
    items: list[int | Segment] = []
    for segment in segments:
        items += range(start, segment.start)
        items.append(segment)
        start = segment.stop
    return items + list(range(start, stop))


def _split_sums(
    maker: int, reads: list[tuple[int, int]]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The same for one value, from who makes and who reads it how often."""
    ranges = []
    total = sum(share for _, share in reads)
    following = [*(index for index, _ in reads[1:]), math.inf]
    for first in range(len(reads)):
        before = reads[first - 1][0] if first else maker
        within = 0
        for last in range(first, len(reads)):
            within += reads[last][1]
            if within == total:
                break
            stops = reads[last][0] + 1, following[last]
            if within > 1:
                ranges.append(((before + 1, reads[first][0]), stops))
            if first == 0 and total - within > 1:
                ranges.append(((0, maker), stops))
    return ranges
