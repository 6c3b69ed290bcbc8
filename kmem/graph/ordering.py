"""Puts a backward pass that was traced in the order of its tape.

A graph's executor starts whatever is ready. Left alone, it follows the chain
of input gradients, while weight gradients stay pending, and with them the
activations that they read; it recomputes a segment while the gradients of the
one before it are still made; and what it does first changes from step to step,
and the peak with it. Control dependencies make a backward pass a row of short
stages: up to a weight gradient, then what else came with it, one large array
after another. A weight gradient and the first of what does not lead to it run
side by side: one at a time, processors would wait at the end of every stage.
What it does not do: order a forward pass, or a recomputation within itself,
where TensorFlow fuses operations that nothing has to wait for (where the native
library is there, `keep_order` gives the whole step one order); reach loops
within functions that are traced by themselves. XLA goes by other things: see
`control`.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem.base import native
from kmem.base import private_tf
from kmem.graph import control
from kmem.graph import fusion
from kmem.graph import repeats
from kmem.graph.names import current_graph
from kmem.graph.names import operations

# As many elements as it takes to keep all processors at one operation.
_LARGE = 2**18
LOOPS = frozenset({"While", "StatelessWhile"})

# For each graph the names of what was traced within `unordered`.
_unordered: weakref.WeakKeyDictionary[tf.Graph, set[str]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """Leaves out what is traced within: a recomputation's forward pass."""
    graph, before = current_graph(), len(operations())
    yield
    if graph is not None:
        new = graph.get_operations()[before:]
        _unordered.setdefault(graph, set()).update(op.name for op in new)


def is_unordered(op: tf.Operation) -> bool:
    """Whether it was traced within `unordered`."""
    return op.name in _unordered.get(op.graph, ())


def hold_back(
    gradients: list, differentiated: bool = False, loss: tf.Tensor | None = None
) -> "AnyOrder | None":
    """Orders a backward pass that was just traced; nothing in eager mode.

    No operation waits for one that needs it, so that there is no cycle, and
    none is run that the gradients do not need. Nor does one that reads no
    gradient, such as the power in a power's: TensorFlow may merge it with an
    operation of the forward pass, and would round otherwise if it could not.
    A pass in which processes take part together is in order as it is.

    Args:
        gradients: Tensors, `IndexedSlices` or `None`, of one graph.
        differentiated: Whether somebody is going to differentiate them.
        loss: What they are the gradients of, if that is known.

    Returns:
        The order in which a graph's executor runs it, if there is one.
    """
    if tf.executing_eagerly():
        return None
    if private_tf.in_xla():
        return control.Guards(gradients)
    weight_gradients = {fusion.maker(g) for g in gradients if g is not None}
    if not weight_gradients:
        return None
    graph = next(iter(weight_gradients)).graph
    ops = needed(graph, weight_gradients)
    if not differentiated:
        repeats.once(ops, results=weight_gradients)
        ops = needed(graph, weight_gradients)
    # These run in the order of their trace, and so does what leads to them.
    if any(op.type.startswith("Collective") for op in ops):
        return None
    order = Order(ops)
    first = next(i for i, op in enumerate(ops) if op in weight_gradients)
    start = fusion.known_before(ops[first])
    # What to wait for: of the last two stages that made a weight gradient,
    # and of the last two parts of the rest.
    ends, others = [start, start], [[], []]
    # The forward pass is no stage, but what came with the first one is.
    at_first = ancestors([ops[first]])
    rest = [op for op in ops[:first] if op not in at_first]
    forward = set() if loss is None else ancestors([loss.op])
    late = _descendants(at_first - forward, ops)
    for stage in [rest, *_stages(ops[first + 1 :], weight_gradients)]:
        order.begin(stage)
        held = [
            op
            for op in stage
            if op in late
            and not is_unordered(op)
            # No constant, and more than shapes.
            and op.inputs
            and not all(t.dtype.is_integer for t in op.outputs)
            and not fusion.is_of_bias(op)
            and not (op in weight_gradients and fusion.is_joined_later(op))
        ]
        if not held:
            continue
        if weight_gradients.isdisjoint(stage):
            # Only the first part is begun beside the last weight gradient.
            beside = ends[0]
            for part in _parts(held, order):
                others = [others[1], order.append(part, beside + others[1])]
                beside = ends[1]
        else:
            ends = [ends[1], order.append(held, ends[1] + others[0])]
    return order


def needed(graph: tf.Graph, ops: Iterable[tf.Operation]) -> list[tf.Operation]:
    """The operations, and all that they need, in an order to run them in.

    It is that of the trace, but for what was put in later: that comes right
    before who reads it.
    """
    wanted = ancestors(ops)
    return _sorted([op for op in graph.get_operations() if op in wanted])


def needed_of(
    operations: list[tf.Operation], gradients: Any
) -> list[tf.Operation]:
    """Those of some operations that gradients need, in the same order; they
    may be nested, and `None`."""
    tensors = tf.nest.flatten(gradients, expand_composites=True)
    makers = [tensor.op for tensor in tensors if tf.is_symbolic_tensor(tensor)]
    wanted = ancestors(makers, set(operations))
    return [op for op in operations if op in wanted]


def keep_order() -> None:
    """Has the step that was traced into the current graph run its operations
    one after another in the order of `needed`; nothing in eager mode.

    Their names go to the native library, if it is there: its pass over the
    graph that runs finds them (custom_ops/order).
    """
    graph = current_graph()
    if graph is None or private_tf.in_xla() or not native.is_registered():
        return
    library, ops = native.allocator(), _sorted(graph.get_operations())
    names = "\n".join(op.name for op in ops)
    number = library.kmem_keep_places(names.encode())
    weakref.finalize(graph, library.kmem_forget_places, number)
    for op in ops:
        private_tf.set_graph(op, number)


def chain(ops: Iterable[tf.Operation]) -> None:
    """Has operations run one after another, in an order they can run in."""
    for before, op in itertools.pairwise(ops):
        private_tf.wait_for(op, [before])


def one_by_one(function: Callable, *arguments) -> Any:
    """Calls a function; in a graph, loops that it traced run one iteration
    after another.

    Keras lets up to 32 iterations of a recurrent layer be under way at a
    time. In the backward pass each of them makes gradients of all the layer's
    weights, which stay until they are added up: how many do depends on
    threads, so that nobody could tell a step's peak.
    """
    result = function(*arguments)
    for op in operations():
        if op.type in LOOPS:
            private_tf.run_one_by_one(op)
    return result


class Order:
    """The stages of a backward pass, in the order in which they run.

    Args:
        ops: All operations of the pass, and those before it.
    """

    def __init__(self, ops: list[tf.Operation]):
        # Of each operation the last stage that it waits for, or is in.
        self._stages = dict.fromkeys(ops, 0)
        # By stage, those of its operations that may be made to wait.
        self._waiting: list[list[tf.Operation]] = [[]]

    def begin(self, stage: list[tf.Operation]) -> None:
        """Begins a stage."""
        self._stages.update(dict.fromkeys(stage, len(self._waiting)))
        self._waiting.append([])

    def append(
        self, part: list[tf.Operation], before: list[tf.Operation]
    ) -> list[tf.Operation]:
        """Makes a part of the last stage wait for operations; returns what to
        wait for then."""
        members, last = set(part), dict.fromkeys(part)
        for op in part:
            sources = [tensor.op for tensor in op.inputs]
            if members.isdisjoint(sources) and not self.is_joined(op):
                self._waiting[-1].append(op)
                private_tf.wait_for(op, before)
            for source in sources:
                last.pop(source, None)
        ends = [op for op in last if not self._is_joined_with_reader(op)]
        return ends or before

    def finish(
        self, ops: list[tf.Operation], ends: list[tf.Operation] | None = None
    ) -> None:
        """Makes the pass wait for operations that use up what it made.

        It goes on beside them for one stage at the most.

        Args:
            ops: What was traced after it: they wait for nothing that is not
                there.
            ends: Those of them to wait for; by default, those without results.
        """
        if ends is None:
            ends = [op for op in ops if not op.outputs]
        before = [source for op in ops for source in _sources(op)]
        # Whoever reads a variable does so before it is assigned.
        for op in ends:
            for tensor in op.inputs:
                if tensor.dtype == tf.resource:
                    before += tensor.consumers()
        # Not one that waits for these already.
        for op in _sorted(before, self._stages):
            stages = [self._stages[source] for source in _sources(op)]
            self._stages[op] = max(stages, default=0)
        last = max((self._stages[op] for op in before), default=0)
        self._stages.update(dict.fromkeys(ends, last))
        for op in next(filter(None, self._waiting[last + 2 :]), []):
            private_tf.wait_for(op, ends)

    def is_joined(self, op: tf.Operation) -> bool:
        """Whether TensorFlow joins it with others unless it has to wait."""
        if fusion.is_of_convolution(op) or self._is_joined_with_reader(op):
            return True
        return any(
            len(self._readers(tensor)) == 1 and fusion.are_joined(tensor.op, op)
            for tensor in op.inputs
        )

    def _is_joined_with_reader(self, op: tf.Operation) -> bool:
        """Whether TensorFlow joins it with what reads it unless others wait."""
        readers = [reader for t in op.outputs for reader in self._readers(t)]
        return len(readers) == 1 and fusion.are_joined(op, readers[0])

    def _readers(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """What reads a tensor, without what nobody needs: a tape gives a
        constant a gradient, too."""
        return [op for op in tensor.consumers() if op in self._stages]


AnyOrder = Order | control.Guards


def _stages(
    ops: list[tf.Operation], weight_gradients: set[tf.Operation]
) -> Iterator[list[tf.Operation]]:
    """Splits operations after each weight gradient, and before each
    recomputation: before what waits for something."""
    group: list[tf.Operation] = []
    for op in ops:
        if op.control_inputs and group and not group[-1].control_inputs:
            yield group
            group = []
        group.append(op)
        if op in weight_gradients:
            wanted = ancestors([op], set(group))
            # Not those that can wait: the gradient frees what it reads.
            yield [other for other in group if other in wanted]
            yield [other for other in group if other not in wanted]
            group = []
    yield group


def _parts(
    stage: list[tf.Operation], order: Order
) -> Iterator[list[tf.Operation]]:
    """Splits operations where a large array is begun: where none of the others
    is needed for it, or stays, as more than one operation reads it.

    A tape goes back through two branches of a model by turns, and both would
    hold their arrays at the same time.
    """
    part: list[tf.Operation] = []
    for op in stage:
        used = [tensor for tensor in op.inputs if tensor.op in part]
        begins = all(len(tensor.consumers()) > 1 for tensor in used)
        if part and begins and _is_large(op) and not order.is_joined(op):
            yield part
            part = []
        part.append(op)
    yield part


def _sorted(
    ops: list[tf.Operation], placed: Container[tf.Operation] = ()
) -> list[tf.Operation]:
    """Operations that are not known, with what each needs before it.

    The gradient of a loop replaces the loop by another one, which is younger
    than what reads its results.
    """
    ordered: dict[tf.Operation, None] = {}
    for op in ops:
        waiting = [op] if op not in placed else []
        while waiting:
            missing = [
                source
                for source in _sources(waiting[-1])
                if source not in ordered and source not in placed
            ]
            waiting += missing
            if not missing:
                ordered[waiting.pop()] = None
    return list(ordered)


def _sources(op: tf.Operation) -> list[tf.Operation]:
    return [tensor.op for tensor in op.inputs] + op.control_inputs


def ancestors(
    ops: Iterable[tf.Operation], within: set[tf.Operation] | None = None
) -> set[tf.Operation]:
    """The operations, and all that they need."""
    ancestors: set[tf.Operation] = set()
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        if op not in ancestors and (within is None or op in within):
            ancestors.add(op)
            waiting += _sources(op)
    return ancestors


def _descendants(
    ops: set[tf.Operation], within: list[tf.Operation]
) -> set[tf.Operation]:
    """The operations, and those of some others, in an order in which they can
    run, that read what any of them makes."""
    descendants = set(ops)
    for op in within:
        if any(tensor.op in descendants for tensor in op.inputs):
            descendants.add(op)
    return descendants


def _is_large(op: tf.Operation) -> bool:
    """Whether it may make an array of a batch's size."""
    shapes = [tensor.shape for tensor in op.outputs]
    return any(
        not shape.is_fully_defined() or shape.num_elements() >= _LARGE
        for shape in shapes
    )
