"""A plan: what a model's training step recomputes, and what that is worth.

A plan is data. It holds the network that it was made for, so that it can be
replayed, drawn and compared wherever it is loaded; it is saved as JSON.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import types
import typing
from typing import Any

from kmem.base import cache
from kmem.base import drawing
from kmem.base.sizes import format_size
from kmem.planning import tiles
from kmem.planning.graph import Simulation
from kmem.planning.graph import simulate
from kmem.planning.network import MEASURED
from kmem.planning.network import Network
from kmem.planning.network import Segment

_FORMAT = "kmem plan"
_VERSION = 8
# No number of bytes, or of seconds, is as large as that.
_TOO_LARGE = 2**63


@dataclasses.dataclass(frozen=True)
class Plan(drawing.Shown):
    """What a training step recomputes, made by `kmem.plan`.

    Attributes:
        network: What it was made for.
        segments: The stages that are recomputed; see
            `kmem.planning.network.Segment`.
        batch: The batch it was made for, as JSON: shapes and dtypes.
        mode: `"graph"`, `"xla"` or `"eager"`.
        solver: What made it.
        budget_bytes: What was asked for, or `None` for `"auto"`.
        resident_bytes: What is in memory all the time: parameters, optimizer,
            and what the step needs beyond what the network tells, which is
            negative if it needs less.
        lower_bound_seconds: No schedule within the budget is faster.
    """

    network: Network = dataclasses.field(repr=False)
    segments: tuple[Segment, ...]
    batch: str
    mode: str
    solver: str
    budget_bytes: int | None
    resident_bytes: int
    lower_bound_seconds: float

    def __post_init__(self):
        self._check(self.segments, 0, len(self.network.stages))

    def _check(self, segments: tuple[Segment, ...], start: int, stop: int):
        for segment in segments:
            begin, end = segment.start, segment.stop
            if not (
                start <= begin < end <= stop and self.network.allows(begin, end)
            ):
                raise ValueError(
                    "`segments` must be in order, within the segment around "
                    "them, and such as the network allows. Received: a segment "
                    f"of stages {begin} to {end} within {start} to {stop}"
                )
            if segment.on_host and not self.network.may_wait(begin, end):
                raise ValueError(
                    "`segments` must not be on a host that the network does "
                    "not have, nor if they read the batch. Received: a segment "
                    f"of stages {begin} to {end}"
                )
            if segment.tiles and not tiles.are_of(self.network, segment):
                raise ValueError(
                    "`segments` must be in tiles only as the network allows, "
                    "and not have others within then. Received: a segment of "
                    f"stages {begin} to {end} in {len(segment.tiles)} tiles"
                )
            self._check(segment.inner, begin, end)
            start = end

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that a step is expected to need, in bytes: it keeps the
        budget."""
        return self.resident_bytes + self.simulation.peak_bytes

    @property
    def predicted_seconds(self) -> float:
        """The seconds of a step's forward and backward pass."""
        return self.simulation.seconds

    @property
    def unplanned_peak_bytes(self) -> int:
        """The predicted peak, in bytes, of a step that keeps everything."""
        return self.resident_bytes + self.unplanned.peak_bytes

    @property
    def slowdown(self) -> float:
        """The predicted time, relative to a step that keeps everything."""
        if not self.unplanned.seconds:
            return 1.0
        return self.predicted_seconds / self.unplanned.seconds

    @property
    def gap(self) -> float:
        """A bound on how much faster a schedule could be: 0.01 is 1 %."""
        if not self.lower_bound_seconds:
            return 0.0
        return max(0.0, self.predicted_seconds / self.lower_bound_seconds - 1)

    @property
    def host_bytes(self) -> int:
        """The bytes that a step sends to host memory, and fetches again."""
        sizes = self.drawn[0].graph.tensor_bytes
        return sum(sizes[~index] for index in self.schedule if index < 0)

    @functools.cached_property
    def drawn(self) -> tuple[Network, tuple[Segment, ...]]:
        """The network with a stage for each segment in tiles, and the other
        segments."""
        return tiles.contracted(self.network, self.segments)

    @functools.cached_property
    def schedule(self) -> tuple[int, ...]:
        """The operations of the graph of `drawn`, in the order they run."""
        network, segments = self.drawn
        return network.schedule(segments)

    @functools.cached_property
    def simulation(self) -> Simulation:
        """The step, replayed."""
        return simulate(self.drawn[0].graph, self.schedule)

    @functools.cached_property
    def unplanned(self) -> Simulation:
        """A step that keeps everything, replayed."""
        graph = self.network.graph
        return simulate(graph, graph.program)

    def summary(self) -> str:
        """The plan in words, a line for each of its segments."""
        budget = "auto"
        if self.budget_bytes is not None:
            budget = format_size(self.budget_bytes)
        peak = format_size(self.predicted_peak_bytes)
        counts = collections.Counter(self.schedule)
        again = [i for i, count in counts.items() if i >= 0 and count > 1]
        stages = self.network.stages
        fixed = [stage.name for stage in stages if not stage.recomputable]
        rows = [
            f"Rematerialization plan ({self.solver}, {self.mode} mode)",
            f"  budget          {budget}",
            f"  predicted peak  {peak}, "
            f"unplanned {format_size(self.unplanned_peak_bytes)}",
            f"  predicted time  {self.slowdown:.3f}x of a step that keeps "
            "everything",
            f"  lower bound     {self.lower_bound_seconds:.4f} s of "
            f"{self.predicted_seconds:.4f} s: the gap is {self.gap:.1%}",
            f"  recomputes      {len(again)} of {len(stages)} operations, in "
            f"{self.simulation.num_recomputed} runs",
            f"  cannot repeat   {', '.join(fixed) or 'none'}",
        ]
        if self.network.host_seconds is not None:
            sent = format_size(self.host_bytes)
            rows.append(f"  in host memory  {sent}, there and back")
        for segment in self.segments:
            rows += self._describe(segment, "  ")
        return "\n".join(rows)

    def _describe(self, segment: Segment, indent: str) -> list[str]:
        stages = self.network.stages
        first, last = stages[segment.start].name, stages[segment.stop - 1].name
        there = ", from host memory" if segment.on_host else ""
        if segment.tiles:
            there = f", in {len(segment.tiles)} tiles"
        rows = [f"{indent}{first} ... {last}{there}"]
        for inner in segment.inner:
            rows += self._describe(inner, indent + "  ")
        return rows

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the memory over a step, with and without the plan.

        Args:
            path: Where to save the picture; its ending says the format.

        Raises:
            ImportError: If matplotlib is missing.
        """
        from kmem.planning import picture

        picture.figure(self).savefig(path, dpi=150)

    def save(self, path: str | os.PathLike) -> None:
        """Saves the plan as JSON.

        Args:
            path: A path, `.json`. The file appears whole or not at all.
        """
        plan = dataclasses.asdict(self)
        content = {"format": _FORMAT, "version": _VERSION, "plan": plan}
        # A set in order.
        text = json.dumps(content, default=sorted, allow_nan=False)
        with cache.appearing(pathlib.Path(path)) as part:
            part.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """Loads a plan that `save` wrote.

        Args:
            path: The file's path.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is no plan, is damaged, or is of another
                version.
        """
        saved = pathlib.Path(path).read_bytes()
        try:
            # Of "NaN" it makes no number, but a `ValueError`.
            content = json.loads(saved, parse_constant=int)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                "A plan file must be JSON; this one is truncated or damaged. "
                f"Make the plan again. Received: {path} ({error})"
            ) from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(
                "A plan file must be one that `kmem.Plan.save` wrote. "
                f"Received: {path}"
            )
        if content.get("version") != _VERSION:
            raise ValueError(
                f"A plan file must be of version {_VERSION}: make the plan "
                "again with this version of kmem. Received: "
                f"{path} of version {content.get('version')!r}"
            )
        try:
            plan = from_json(cls, content["plan"])
            plan._check_numbers()
        except (
            *(ArithmeticError, AttributeError, LookupError, MemoryError),
            *(RecursionError, TypeError, ValueError),
        ) as error:
            raise ValueError(
                "A plan file must hold all of a plan; this one is damaged. "
                f"Make the plan again. Received: {path} ({error!r:.200})"
            ) from error
        return plan

    def _check_numbers(self) -> None:
        """Replays the plan, which finds what does not fit together."""
        network = self.network
        values = set(range(len(network.value_bytes)))
        for stage in network.stages:
            own = {*stage.inputs, *stage.outputs, *stage.kept}
            if not values.issuperset(own | {*stage.gradients, *stage.passed}):
                raise ValueError("no such value")
        places = set(range(len(network.stages) + 1))
        named = itertools.chain(*network.lines, *network.shared)
        if not places.issuperset(named):
            raise ValueError("no such place or stage")
        json.loads(self.batch)
        numbers = [
            getattr(stage, name)
            for stage in network.stages
            for name in (*MEASURED, "gradient_bytes")
        ]
        numbers += [self.budget_bytes or 0, self.lower_bound_seconds]
        numbers += [self.predicted_peak_bytes, *self.simulation.step_bytes]
        numbers += [network.host_seconds or 0]
        if min(*numbers, *network.value_bytes) < 0:
            raise ValueError("negative bytes or seconds")
        if self.mode not in ("eager", "graph", "xla"):
            raise ValueError("no such mode")


def from_json(kind: Any, saved: Any) -> Any:
    """A value of a type that a field has, from what JSON made of it.

    Raises:
        KeyError: If a dataclass lacks a field.
        TypeError: If it is of another type, or out of range.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        if set(saved) != set(kinds):
            raise KeyError(*set(saved).symmetric_difference(kinds))
        values = {name: from_json(k, saved[name]) for name, k in kinds.items()}
        return typing.cast(Any, kind)(**values)
    if origin in (types.UnionType, typing.Union):
        for one in arguments:
            with contextlib.suppress(KeyError, TypeError):
                return from_json(one, saved)
    if origin is typing.Literal and saved in arguments:
        return saved
    if arguments and isinstance(saved, list):
        items = (from_json(arguments[0], each) for each in saved)
        return typing.cast(Any, origin)(items)
    if kind is float and type(saved) is int:
        saved = float(saved)
    if type(saved) is not kind or (
        kind in (int, float) and not abs(saved) < _TOO_LARGE
    ):
        raise TypeError(f"{kind} expected: {saved!r:.50}")
    return saved
