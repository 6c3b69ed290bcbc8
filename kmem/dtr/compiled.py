"""A call of a layer as two operators: its forward pass and its gradient.

The call is traced together with its gradient into one graph, which is cut in
two functions. What the gradient reads of the forward pass is a result of the
first function, each tensor on its own, so that DTR can evict it; to make it
again runs the whole function again.

The numbers are those of the operators one by one: TensorFlow runs the
functions as they were traced, without rewriting them, and adds up gradients
in the same order. For that, the gradient of what is read several times within
leaves the function as several terms, as outside of it there may be more.

What it does not do: call what cannot run twice, or what depends on anything
but its arguments and Keras's variables; see `CannotCompile`.
"""

import contextlib
import functools
import random
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kmem.base.private_keras import tf_variable
from kmem.base.private_tf import FuncGraph
from kmem.base.private_tf import record
from kmem.graph import ordering
from kmem.remat import purity
from kmem.remat import state
from kmem.remat.structure import Structure
from kmem.remat.structure import is_differentiable
from kmem.remat.structure import untracked

# Fewer operations than this run sooner one by one.
_LEAST_OPERATIONS = 6
_NO_WORK = frozenset({"Const", "Identity", "Placeholder", "StopGradient"})
_config: Any = tf.compat.v1.ConfigProto()
_config.graph_options.rewrite_options.disable_meta_optimizer = True
_AS_TRACED = _config.SerializeToString()


class CannotCompile(ValueError):
    """A call that must run operator by operator."""


class _Graph(FuncGraph):
    """That of a function which takes no tensors from outside: it would keep
    them as they are now."""

    def capture(self, tensor, name=None, shape=None):
        """A tensor as it may be read within."""
        if getattr(tensor, "graph", None) is not self:
            raise CannotCompile("It reads a tensor that is no argument.")
        return tensor


@contextlib.contextmanager
def _none_drawn() -> Iterator[None]:
    """Refuses, within, to draw random numbers in Python: they would stay what
    they are now."""
    before = random.getstate(), np.random.get_state()
    yield
    if repr((random.getstate(), np.random.get_state())) != repr(before):
        random.setstate(before[0])
        np.random.set_state(before[1])
        raise CannotCompile("It draws random numbers in Python.")


class CompiledCall:
    """A call with certain arguments, up to the values of its tensors.

    Args:
        function: What is called.
        join: Gives `(args, kwargs)` for tensors.
        specs: A `tf.TensorSpec` for each tensor.
        exact: Whether `function` may depend on the shape of everything that it
            computes, as is known in eager mode only.

    Raises:
        CannotCompile: If it cannot be compiled, or is not worth it.
        Exception: Whatever `function` raises when it is traced.
    """

    def __init__(
        self,
        function: Callable,
        join: Callable,
        specs: list,
        exact: bool = False,
    ):
        graph = _Graph("call")
        with graph.as_default(), _none_drawn():
            self._trace(graph, function, join, specs, exact)

    def _trace(self, graph, function, join, specs, exact) -> None:
        inputs = [
            tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs
        ]
        sources = list(filter(is_differentiable, inputs))
        with tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        ) as tape:
            tape.watch(sources)
            args, kwargs = join(inputs)
            with _Variables(tape) as run:
                results = function(*args, **kwargs)
        if run.unbuilt or run.raw:
            raise CannotCompile("It reads variables that are not Keras's.")
        self._left, left = run.take_left()
        # A layer may take a mask from an argument, for those that come later.
        everything = results, left, args, kwargs
        self._results = Structure(everything, whole=True)
        operations = graph.get_operations()
        _check(operations, exact)
        self._variables = [variable for variable, _ in run.entry]
        self._assigned = [
            number
            for number, variable in enumerate(self._variables)
            if id(variable) in run.assigned
        ]
        inputs += [value for _, value in run.entry]
        results = _distinct(self._results.tensors, but=inputs)
        targets = [value for value in results if is_differentiable(value)]
        given, terms = _gradient(tape, targets, sources + run.trained)
        fetches = [term for _, term in terms]
        made = set(operations)
        kept = _read(made, graph.get_operations()[len(operations) :], fetches)
        changed = [
            run.state_mapping[id(self._variables[number])]
            for number in self._assigned
        ]
        outputs = _distinct([*results, *changed, *kept], but=inputs)
        needed = ordering.needed(graph, [t.op for t in outputs + fetches])
        forward = [op for op in needed if op in made]
        backward = [op for op in needed if op not in made]
        # As they were traced: what would be free to run first differs from one
        # copy of a graph to the next, and the peak with it.
        for part in (forward, backward):
            ordering.chain(op for op in part if op.type not in _NO_WORK)
        backward += [op for op in forward if op.type == "Const"]
        self._forward = _operator(graph, forward, inputs, outputs)
        self._backward = _operator(graph, backward, kept + given, fetches)

        # A call's values are its inputs, followed by its outputs.
        places = {
            value.ref(): place for place, value in enumerate(inputs + outputs)
        }

        def find(values) -> list[int]:
            return [places[value.ref()] for value in values]

        self._result_places = find(self._results.tensors)
        self._results.tensors = []  # They would keep the graph.
        self._changed_places = find(changed)
        self._kept_places = find(kept)
        self._source_places = find(source for source, _ in terms)
        self._target_places = find(targets)

    def __call__(self, tensors: list) -> Any:
        """The results for these tensors."""
        variables = self._variables
        read = map(tf.convert_to_tensor, map(tf_variable, variables))
        values = [*tensors, *read]
        with record.stop_recording():
            for number in self._assigned:
                # What is made from its old value may be made again.
                place = len(tensors) + number
                values[place] = tf.raw_ops.DeepCopy(x=values[place])
            values += self._forward(values)
            for number, place in zip(
                self._assigned, self._changed_places, strict=True
            ):
                variables[number].assign(values[place])
        self._record(values, len(tensors))
        results, left, *_ = self._results.join(
            [values[place] for place in self._result_places]
        )
        self._left.give(left)
        return results

    def _record(self, values: list, num_tensors: int) -> None:
        sources, seen = [], set()
        for place in self._source_places:
            source = values[place]
            if place in seen and place >= num_tensors:
                # Every use of a variable reads it.
                variable = tf_variable(self._variables[place - num_tensors])
                source = tf.convert_to_tensor(variable)
            seen.add(place)
            sources.append(source)
        if not sources or not record.should_record_backprop(sources):
            return
        kept = [values[place] for place in self._kept_places]
        function = self._backward

        def gradient(*gradients):
            if record.could_possibly_record():
                raise ValueError(
                    "A layer that is compiled under DTR has a gradient that "
                    "cannot be differentiated again, or within the block of "
                    "its tape: use `kmem.DTR(compile=None)`. Received: "
                    'compile="layers"'
                )
            return function([*kept, *map(tf.convert_to_tensor, gradients)])

        targets = [values[place] for place in self._target_places]
        record.record_operation("KmemLayer", targets, sources, gradient)


class _Variables(state.FirstRun):
    """Keras's variables as inputs of a graph.

    Attributes:
        trained: The inputs that have a gradient.
    """

    def __init__(self, tape: tf.GradientTape):
        super().__init__()
        self.trained: list[tf.Tensor] = []
        self._tape = tape

    def _value_at_entry(self, variable):
        held = tf_variable(variable)
        if held is None:
            return None
        if variable.dtype != held.dtype.name:
            # TensorFlow makes one operation of several, and rounds once.
            raise CannotCompile("It casts variables to 16 bits.")
        value = tf.compat.v1.placeholder(variable.dtype, variable.shape)
        # Of TensorFlow's variable: Keras's may be frozen, and is watched.
        if is_differentiable(value) and held.trainable:
            self._tape.watch(value)
            self.trained.append(value)
        return value

    def _value_to_use(self, value):
        return value

    def add_update(self, update):
        variable, value = update
        super().add_update((variable, untracked(value)))
        held: Any = tf_variable(variable)
        if held.trainable:
            raise CannotCompile("It assigns what has a gradient.")


def _operator(
    graph: tf.Graph, operations: list, inputs: list, outputs: list
) -> Callable[[list], list]:
    """A part of a graph as an operator."""
    given = [value.name for value in inputs]
    made = [v.name for v in outputs if v.name not in given]
    read = {value.name for op in operations for value in op.inputs}
    # No more than that: on a GPU, TensorFlow runs what nobody reads.
    names = {op.name for op in operations} - {v.op.name for v in inputs}
    definition = graph.as_graph_def()
    nodes = [node for node in definition.node if node.name in names]
    for node in nodes:
        sources = [i for i in node.input if i[0] != "^" or i[1:] in names]
        node.input[:] = sources
    del definition.node[:]
    definition.node.extend(nodes)

    def function(*fed):
        values = dict(zip(given, fed, strict=True))
        used = {name: v for name, v in values.items() if name in read}
        results = tf.graph_util.import_graph_def(definition, used, made)
        values.update(zip(made, results, strict=True))
        return [values[value.name] for value in outputs]

    specs = [tf.TensorSpec(v.shape, v.dtype) for v in inputs]
    call: Any = functools.partial(
        tf.raw_ops.PartitionedCall,
        Tout=[value.dtype for value in outputs],
        f=tf.compat.v1.wrap_function(function, specs),
        config_proto=_AS_TRACED,
    )
    return lambda tensors: call(args=tensors)


def _check(operations: list, exact: bool) -> None:
    effects = purity.effects(operations)
    if effects:
        raise CannotCompile(f"It contains {', '.join(effects)}.")
    working = [op for op in operations if op.type not in _NO_WORK]
    if len(working) < _LEAST_OPERATIONS:
        raise CannotCompile("It is too small.")
    for op in operations if exact else []:
        if any(attribute.type == "func" for attribute in op.op_def.attr):
            raise CannotCompile("It contains a function.")
        if not all(t.shape.is_fully_defined() for t in op.outputs):
            raise CannotCompile("It contains a shape that is not known.")


def _gradient(tape, targets: list, sources: list) -> tuple[list, list]:
    """The targets' gradients to be given, and `(source, term)` for each term
    of a source's gradient, in the order in which they are made."""
    given = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in targets]
    if not targets:
        return given, []
    found = tape.gradient(targets, sources, output_gradients=given)
    terms = []
    for source, gradient in zip(sources, found, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            raise CannotCompile("A gradient is sparse.")
        if gradient is None:
            continue
        added = gradient.op.type == "AddN"
        for term in gradient.op.inputs if added else [gradient]:
            terms.append((source, term))
    for target in targets if len(targets) > 1 else []:
        # Outside, a gradient that is not there becomes zeros.
        alone = tape.gradient(target, sources)
        if [g is None for g in alone] != [g is None for g in found]:
            raise CannotCompile("Not every result depends on every input.")
    operations = tf.compat.v1.get_default_graph().get_operations()
    order = {op: number for number, op in enumerate(operations)}
    terms.sort(key=lambda term: order[term[1].op])
    return given, terms


def _read(made: set, operations: list, fetches: list) -> list:
    """What the gradient reads of the forward pass, but for constants."""
    read = [t for op in operations for t in op.inputs] + fetches
    return _distinct(
        [t for t in read if t.op in made and t.op.type != "Const"], but=[]
    )


def _distinct(tensors: list, but: list) -> list:
    others = {tensor.ref() for tensor in but}
    found = {tensor.ref(): tensor for tensor in tensors}
    return [t for ref, t in found.items() if ref not in others]
