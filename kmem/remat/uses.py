"""Lets the graph optimizer see that a result has more than one use.

TensorFlow joins an operation with the one that reads it, and rounds otherwise
then, where nothing else reads it. In plain training the backward pass does.
Of the two copies that recomputation makes of an operation, one has no reader
in the backward pass, and the other one may have none in the forward pass.

A sum of three rounds by which of its addends is still needed: those that the
backward pass reads are held until it is there.

Sharded training gathers weights again for a backward pass, and need not run a
layer again for that: there a gradient reads what the first run made of its
arguments, as in plain training, and the second run is of variables alone.
"""

import itertools
import weakref

import tensorflow as tf

from kmem.base import private_tf
from kmem.graph import fusion
from kmem.graph import names
from kmem.graph import ordering

# What reads a result and is not joined with what made it.
_APART = frozenset(
    (
        "AvgPool BatchMatMulV2 ConcatV2 Conv2D Conv2DBackpropInput "
        "DepthwiseConv2dNative MatMul Max MaxPool Mean Softmax Sum"
    ).split()
)
# What only one of the two copies may have: how it reads what is outside of it.
_PASSED_ON = (
    "Const Identity IdentityN NoOp Placeholder ReadVariableOp StopGradient"
).split()

# Also what sends a tensor to host memory, and what fetches it.
COPIES = frozenset(
    "Identity IdentityN ParseTensor SerializeTensor StopGradient".split()
)
_SAME_MEMORY = COPIES | {"ExpandDims", "Reshape", "Squeeze"}
_OF_SHAPE = ("Rank", "Shape", "ShapeN", "Size")

# For each graph the name of a tensor, and that of its second copy.
_repeated: weakref.WeakKeyDictionary[tf.Graph, dict[str, str]] = (
    weakref.WeakKeyDictionary()
)


def shown(
    first: list, second: list, gradient: list, arguments: list[tuple]
) -> list[tf.Operation]:
    """Gives both copies of an operation as many readers as plain training.

    Args:
        first: The operations of a function's first run.
        second: Those of its second run.
        gradient: Those of the second run's gradient.
        arguments: What each of the runs was given, in pairs.

    Returns:
        Operations that read what is used more than once. Something has to
        wait for them, or they are left out. They keep no memory.
    """
    backward, needed = set(gradient), set(gradient)
    # What only the results of the second run are made of is not run.
    for op in reversed(second):
        if any(needed.intersection(t.consumers()) for t in op.outputs):
            needed.add(op)
    both = pairs(first, second)
    graphs = {op.graph for pair in both for op in pair}
    if len(graphs) != 1:
        return []
    readers = []
    repeated = _repeated.setdefault(graphs.pop(), {})
    for output, again in _results(both):
        repeated[output.name] = again.name
        uses = output.consumers()
        uses_again = needed.intersection(again.consumers())
        plain = {names.of_first(op) for op in _readers(output, COPIES)}
        if len(plain) < 2:
            continue
        sums = _sums(output, backward)
        if sums or _may_be_joined(uses):
            readers.append(_reader(output, sums))
        if _may_be_joined(list(uses_again)):
            readers.append(_reader(again, []))
    return readers + _merged(both, gradient, arguments)


def _merged(
    both: list[tuple[tf.Operation, tf.Operation]],
    gradient: list[tf.Operation],
    arguments: list[tuple],
) -> list[tf.Operation]:
    """Gives the first run what its gradient computes like it.

    The gradient of a power computes another one of the same number, and reads
    no gradient for that. TensorFlow takes both apart, and merges what they
    have in common, which is called after the gradient then. What it is called
    says to which factor of a product it moves a constant.
    """

    def source(tensor: tf.Tensor) -> str:
        return fusion.source(tensor, COPIES).name

    again = _repeated.get(both[0][0].graph, {}) if both else {}
    of_first: dict[str, tf.Tensor] = {}
    for one, other in [*arguments, *_results(both)]:
        name = source(other)
        # What runs again within the function has done so by now.
        while name is not None:
            of_first[name], name = one, again.get(name)

    def read(op: tf.Operation) -> tuple:
        return tuple(source(t) for t in op.inputs if not fusion.is_constant(t))

    computed = {(other.type, read(other)) for _, other in both}
    repeats, readers = {*again.values()}, []
    for op in gradient:
        # Neither what waits, nor what is run again.
        if op.control_inputs or any(t.name in repeats for t in op.outputs):
            continue
        sources = read(op)
        is_known = sources and of_first.keys() >= {*sources}
        if is_known and (op.type, sources) in computed:
            inputs = [of_first.get(source(t), t) for t in op.inputs]
            copied = op.graph.create_op(
                *(op.type, inputs, [t.dtype for t in op.outputs]),
                name=op.name,
                attrs=op.node_def.attr,
            )
            readers += [_reader(t, []) for t in copied.outputs]
    return readers


def pairs(
    first: list[tf.Operation], second: list[tf.Operation]
) -> list[tuple[tf.Operation, tf.Operation]]:
    """Each operation of a first run with that of the second run which repeats
    it; none, if the two are not alike."""
    first = [op for op in first if op.type not in _PASSED_ON]
    second = [op for op in second if op.type not in _PASSED_ON]
    if [op.type for op in first] != [op.type for op in second]:
        return []
    return list(zip(first, second, strict=True))


def _results(both: list[tuple]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Those of operations, in pairs. A loop that is differentiated has more
    than one that is not."""
    of = [zip(a.outputs, b.outputs, strict=False) for a, b in both]
    return [*itertools.chain(*of)]


def _may_be_joined(uses: list[tf.Operation]) -> bool:
    """Whether there is a single one, of a kind that takes its input in."""
    within = [op for op in uses if op.type not in _PASSED_ON]
    if len(within) < len(uses):
        # What leaves the segment does so through several operations.
        return not within
    return len(uses) == 1 and uses[0].type not in _APART


def _sums(tensor: tf.Tensor, backward: set[tf.Operation]) -> list[tf.Tensor]:
    """The sums of three of what the backward pass reads as well."""
    if backward.isdisjoint(_readers(tensor, _SAME_MEMORY)):
        return []
    readers = _readers(tensor, COPIES, later=False)
    sums = map(fusion.sum_of_three, readers)
    return [op.outputs[0] for op in sums if op is not None]


def _readers(
    tensor: tf.Tensor, through: frozenset[str], later: bool = True
) -> list[tf.Operation]:
    """What reads a tensor, or what operations of some types make of it; also
    `later`, when it was made again or was an argument of what is run again."""
    readers: dict[tf.Operation, None] = {}
    for op in tensor.consumers():
        delayed = ordering.is_unordered(op) != ordering.is_unordered(tensor.op)
        if op.type in through:
            for given, made in zip(op.inputs, op.outputs, strict=False):
                if given.ref() == tensor.ref():
                    readers |= dict.fromkeys(_readers(made, through, later))
        elif op.type not in _OF_SHAPE and (later or not delayed):
            readers[op] = None
    again = _repeated.get(tensor.graph, {}).get(tensor.name)
    if later and again is not None:
        second = tensor.graph.get_tensor_by_name(again)
        readers |= dict.fromkeys(_readers(second, through))
    return list(readers)


def _reader(tensor: tf.Tensor, until: list[tf.Tensor]) -> tf.Operation:
    """What reads a tensor, and holds it until others are there."""
    with names.after(tensor):
        copies = tf.identity_n([tensor, *until])
    # One that is only waited for would become a control dependency.
    return fusion.lasting(copies[0]).op


def computed(
    run: list[tf.Operation], given: list[tf.Tensor]
) -> list[tf.Operation]:
    """What one of the two runs of a function computes from what it was given:
    what it starts from, but for variables."""
    depends = {tensor.ref() for tensor in given}
    computed_ops = []
    for op in run:
        if any(tensor.ref() in depends for tensor in op.inputs):
            depends |= {tensor.ref() for tensor in op.outputs}
            computed_ops.append(op)
    return computed_ops


def keep_residuals(
    first: list[tf.Operation],
    second: list[tf.Operation],
    gradient: list[tf.Operation],
) -> None:
    """Lets a gradient read what the first run has `computed` from what it was
    given; what nobody reads in the second run then is not run.

    Where the two are not alike, such as a loop, which has more results once
    it is differentiated, the second run stays.
    """
    both = _results(pairs(first, second))
    first_outputs = {repeated.ref(): output for output, repeated in both}
    for op in gradient:
        for tensor in op.inputs:
            source = fusion.source(tensor, COPIES)
            output = first_outputs.get(source.ref())
            if output is not None:
                private_tf.read_instead([op], tensor, output)
