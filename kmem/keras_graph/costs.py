"""What one call of a layer costs: bytes and seconds, forward and backward.

Bytes that are kept come from the traced graph of the call and its gradient:
what the gradient's operations read of the forward pass's. Working memory is
measured, since only the kernels know it (where bytes cannot be counted: what
the graph makes); time is measured, or computed from the number of floating
point operations and of bytes moved. XLA's kernels are
others than TensorFlow's, so for a step that is compiled each call is. What
this module does not do: see what is fused across layers.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
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
from kmem.step.batches import random_data

# How a call's costs are found.
Costs = Literal["measured", "flops", "traced"]

# A processor of no particular make, for times that are computed.
_FLOPS_PER_SECOND = 1e11
BYTES_PER_SECOND = 1e10
# A layer is run so often, and until its runs have taken so long: the fastest
# counts. The time of all layers is divided by, so none takes none.
_NUM_RUNS, _ENOUGH_SECONDS = 3, 0.005
_LEAST_SECONDS = 1e-6
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
    variables = [_of_one_replica(v.value) for v in trained(call)]
    noted: list[Cost] = []
    gradients = functools.partial(_gradients, run, variables, noted)
    forward, both = (
        # As in a step.
        releasing.function(
            functools.partial(ordering.one_by_one, each),
            jit_compile=compiled or None,
        )
        for each in (run, gradients)
    )
    graph = both.get_concrete_function(inputs, results).graph
    cost = noted[-1]
    if costs == "traced":
        return cost
    is_run = not (call.effects or purity.may_refuse(graph.get_operations()))
    measured = is_run and costs == "measured"
    is_counted = is_run and memory.is_counted()
    seconds, forward_peak, both_seconds, backward_peak = 0.0, 0, 0.0, 0
    if measured or is_counted:
        if not all(spec.shape.is_fully_defined() for spec in results):
            raise ValueError(
                "Each layer's results must have shapes that are known for a "
                f"batch of a known shape. Received: {call.name}, which gives "
                + ", ".join(str(spec.shape) for spec in results)
            )
        tensors = random_data(inputs)
        seconds, forward_peak = _measure(forward, tensors)
        upstream = random_data(results)
        both_seconds, backward_peak = _measure(both, tensors, upstream)
    # Of `both`, whose backward pass may need the forward pass.
    again = bool(cost.residual_bytes or cost.kept_outputs)
    if not (measured and is_counted):
        forward_graph = forward.get_concrete_function(inputs).graph
        if not is_counted:
            forward_peak = _computed_peak_bytes(forward_graph)
            backward_peak = _computed_peak_bytes(graph)
        if not measured:
            seconds, again = _computed_seconds(forward_graph), True
            both_seconds = _computed_seconds(graph)
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
        with own[0], own[1], state.restored(call.ambient):
            outputs = keras.tree.flatten(call.function(*args, **kwargs))
        return [output for output in outputs if tf.is_symbolic_tensor(output)]

    tensors = [leaves[i] for i in places]
    return run, [tf.TensorSpec(t.shape, t.dtype) for t in tensors]


def _gradients(
    run: Callable, variables: list, noted: list[Cost], inputs, output_gradients
) -> list[tf.Tensor]:
    """Traces a function and its gradient, and notes what that reads of the
    forward pass, without times. If it reads more than arguments and results,
    it waits for all of the forward pass."""
    floats = [i for i, t in enumerate(inputs) if t.dtype.is_floating]
    sources = [inputs[i] for i in floats]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources + variables)
        outputs = run(inputs)
    graph = tf.compat.v1.get_default_graph()
    num_forward = len(graph.get_operations())
    upstream = list(map(tf.identity, output_gradients))
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, upstream, strict=True)
        if output.dtype.is_floating
    ]
    gradients = tape.gradient(
        [output for output, _ in pairs],
        sources + variables,
        output_gradients=[gradient for _, gradient in pairs],
    )
    if not private_tf.in_xla():
        made = graph.get_operations()[num_forward:]
        latest = repeats.once(ordering.needed_of(made, gradients))
        gradients = [latest(gradient) for gradient in gradients]
    given = zip(floats, gradients, strict=False)
    cost = _cost_in_graph(
        *(inputs, outputs, output_gradients, num_forward),
        {i: g for i, g in given if g is not None},
        [g for g in gradients[len(floats) :] if g is not None],
    )
    noted.append(cost)
    if cost.residual_bytes:
        ends = [output.op for output in outputs]
        for gradient in upstream:
            private_tf.wait_for(gradient.op, ends)
    found = [g for g in gradients if g is not None]
    return tf.nest.flatten(found, expand_composites=True)


def _cost_in_graph(
    inputs, outputs, output_gradients, num_forward, gradients, of_variables
) -> Cost:
    """What a gradient reads of the forward pass.

    Args:
        num_forward: How many operations the forward pass has.
        gradients: By the inputs' places, if there is one.
        of_variables: The variables' gradients.
    """
    handed_in = {root(t).ref() for t in output_gradients}
    reads = _read_before([*gradients.values(), *of_variables], num_forward)
    places = {root(t).ref(): i for i, t in enumerate(inputs)}
    results = {}
    for i, output in enumerate(outputs):
        if root(output).ref() not in places:
            results.setdefault(root(output).ref(), i)
    rest = reads - places.keys() - results.keys()
    kept = [t for t in (r.deref() for r in rest) if t.op.type not in _HELD]
    loops = {t.op for t in kept if t.op.type in ordering.LOOPS}
    return Cost(
        kept_inputs=tuple(sorted(places[r] for r in reads & places.keys())),
        kept_outputs=tuple(sorted(results[r] for r in reads & results.keys())),
        gradients=tuple(gradients),
        passed=tuple(
            i
            for i, g in gradients.items()
            if isinstance(g, tf.Tensor) and root(g).ref() in handed_in
        ),
        residual_bytes=sum(map(num_bytes, kept))
        + sum(map(reading.left_bytes, loops)),
        gradient_bytes=sum(
            num_bytes(g.values if isinstance(g, tf.IndexedSlices) else g)
            for g in of_variables
        ),
    )


def _read_before(gradients, num_forward: int) -> set:
    """References of the forward pass's tensors that gradients read."""
    tensors = tf.nest.flatten(gradients, expand_composites=True)
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


def _measure(function: Callable, *arguments: list) -> tuple[float, int]:
    """The seconds that a function takes, and the bytes of its peak.

    To start one takes longer than a small layer, and is no part of a step: an
    empty function is run in turns with it, and its time is subtracted.
    """
    nothing = _nothing()
    _seconds(nothing)
    _seconds(function, *arguments)  # Makes its kernels.
    runs, starts = [], []
    with memory.track() if memory.is_counted() else nullcontext() as usage:
        while len(runs) < _NUM_RUNS or sum(runs) < _ENOUGH_SECONDS:
            runs.append(_seconds(function, *arguments))
            starts.append(_seconds(nothing))
    peak_bytes = usage.peak_bytes - usage.start_bytes if usage else 0
    return max(_LEAST_SECONDS, min(runs) - min(starts)), peak_bytes


def _seconds(function: Callable, *arguments) -> float:
    begin = time.perf_counter()
    function(*arguments)
    tf.raw_ops.SyncDevice()  # Waits for a GPU.
    return time.perf_counter() - begin


@functools.cache
def _nothing() -> Callable:
    return releasing.function(lambda: tf.constant(0.0))


def _computed_seconds(graph: tf.Graph) -> float:
    profiler = tf.compat.v1.profiler
    options = profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    flops = profiler.profile(graph, options=options).total_float_ops
    moved = sum(
        num_bytes(tensor)
        for operation in graph.get_operations()
        for tensor in (*operation.inputs, *operation.outputs)
        if operation.type != "Identity" and tensor.dtype != tf.resource
    )
    return flops / _FLOPS_PER_SECOND + moved / BYTES_PER_SECOND


def _computed_peak_bytes(graph: tf.Graph) -> int:
    """What a graph makes, at its peak."""
    sizes = reading.Sizes(iterations=1)
    program = reading.read(graph, sizes)
    return allocations.simulate(program.nodes, program.results).num_bytes


def _of_one_replica(variable):
    """What is read of a variable, outside of all replicas."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return variable
    return variable.distribute_strategy.experimental_local_results(variable)[0]
