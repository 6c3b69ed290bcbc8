"""Records one call of a Keras model: its calls of layers, and what they share.

The model is traced, not run. A value is a piece of memory: a tensor that only
shows another one differently (a reshape) is the same value.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base.patching import member
from kmem.graph import fusion
from kmem.graph import releasing
from kmem.graph.names import operations
from kmem.keras_graph import opening
from kmem.losses import chunked_loss
from kmem.remat import purity
from kmem.remat import state
from kmem.step import capture
from kmem.step.batches import num_bytes
from kmem.step.batches import num_rows
from kmem.step.batches import tell_rows

# Operations whose gradient reads none of their inputs and outputs.
_KEEPS_NOTHING = fusion.ALIASES.union(
    "AddN AddV2 BiasAdd Cast ConcatV2 Neg Pack Pad Split StridedSlice Sub "
    "Transpose Unpack".split()
)
# They use a tensor, and give it no gradient.
_NO_GRADIENT = frozenset({"Rank", "Shape", "ShapeN", "Size", "ZerosLike"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer or operation, or what a model does between two.

    Attributes:
        operation: What is called; `None` for what lies between calls.
        function: Calls it as the model does, in training where that is so.
        ambient: What is around the call; see `kmem.remat.state`.
        arguments: Its positional and keyword arguments, tensors of the trace.
        reads: The value of each tensor among the arguments, `None` if that is
            a constant.
        makes: The values of results that did not exist before.
        uses: `{value: number}`: how many of the operations within use it,
            each of which gives it a gradient of its own.
        operations: The types of the operations within. They tell apart calls
            that differ in what is around them, such as `training`.
        effects: What it does that cannot be done twice.
        residual_bytes: What lies between calls keeps for its gradient.
    """

    name: str
    operation: Any = None
    function: Any = None
    ambient: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: tuple[tuple, dict] = ((), {})
    results: tuple[tf.Tensor, ...]
    reads: tuple[int | None, ...]
    gives: tuple[int, ...]
    makes: tuple[int, ...]
    uses: dict[int, int]
    operations: tuple[str, ...]
    effects: tuple[str, ...]
    residual_bytes: int = 0


@dataclasses.dataclass
class Frame:
    """One call of an opened model.

    Attributes:
        spans: For each part the numbers of its first call, and of the first
            call after it.
        inner: The frames of those parts that are opened themselves.
        is_line: Whether neighbouring parts can be run as one function.
        is_step: Whether it is of a `train_step`, of which the calls of the
            model and of its layers are the parts.
    """

    is_line: bool
    is_step: bool = False
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    inner: dict[int, "Frame"] = dataclasses.field(default_factory=dict)

    def lines(self) -> list[tuple[int, ...]]:
        """The places between calls, for each line within: a segment begins
        and ends at places of one line."""
        if self.is_line:
            places = {place for span in self.spans for place in span}
            lines = [tuple(sorted(places))]
        else:
            lines = list(self.spans)
        for frame in self.inner.values():
            lines += frame.lines()
        return lines


@dataclasses.dataclass
class Recording:
    """What was recorded.

    Attributes:
        calls: In the order in which they run.
        tensors: A tensor of each value.
        inputs: The values that the step is given.
        outputs: The values that the loss is computed from.
        frame: The model's own call, or its step.
        seams: Places between calls where no segment may begin or end: there
            TensorFlow joins additions of both sides into one, which rounds
            otherwise than two.
    """

    calls: list[Call] = dataclasses.field(default_factory=list)
    tensors: list[tf.Tensor] = dataclasses.field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    frame: Frame = dataclasses.field(default_factory=lambda: Frame(False))
    seams: frozenset[int] = frozenset()


def record(model: keras.Model, batch, in_step: bool) -> Recording:
    """Records a model's call on a batch, `tf.TensorSpec`s with known shapes,
    and its loss if there are targets; `in_step`, what its `train_step` calls up
    to its loss."""
    recorder: Any = None

    def trace(batch):
        nonlocal recorder
        # Anew: TensorFlow traces twice what makes variables, as a loss of
        # several outputs does, to count each of them.
        recorder = _Recorder(batch)
        seeing = opening.opened(model, recorder, in_step)
        with capture.DiscardedState(), seeing:
            if in_step:
                recorder.record_step(model, batch)
            else:
                x, *targets = keras.utils.unpack_x_y_sample_weight(batch)
                predictions = model(x, training=True)
                recorder.record_loss(model, x, predictions, *targets)
        recorder.find_seams()

    releasing.function(trace).get_concrete_function(batch)
    return recorder.recording


def root(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory a tensor shows."""
    return fusion.source(tensor, fusion.ALIASES)


class _Recorder(opening.Visitor):
    def __init__(self, batch):
        self._values: dict[Any, int] = {}  # By reference of a root tensor.
        # The opened calls that are running; `None` within a call of a layer.
        self._frames: list[Frame | None] = []
        # For each call the number of operations traced after it.
        self._ends: list[int] = []
        self._num_rows = num_rows(batch)
        self.recording = Recording()
        self.recording.inputs = self._new_values(_tensors(batch))

    def record_step(self, model, batch) -> None:
        """Records the model's `train_step`."""
        with (
            self._frame(is_line=False, is_step=True),
            capture.capturing(
                model, model.optimizer, adds_up=True, until_loss=True
            ) as update,
            contextlib.suppress(capture.LossReached),
        ):
            model.train_step(batch)
        self._record_between("loss", _tensors(update.loss))
        # What nothing but the loss reads, or looks into for a softmax's input.
        found = self.recording
        read = {value for call in found.calls[:-1] for value in call.reads}
        values = range(len(found.tensors))
        found.outputs = tuple(v for v in values if v not in read)

    def record_loss(self, model, x, predictions, y, sample_weight) -> None:
        # A `train_step` may have a loss of its own, and no compiled one.
        own = type(model).compute_loss is not keras.Model.compute_loss
        # What layers add is not computed from predictions.
        given = y is not None and model.loss is not None
        is_known = model.compiled and (own or given)

        def loss(tensors, y, sample_weight, x):
            y_pred = chunked_loss.around(predictions, tensors)
            if not is_known:
                # Stands in for the loss of a model that has none.
                floats = [t for t in _tensors(y_pred) if t.dtype.is_floating]
                return tf.add_n(
                    [tf.reduce_mean(tf.cast(t, tf.float32)) for t in floats]
                )
            return model.compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
            )

        # A loss in chunks has the weights of the head.
        heads = [
            each.head.layer
            for each in keras.tree.flatten(predictions)
            if isinstance(each, chunked_loss.Predictions)
        ]
        tensors = chunked_loss.tensors_of(predictions)
        self.recording.outputs = self._known(_tensors(tensors))
        # Keras's own does not read it, which would then be kept for it.
        arguments = tensors, y, sample_weight, x if own else None
        self._call("loss", (heads or [loss])[0], loss, *arguments)

    def run_line(self, model, line, values, bind):
        if self._frames and self._frames[-1] is None:
            return super().run_line(model, line, values, bind)
        with self._frame(is_line=True) as frame:
            for part in line.parts:
                operation = part.operation
                function = bind(operation)
                if not isinstance(operation, keras.Model):
                    function = functools.partial(
                        self._call, operation.name, operation, function
                    )
                with self._span(frame):
                    opening.run_part(part, values, function)

    def run_tree(self, model, call: Callable, /, *args, **kwargs):
        if self._frames and self._frames[-1] is None:
            return call(*args, **kwargs)
        with self._frame(is_line=False):
            outputs = call(*args, **kwargs)
        self._record_between(model.name, _tensors(outputs))
        return outputs

    def run_child(self, layer, call: Callable, /, *args, **kwargs):
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.is_line:
            return call(*args, **kwargs)
        self._record_between(layer.name, _tensors((args, kwargs)))
        with self._span(frame):
            if isinstance(layer, keras.Model):
                return call(*args, **kwargs)
            return self._call(layer.name, layer, call, *args, **kwargs)

    @contextlib.contextmanager
    def _frame(self, is_line: bool, is_step: bool = False):
        frame = Frame(is_line, is_step)
        if self._frames:
            outer: Any = self._frames[-1]
            outer.inner[len(outer.spans)] = frame
        else:
            self.recording.frame = frame
        with member(self, "_frames", [*self._frames, frame]):
            yield frame

    @contextlib.contextmanager
    def _span(self, frame: Frame):
        begin = len(self.recording.calls)
        yield
        frame.spans.append((begin, len(self.recording.calls)))

    def _call(self, name: str, operation, function, /, *args, **kwargs):
        arguments = _tensors((args, kwargs))
        self._record_between(name, arguments)
        before = len(operations())
        ambient = state.ambient()
        with member(self, "_frames", [*self._frames, None]):
            outputs = function(*args, **kwargs)
        results = _tensors(outputs)
        tell_rows(results, self._num_rows)
        self._append(
            arguments,
            results,
            before,
            name=name,
            operation=operation,
            function=function,
            ambient=ambient,
            arguments=(args, kwargs),
        )
        return outputs

    def _append(self, read, results, before: int, **what) -> None:
        """Records what was traced after `before` operations, given the rest
        of a `Call`'s fields."""
        traced = operations()
        within = traced[before:]
        reads = tuple(self._values.get(root(t).ref()) for t in read)
        makes = self._new_values(results)
        uses: collections.Counter[int] = collections.Counter()
        for each in within:
            if each.type not in fusion.ALIASES | _NO_GRADIENT:
                uses.update(self._known(each.inputs))
        self._ends.append(len(traced))
        call = Call(
            results=results,
            reads=reads,
            gives=self._known(results),
            makes=makes,
            uses={v: n for v, n in uses.items() if v in reads},
            operations=tuple(each.type for each in within),
            effects=tuple(purity.effects(within)),
            **what,
        )
        self.recording.calls.append(call)

    def find_seams(self) -> None:
        """Finds values that two operations are joined over, and the places
        that they cross."""
        users = collections.defaultdict(list)
        for number, operation in enumerate(operations()):
            if operation.type not in fusion.ALIASES:
                for tensor in operation.inputs:
                    users[root(tensor).ref()].append((number, operation))
        seams: set[int] = set()
        for call, recorded in enumerate(self.recording.calls):
            for value in recorded.makes:
                tensor = self.recording.tensors[value]
                used = users[tensor.ref()]
                if len(used) != 1:
                    continue
                number, reader = used[0]
                if fusion.are_joined(tensor.op, reader):
                    last = bisect.bisect_right(self._ends, number)
                    seams.update(range(call + 1, last + 1))
        self.recording.seams = frozenset(seams)

    def _known(self, tensors) -> tuple[int, ...]:
        values = [self._values.get(root(t).ref()) for t in tensors]
        return tuple(v for v in values if v is not None)

    def _new_values(self, tensors) -> tuple[int, ...]:
        new = []
        for tensor in map(root, tensors):
            if tensor.ref() not in self._values:
                new.append(len(self.recording.tensors))
                self._values[tensor.ref()] = new[-1]
                self.recording.tensors.append(tensor)
        return tuple(new)

    def _record_between(self, name: str, tensors) -> None:
        """Records what a subclassed model computes before a layer."""
        unknown = [t for t in map(root, tensors) if t.ref() not in self._values]
        unknown = [t for t in unknown if t.op.inputs]
        if not unknown:
            return
        results = {t.ref() for t in unknown}
        read, waiting, visited, residual_bytes = [], list(unknown), set(), 0
        while waiting:
            tensor = waiting.pop()
            if tensor.ref() in visited:
                continue
            visited.add(tensor.ref())
            if root(tensor).ref() in self._values:
                read.append(tensor)
                continue
            if (
                tensor.op.type not in _KEEPS_NOTHING
                and tensor.dtype.is_floating
                and tensor.ref() not in results
            ):
                residual_bytes += num_bytes(tensor)
            waiting += tensor.op.inputs
        before = self._ends[-1] if self._ends else 0
        self._append(
            read,
            tuple(unknown),
            before,
            name=f"before {name}",
            residual_bytes=residual_bytes,
        )


def _tensors(structure) -> tuple[tf.Tensor, ...]:
    leaves = keras.tree.flatten(structure)
    return tuple(leaf for leaf in leaves if tf.is_symbolic_tensor(leaf))
