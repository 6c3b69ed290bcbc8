"""What one call of a layer costs: bytes and seconds, forward and backward.

Bytes that are kept come from the traced graph of the call and its gradient:
what the gradient's operations read of the forward pass's. Working memory is
measured, since only the kernels know it (where bytes cannot be counted: what
the graph makes); time is measured, or computed from the number of floating
point operations and of bytes moved. XLA's kernels are
others than TensorFlow's, so for a step that is compiled each call is. What
this module does not do: see what is fused across layers.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any
from typing import Literal

import keras
import tensorflow as tf

from kmem import memory
from kmem.base import private_tf
from kmem.graph import ordering
from kmem.graph import reading
from kmem.graph import releasing
from kmem.graph import repeats
from kmem.keras_graph.recording import Call
from kmem.keras_graph.recording import root
from kmem.planning import allocations
from kmem.remat import purity
from kmem.remat import state
from kmem.step import capture
from kmem.step.batches import num_bytes

# How a call's costs are found.
Costs = Literal["measured", "flops", "traced"]

# A processor of no particular make, for times that are computed.
_FLOPS_PER_SECOND = 1e11
_BYTES_PER_SECOND = 1e10
# The fastest of some runs, in each of which a short layer is repeated for so
# long: beside that, what starts and ends a run is little.
_NUM_RUNS = 3
_ENOUGH_SECONDS = 0.02
_MAX_REPEATS = 50
# Types of operations whose results somebody else holds.
_HELD = frozenset({"Const", "ReadVariableOp", "Placeholder"})


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs.

    Attributes:
        kept_inputs: Which of its tensor arguments its gradient reads.
        kept_outputs: Which of its results its gradient reads.
        gradients: Which of its tensor arguments get a gradient.
        passed: Which of them get the gradient of the result itself.
        residual_bytes: What its gradient reads besides.
        parameter_bytes: Its variables.
        forward_workspace_bytes: Besides arguments and results.
        backward_workspace_bytes: Besides all of the above.
    """

    kept_inputs: tuple[int, ...] = ()
    kept_outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()
    residual_bytes: int = 0
    gradient_bytes: int = 0
    parameter_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0


def trained(call: Call) -> list[keras.Variable]:
    """A call's weights with a gradient, also those inside a frozen layer."""
    return [v for v in getattr(call.operation, "variables", []) if v.trainable]


def cost_of(call: Call, costs: Costs, compiled: bool = False) -> Cost:
    """Traces a call with its gradient, and runs both.

    Nothing is changed: assignments to Keras's variables within are dropped,
    and a call that has another effect, or that may refuse random data, is
    not run.

    Args:
        costs: `"measured"`; `"flops"` for seconds that are computed; or
            `"traced"` for what is kept alone: nothing is run.
        compiled: Whether XLA compiles the step.
    """
    run, inputs = _of_tensors(call)
    results = [tf.TensorSpec(t.shape, t.dtype) for t in call.results]
    both = _Backward(run, [_of_one_replica(v.value) for v in trained(call)])
    traced = both.trace(inputs, results)
    cost = both.cost
    if costs == "traced":
        return cost
    operations = traced.graph.get_operations()
    is_run = not (call.effects or purity.may_refuse(operations))
    measured = is_run and costs == "measured"
    is_counted = is_run and memory.is_counted()
    seconds = both_seconds = 0.0
    forward_peak = backward_peak = 0
    if measured or is_counted:
        if not all(spec.shape.is_fully_defined() for spec in results):
            raise ValueError(
                "Each layer's results must have shapes that are known for a "
                f"batch of a known shape. Received: {call.name}, which gives "
                + ", ".join(str(spec.shape) for spec in results)
            )
        measure = _run_compiled if compiled else _run_looped
        seconds, forward_peak = measure(run, inputs)
        both_seconds, backward_peak = measure(both.run, inputs, results)
    # Of `both`, whose backward pass may need the forward pass.
    again = bool(cost.residual_bytes or cost.kept_outputs)
    if not (measured and is_counted):
        forward = releasing.function(run).get_concrete_function(inputs)
        if not is_counted:
            forward_peak = _computed_peak_bytes(forward)
            backward_peak = _computed_peak_bytes(traced)
        if not measured:
            seconds, again = _computed_seconds(forward), True
            both_seconds = _computed_seconds(traced)
    own_bytes = cost.residual_bytes + cost.gradient_bytes
    own_bytes += sum(num_bytes(results[i]) for i in cost.kept_outputs)
    own_bytes += sum(
        num_bytes(inputs[i]) for i in set(cost.gradients) - set(cost.passed)
    )
    variables = getattr(call.operation, "variables", [])
    if cost.residual_bytes:
        # Where it needs most, not all that is kept is there.
        forward_peak = min(forward_peak, backward_peak - cost.residual_bytes)
    made_bytes = sum(map(num_bytes, results))
    return dataclasses.replace(
        cost,
        parameter_bytes=sum(num_bytes(v.value) for v in variables),
        forward_seconds=seconds,
        backward_seconds=max(both_seconds - again * seconds, 0.0),
        forward_workspace_bytes=max(0, forward_peak - made_bytes),
        backward_workspace_bytes=max(0, backward_peak - own_bytes),
    )


def _of_tensors(call: Call) -> tuple[Callable, list[tf.TensorSpec]]:
    """A call as a function of its tensors, and what these are like."""
    leaves = keras.tree.flatten(call.arguments)
    places = [i for i, leaf in enumerate(leaves) if tf.is_symbolic_tensor(leaf)]

    def run(tensors) -> list[tf.Tensor]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = keras.tree.pack_sequence_as(call.arguments, filled)
        # Assignments of its own, and names that may begin with any sign.
        own = capture.DiscardedState(), tf.name_scope("model")
        with own[0], own[1], state.restored(call.ambient, []):
            outputs = keras.tree.flatten(call.function(*args, **kwargs))
        return [output for output in outputs if tf.is_symbolic_tensor(output)]

    tensors = [leaves[i] for i in places]
    return run, [tf.TensorSpec(t.shape, t.dtype) for t in tensors]


class _Backward:
    """The gradient of a function, and what it reads of the forward pass."""

    def __init__(self, run: Callable, variables: list):
        self._run = run
        self._variables = variables

    def run(self, inputs, output_gradients) -> list:
        """Computes the gradient; if it reads more than arguments and results,
        after all of the forward pass."""
        is_whole = self.cost.residual_bytes > 0
        _, gradients, _ = self._gradients(inputs, output_gradients, is_whole)
        return [g for g in gradients if g is not None]

    def trace(self, inputs, results):
        """Traces it; reads `cost`, without times, off the graph."""
        function = releasing.function(self._trace)
        return function.get_concrete_function(inputs, results)

    def _gradients(self, inputs, output_gradients, is_whole: bool = False):
        sources = [t for t in inputs if t.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources + self._variables)
            outputs = self._run(inputs)
        if is_whole:
            # So that the last operations run, too, which nobody else reads.
            ends = [tf.reshape(output, [-1])[:1] for output in outputs]
            with tf.control_dependencies(ends):
                output_gradients = list(map(tf.identity, output_gradients))
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
        if not private_tf.in_xla():
            latest = repeats.once(graph.get_operations()[num_forward:])
            gradients = [latest(gradient) for gradient in gradients]
        return outputs, gradients, num_forward

    def _trace(self, inputs, output_gradients):
        outputs, gradients, num_forward = self._gradients(
            inputs, output_gradients
        )
        flat_gradients = tf.nest.flatten(
            [g for g in gradients if g is not None], expand_composites=True
        )
        floats = [i for i, t in enumerate(inputs) if t.dtype.is_floating]
        pairs = zip(floats, gradients, strict=False)
        given = {i: g for i, g in pairs if g is not None}
        handed_in = {root(t).ref() for t in output_gradients}
        reads = _read_before(flat_gradients, num_forward)
        places = {root(t).ref(): i for i, t in enumerate(inputs)}
        results = {}
        for i, output in enumerate(outputs):
            if root(output).ref() not in places:
                results.setdefault(root(output).ref(), i)
        rest = reads - places.keys() - results.keys()
        kept = [t for t in (r.deref() for r in rest) if t.op.type not in _HELD]
        loops = {t.op for t in kept if t.op.type in ordering.LOOPS}
        self.cost = Cost(
            kept_inputs=tuple(sorted(places[r] for r in reads & places.keys())),
            kept_outputs=tuple(
                sorted(results[r] for r in reads & results.keys())
            ),
            gradients=tuple(given),
            passed=tuple(
                i
                for i, g in given.items()
                if isinstance(g, tf.Tensor) and root(g).ref() in handed_in
            ),
            residual_bytes=sum(map(num_bytes, kept))
            + sum(map(reading.left_bytes, loops)),
            gradient_bytes=sum(
                num_bytes(g.values if isinstance(g, tf.IndexedSlices) else g)
                for g in gradients[len(floats) :]
                if g is not None
            ),
        )
        return flat_gradients


def _read_before(tensors, num_forward: int) -> set:
    """References of the forward pass's tensors that a gradient reads."""
    if not tensors:
        return set()
    operations = tensors[0].graph.get_operations()
    forward = set(operations[:num_forward])
    reads, visited, waiting = set(), set(), [t.op for t in tensors]
    while waiting:
        operation = waiting.pop()
        if operation in visited or operation in forward:
            continue
        visited.add(operation)
        for tensor in operation.inputs:
            if tensor.op in forward:
                reads.add(root(tensor).ref())
            else:
                waiting.append(tensor.op)
    return reads


def _run_looped(run: Callable, *specs) -> tuple[float, int]:
    """Runs a function of lists of tensors in a loop.

    What starts and ends a function's run may take far longer than a small
    layer, and is no part of a step. So runs of different lengths are compared.
    """

    def repeat(count, *tensors):
        def once(i, total):
            outputs = ordering.one_by_one(run, *tensors)
            outputs = tf.nest.flatten(outputs, expand_composites=True)
            # A number of each output, or it would not be computed.
            for output in outputs:
                if output.dtype.is_floating or output.dtype.is_integer:
                    first = tf.reshape(output, [-1])[:1]
                    total += tf.reduce_sum(tf.cast(first, tf.float32))
            return i + 1, total

        start = tf.constant(0), tf.constant(0.0)
        # One at a time: side by side, runs would take the memory of several.
        return tf.while_loop(
            lambda i, _: i < count, once, start, parallel_iterations=1
        )[1]

    arguments = [[_random(spec) for spec in group] for group in specs]
    loop = releasing.function(repeat)
    return _measure(lambda count: loop(tf.constant(count), *arguments).numpy())


def _run_compiled(run: Callable, *specs) -> tuple[float, int]:
    """Runs a function of lists of tensors, compiled, some times in a row.

    Not in a loop, out of which XLA would take all that is the same each time.
    """

    def once(*tensors):
        return tf.nest.flatten(run(*tensors), expand_composites=True)

    arguments = [[_random(spec) for spec in group] for group in specs]
    function = releasing.function(once, jit_compile=True)

    def repeat(count):
        for _ in range(count):
            function(*arguments)

    return _measure(repeat)


def _measure(repeat: Callable[[int], Any]) -> tuple[float, int]:
    """Measures a function that does something a number of times.

    Returns:
        The seconds of it once, and the bytes of its peak.
    """

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        repeat(count)
        return time.perf_counter() - begin

    seconds(1)
    counting = memory.track() if memory.is_counted() else None
    with counting or contextlib.nullcontext() as usage:
        short = min(seconds(1) for _ in range(_NUM_RUNS))
    peak_bytes = usage.peak_bytes - usage.start_bytes if usage else 0
    if short >= _ENOUGH_SECONDS:
        return short, peak_bytes
    estimate = max(seconds(2) - short, 0.0)
    more = min(_MAX_REPEATS, 1 + int(_ENOUGH_SECONDS / (estimate + 1e-6)))
    long = min(seconds(1 + more) for _ in range(_NUM_RUNS))
    return max(0.0, long - short) / more, peak_bytes


def _random(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.is_floating:
        # Positive, for logarithms and roots.
        shape: Any = spec.shape.as_list()
        return tf.cast(tf.random.uniform(shape, 0.1, 1.0), spec.dtype)
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


def _computed_peak_bytes(function) -> int:
    """What a graph makes, at its peak."""
    sizes = reading.Sizes(iterations=1)
    program = reading.read(function.graph, sizes)
    return allocations.simulate(program.nodes, program.results).num_bytes


def _of_one_replica(variable):
    """What is read of a variable, outside of all replicas."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return variable
    return variable.distribute_strategy.experimental_local_results(variable)[0]
