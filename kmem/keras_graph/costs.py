"""What one call of a layer costs: bytes and seconds, forward and backward.

Bytes that are kept come from the traced graph of the call and its gradient:
what the gradient's operations read of the forward pass's. Working memory is
measured, since only the kernels know it; time is measured, or computed from
the number of floating point operations and of bytes moved. What this module
does not do: see what TensorFlow fuses across layers.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import keras
import tensorflow as tf

from kmem import capture
from kmem import memory
from kmem.keras_graph.recording import Call
from kmem.keras_graph.recording import num_bytes
from kmem.keras_graph.recording import root

# A processor of no particular make, for times that are computed.
_FLOPS_PER_SECOND = 1e11
_BYTES_PER_SECOND = 1e10
# The fastest of some runs, of more where they are short.
_MIN_RUNS, _MAX_RUNS = 3, 20
_ENOUGH_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs.

    Attributes:
        kept_inputs: Which of its tensor arguments its gradient reads.
        kept_outputs: Which of its results its gradient reads.
        gradients: Which of its tensor arguments get a gradient.
        passed: Which of them get the gradient of the result itself.
        residual_bytes: What its gradient reads besides.
        gradient_bytes: The gradients of its variables.
        parameter_bytes: Its variables.
        forward_seconds: Of the forward pass.
        backward_seconds: Of the gradient.
        forward_workspace_bytes: Besides arguments and results.
        backward_workspace_bytes: Besides all of the above.
    """

    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    passed: tuple[int, ...]
    residual_bytes: int
    gradient_bytes: int
    parameter_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_workspace_bytes: int
    backward_workspace_bytes: int


def cost_of(call: Call, measured: bool) -> Cost:
    """Traces a call with its gradient, and runs both.

    Nothing is changed: what is assigned within is dropped.

    Args:
        call: A call of a layer or operation.
        measured: Whether seconds are measured; computed otherwise.
    """
    step = _Step(call)
    with capture.DiscardedState():
        return step.cost(measured)


class _Step:
    """A call with its gradient, as functions of tensors."""

    def __init__(self, call: Call):
        args, kwargs = call.arguments
        leaves = keras.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        tensors = [leaves[i] for i in places]

        def run(tensors) -> list[tf.Tensor]:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args_, kwargs_ = keras.tree.pack_sequence_as((args, kwargs), filled)
            outputs = keras.tree.flatten(call.operation(*args_, **kwargs_))
            return [output for output in outputs if tf.is_tensor(output)]

        self._run = run
        self._inputs = [_spec(t) for t in tensors]
        self._results = [_spec(t) for t in call.results]
        self._variables = [
            variable.value
            for variable in getattr(call.operation, "trainable_variables", [])
        ]
        variables = getattr(call.operation, "variables", [])
        self._parameter_bytes = sum(num_bytes(v.value) for v in variables)

    def cost(self, measured: bool) -> Cost:
        forward = tf.function(self._run, autograph=False)
        forward = forward.get_concrete_function(self._inputs)
        both = _Backward(self._run, self._variables)
        traced = both.trace(self._inputs, self._results)
        forward_run = _measure(forward, self._inputs)
        backward_run = _measure(traced, self._inputs, self._results)
        made = both.residual_bytes + both.gradient_bytes
        made += sum(num_bytes(self._results[i]) for i in both.kept_outputs)
        made += sum(
            num_bytes(self._inputs[i])
            for i in set(both.gradients) - set(both.passed)
        )
        again = bool(both.residual_bytes or both.kept_outputs)
        if measured:
            seconds = forward_run.seconds
            gradient_seconds = backward_run.seconds - again * seconds
        else:
            seconds = _computed_seconds(forward)
            gradient_seconds = _computed_seconds(traced) - seconds
        return Cost(
            kept_inputs=both.kept_inputs,
            kept_outputs=both.kept_outputs,
            gradients=both.gradients,
            passed=both.passed,
            residual_bytes=both.residual_bytes,
            gradient_bytes=both.gradient_bytes,
            parameter_bytes=self._parameter_bytes,
            forward_seconds=seconds,
            backward_seconds=max(gradient_seconds, 0.0),
            forward_workspace_bytes=max(
                0,
                forward_run.peak_bytes - sum(map(num_bytes, self._results)),
            ),
            backward_workspace_bytes=max(0, backward_run.peak_bytes - made),
        )


class _Backward:
    """The gradient of a function, and what it reads of the forward pass."""

    def __init__(self, run: Callable, variables: list):
        self._run = run
        self._variables = variables

    def trace(self, inputs, results):
        """Traces both; reads the attributes off the graph."""
        function = tf.function(self._trace, autograph=False)
        return function.get_concrete_function(inputs, results)

    def _trace(self, inputs, output_gradients):
        floats = [i for i, t in enumerate(inputs) if t.dtype.is_floating]
        sources = [inputs[i] for i in floats]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources + self._variables)
            outputs = self._run(inputs)
        graph = tf.compat.v1.get_default_graph()
        num_forward = len(graph.get_operations())
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, output_gradients, strict=True)
            if output.dtype.is_floating
        ]
        gradients = tape.gradient(
            [output for output, _ in pairs],
            sources + self._variables,
            output_gradients=[gradient for _, gradient in pairs],
        )
        of_inputs = gradients[: len(sources)]
        of_variables = [g for g in gradients[len(sources) :] if g is not None]
        handed_in = {root(t).ref() for t in output_gradients}
        self.gradients = tuple(
            i for i, g in zip(floats, of_inputs, strict=True) if g is not None
        )
        self.passed = tuple(
            i
            for i, g in zip(floats, of_inputs, strict=True)
            if g is not None and tf.is_tensor(g) and root(g).ref() in handed_in
        )
        self.gradient_bytes = sum(
            num_bytes(g.values if isinstance(g, tf.IndexedSlices) else g)
            for g in of_variables
        )
        made = tf.nest.flatten(
            [g for g in gradients if g is not None], expand_composites=True
        )
        kept = _read_before(made, num_forward)
        places = {root(t).ref(): i for i, t in enumerate(inputs)}
        self.kept_inputs = tuple(
            sorted({places[ref] for ref in kept if ref in places})
        )
        results = {}
        for i, output in enumerate(outputs):
            if root(output).ref() not in places:
                results.setdefault(root(output).ref(), i)
        self.kept_outputs = tuple(
            sorted(results[ref] for ref in kept if ref in results)
        )
        rest = kept - places.keys() - results.keys() - handed_in
        self.residual_bytes = sum(
            num_bytes(ref.deref()) for ref in rest if _is_memory(ref.deref())
        )
        return made


def _read_before(tensors, num_forward: int) -> set:
    """References of the forward pass's tensors that a gradient reads."""
    if not tensors:
        return set()
    operations = tensors[0].graph.get_operations()
    forward = set(operations[:num_forward])
    kept, seen, waiting = set(), set(), [t.op for t in tensors]
    while waiting:
        operation = waiting.pop()
        if operation in seen or operation in forward:
            continue
        seen.add(operation)
        for tensor in operation.inputs:
            if tensor.op in forward:
                kept.add(root(tensor).ref())
            else:
                waiting.append(tensor.op)
    return kept


def _is_memory(tensor: tf.Tensor) -> bool:
    """Whether a kept tensor takes memory that nobody else holds."""
    return tensor.op.type not in ("Const", "ReadVariableOp", "Placeholder")


@dataclasses.dataclass(frozen=True)
class _Run:
    seconds: float
    peak_bytes: int


def _measure(function, *specs) -> _Run:
    arguments = [[_random(spec) for spec in group] for group in specs]
    flat = keras.tree.flatten(arguments)
    function(*flat)
    seconds = []
    with memory.track() as usage:
        while len(seconds) < _MIN_RUNS or (
            sum(seconds) < _ENOUGH_SECONDS and len(seconds) < _MAX_RUNS
        ):
            begin = time.perf_counter()
            outputs = function(*flat)
            if tf.config.list_physical_devices("GPU"):
                tf.test.experimental.sync_devices()
            seconds.append(time.perf_counter() - begin)
            del outputs
    fastest = max(min(seconds) - _overhead_seconds(), 0.0)
    return _Run(fastest, usage.peak_bytes - usage.start_bytes)


@functools.cache
def _overhead_seconds() -> float:
    """The time of a function that does nothing: a step calls none."""
    nothing = tf.function(tf.identity, autograph=False)
    nothing = nothing.get_concrete_function(tf.TensorSpec([], tf.float32))
    argument = tf.zeros([])
    nothing(argument)
    seconds = []
    for _ in range(_MAX_RUNS):
        begin = time.perf_counter()
        nothing(argument)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _random(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.is_floating:
        # Positive, for logarithms and roots.
        return tf.cast(
            tf.random.uniform(list(spec.shape), 0.1, 1.0), spec.dtype
        )
    return tf.zeros(spec.shape, spec.dtype)


def _computed_seconds(function) -> float:
    graph = function.graph
    profiler = tf.compat.v1.profiler
    options = profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    flops = profiler.profile(graph, options=options).total_float_ops
    moved = sum(
        num_bytes(tensor)
        for operation in graph.get_operations()
        for tensor in (*operation.inputs, *operation.outputs)
        if tensor.dtype != tf.resource
    )
    return flops / _FLOPS_PER_SECOND + moved / _BYTES_PER_SECOND


def _spec(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)
