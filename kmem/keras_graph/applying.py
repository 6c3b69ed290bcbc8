"""Runs a Keras model by a plan that was made for it: `remat.recompute`."""

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

import keras

from kmem import remat
from kmem.base.patching import Context
from kmem.base.patching import member
from kmem.base.sizes import format_size
from kmem.keras_graph import opening
from kmem.keras_graph.profiling import distinct
from kmem.keras_graph.profiling import signature
from kmem.keras_graph.recording import Frame
from kmem.keras_graph.recording import Recording
from kmem.keras_graph.windows import window_of
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.remat.tiles import tiled
from kmem.step.batches import num_bytes


def check(network: Network, recording: Recording) -> None:
    """Checks that a network is what was recorded.

    Names may differ in the numbers that Keras puts at their ends.
    """
    difference = _difference(network, recording)
    if difference:
        raise ValueError(
            "`remat` must be a plan for this model and this batch: make it "
            "again with `kmem.plan`, or give a budget, as under "
            f"`chunked_loss`. Received: {difference}"
        )


def structure(recording: Recording) -> tuple:
    """What makes two recordings the same, as something to look up by."""
    return tuple(
        (
            _base(call.name),
            signature(call),
            call.reads,
            tuple((v, num_bytes(recording.tensors[v])) for v in call.makes),
        )
        for call in recording.calls
    )


def _difference(network: Network, recording: Recording) -> str:
    for index, (stage, call) in enumerate(
        zip(network.stages, recording.calls, strict=False)
    ):
        if _base(stage.name) != _base(call.name):
            return (
                f"a plan whose operation {index} is {stage.name!r}, for a "
                f"model whose operation {index} is {call.name!r}"
            )
        wired = stage.inputs, stage.outputs
        if wired != (distinct(call.reads), call.makes):
            return (
                f"a plan in which {stage.name!r} is connected otherwise than "
                "in the model"
            )
        sizes = [network.value_bytes[v] for v in call.makes]
        actual = [num_bytes(recording.tensors[v]) for v in call.makes]
        if stage.window and stage.window != window_of(call):
            return (
                f"a plan in which {stage.name!r} may run in tiles, for a model "
                "in which it is another layer"
            )
        if sizes != actual:
            return (
                f"a plan in which {stage.name!r} gives "
                f"{format_size(sum(sizes))}, for a model in which it gives "
                f"{format_size(sum(actual))}"
            )
    if len(network.stages) != len(recording.calls):
        return (
            f"a plan of {len(network.stages)} operations, for a model of "
            f"{len(recording.calls)}"
        )
    return ""


def _base(name: str) -> str:
    return re.sub(r"(_\d+)+$", "", name)


_Segments = tuple[Segment, ...]


def applied(model: keras.Model, frame: Frame, segments: _Segments) -> Context:
    """Lets a model that is called within follow a plan: `segments`, in numbers
    of the recorded calls."""
    visitor = _Planned(model, frame, segments)
    return opening.opened(model, visitor, frame.is_step)


class _State(threading.local):
    """Where a thread is: replicas trace a step in turns.

    Attributes:
        next: The frame of the opened model that is about to be called, with
            the segments within it.
        trees: The `train_step` and subclassed models that are running: how to
            run their next child, or `None` where children are not to be seen.
    """

    def __init__(self, frame: Frame, segments: _Segments):
        self.next: tuple[Frame, _Segments] | None = None
        step = _Tree(frame, segments)
        self.trees: list[_Tree | None] = [step] if frame.is_step else []


@dataclasses.dataclass
class _Tree:
    """A subclassed model, or a step, that is running."""

    frame: Frame
    segments: _Segments
    num_called: int = 0


class _Planned(opening.Visitor):
    def __init__(self, model, frame: Frame, segments: _Segments):
        self._model = model
        self._plan = frame, segments
        self._state = _State(frame, segments)

    def run_line(self, model, line, values, bind):
        plan = self._take_plan(model)
        if plan is None:
            return super().run_line(model, line, values, bind)
        frame, segments = plan
        run = _LineRun(self, line, frame, bind)
        with self._hidden(None):
            run.parts(values, 0, len(line.parts), segments)

    def run_tree(self, model, call: Callable, /, *args, **kwargs):
        plan = self._take_plan(model)
        with self._hidden(_Tree(*plan) if plan else None):
            return call(*args, **kwargs)

    def run_child(self, layer, call: Callable, /, *args, **kwargs):
        tree = self._state.trees[-1] if self._state.trees else None
        if tree is None:
            return call(*args, **kwargs)
        number = tree.num_called
        tree.num_called += 1
        if number >= len(tree.frame.spans):
            return call(*args, **kwargs)
        span = tree.frame.spans[number]
        segments = _within(tree.segments, *span)

        def run(*args, **kwargs):
            with self._hidden(None):
                self.enter(tree.frame.inner.get(number), inner)
                return call(*args, **kwargs)

        own = [s for s in segments if (s.start, s.stop) == span]
        inner = own[0].inner if own else segments
        if own:
            return _rerun(run, own[0])(*args, **kwargs)
        return run(*args, **kwargs)

    def enter(self, frame: Frame | None, segments: _Segments) -> None:
        """Says what the opened model that is called next has to follow."""
        self._state.next = None if frame is None else (frame, segments)

    def _take_plan(self, model) -> tuple[Frame, _Segments] | None:
        plan, self._state.next = self._state.next, None
        if plan is None and model is self._model and not self._state.trees:
            return self._plan
        return plan

    def _hidden(self, tree: _Tree | None) -> Context:
        return member(self._state, "trees", [*self._state.trees, tree])


class _LineRun:
    """One run of a Functional model's parts."""

    def __init__(self, visitor: _Planned, line: opening.Line, frame, bind):
        self._visitor = visitor
        self._line = line
        self._frame = frame
        self._bind = bind

    def parts(
        self, values: dict[int, Any], start: int, stop: int, segments: _Segments
    ) -> None:
        """Runs parts `start` to `stop - 1`."""
        position = start
        while position < stop:
            begin, end = self._frame.spans[position]
            inner = _within(segments, begin, end)
            segment = next((s for s in segments if s.start == begin), None)
            if segment is not None and end > begin and segment.stop >= end:
                last = self._segment(values, position, segment)
            else:
                frame = self._frame.inner.get(position)
                self._visitor.enter(frame, inner)
                part = self._line.parts[position]
                opening.run_part(part, values, self._bind(part.operation))
                last = position + 1
            for done in range(position, last):
                part = self._line.parts[done]
                for key in (*part.reads, *part.makes):
                    if self._line.last_reads.get(key, -1) < last:
                        values.pop(key, None)
            position = last

    def _segment(self, values, start: int, segment: Segment) -> int:
        """Runs a segment as one function; returns the part after it."""
        stop = start
        while (
            stop < len(self._frame.spans)
            and self._frame.spans[stop][1] <= segment.stop
        ):
            stop += 1
        parts = self._line.parts[start:stop]
        outputs = dict.fromkeys(key for part in parts for key in part.makes)
        read = dict.fromkeys(key for part in parts for key in part.reads)
        reads = [key for key in read if key not in outputs]
        last_reads = self._line.last_reads
        makes = [key for key in outputs if last_reads.get(key, -1) >= stop]

        def run(*tensors):
            local = dict(zip(reads, tensors, strict=True))
            self.parts(local, start, stop, segment.inner)
            return [local[key] for key in makes]

        tensors = [values[key] for key in reads]
        results = _rerun(run, segment)(*tensors)
        values.update(zip(makes, results, strict=True))
        return stop


def _rerun(run: Callable, segment: Segment) -> Callable:
    if segment.tiles:
        return lambda tensor: [
            tiled(lambda x: run(x)[0], segment.tiles)(tensor)
        ]
    return remat.recompute(run, check=False, cpu_offload=segment.on_host)


def _within(segments: _Segments, start: int, stop: int) -> _Segments:
    return tuple(s for s in segments if start <= s.start and s.stop <= stop)
