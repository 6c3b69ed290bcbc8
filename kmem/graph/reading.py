"""A traced graph as nodes whose allocations can be simulated.

Calls of functions are put in line, as TensorFlow does before it runs a graph;
what no result and no variable needs is left out. A loop is one node: it needs
what one iteration does, and what its iterations put into lists stays until
the lists have been read. Bytes are those of the shapes, for batches of any
size if the graph was traced with a batch size that divides no other
dimension. What this does not know: arrays that kernels need for themselves,
but for a few kinds of operations on the CPU, and what TensorFlow's graph
optimizer joins.
"""

import dataclasses
import math
import re
from typing import Any

import tensorflow as tf

from kmem.base import private_tf
from kmem.graph import fusion
from kmem.graph import ordering
from kmem.planning import allocations
from kmem.planning.allocations import Node

# Their result shows their first argument.
_VIEWS = fusion.ALIASES | frozenset(
    "CheckNumerics Bitcast Snapshot TensorListFromTensor".split()
)
# Their results are somebody else's, or a few numbers.
_SMALL = frozenset(
    "Const Placeholder ReadVariableOp VarHandleOp NoOp EmptyTensorList Rank "
    "TensorListReserve TensorListLength TensorListElementShape Shape ShapeN "
    "Size VariableShape BroadcastGradientArgs TensorListGetItem "
    "TensorListPopBack TensorListPushBack TensorListSetItem".split()
)
# They may write into an argument.
_FORWARDS = frozenset(
    "Abs Add AddN AddV2 BiasAdd Cast Ceil ClipByValue Cos DivNoNan Elu EluGrad "
    "Erf Erfc Exp Expm1 Floor LeakyRelu LeakyReluGrad Log Log1p LogSoftmax "
    "LogicalAnd LogicalNot Maximum Minimum Mul MulNoNan Neg Pow RealDiv "
    "Reciprocal Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad Selu "
    "SeluGrad Sigmoid SigmoidGrad Sign Sin Softmax Softplus SoftplusGrad "
    "Softsign Sqrt SqrtGrad Square SquaredDifference Sub Tanh TanhGrad Xdivy "
    "Xlogy ZerosLike".split()
)
_COPIES = frozenset(("Identity",))
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
_BRANCHES = frozenset("If StatelessIf Case StatelessCase".split())
# What they put into a list, by place.
_PUSHES = {"TensorListPushBack": 1, "TensorListSetItem": 2}
_CHANGES = re.compile(
    ".*(Assign|Apply|Resource.*Scatter)|(While|If|Case|StatefulPartitionedCall)$"
)
# A processor of no particular make.
_FLOPS_PER_SECOND = 5e10
_BYTES_PER_SECOND = 5e9
_LEAST_SECONDS = 1e-6


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph for `allocations.simulate`.

    Attributes:
        nodes: What it runs.
        results: The values that it returns.
        arguments: The values that it is given.
        operations: Of each node the operation.
    """

    nodes: list[Node]
    results: list[int]
    arguments: list[int]
    operations: list[tf.Operation]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large tensors are.

    Args:
        rows: The batch size.
        traced_rows: The one that the graph was traced with.
        halves: Whether what grows with the batch is of 16 bits, if it is of 32.
        iterations: How often a loop runs whose graph does not tell; `None`
            refuses it.
    """

    rows: int = 1
    traced_rows: int = 1
    halves: bool = False
    iterations: int | None = None

    def shape(self, tensor) -> list[int]:
        """Its shape, with the batch size."""
        return [
            size // self.traced_rows * self.rows
            if size % self.traced_rows == 0
            else size
            for size in [size or 1 for size in tensor.shape.as_list()]
        ]

    def grows(self, tensor) -> bool:
        """Whether it is larger for a larger batch."""
        if tensor.shape.rank is None or self.traced_rows == 1:
            return False
        sizes = tensor.shape.as_list()
        return any(size and size % self.traced_rows == 0 for size in sizes)

    def num_bytes(self, tensor) -> int:
        """Its bytes, as the allocator counts them."""
        unknown = tensor.shape.rank is None
        if unknown or tensor.dtype in (tf.resource, tf.variant):
            return 0
        count = math.prod(self.shape(tensor)) * tensor.dtype.size
        if self.halves and tensor.dtype == tf.float32 and self.grows(tensor):
            count //= 2
        return -(-count // 64) * 64


def read(graph: Any, sizes: Sizes) -> Program:
    """Reads a function's graph, with its inputs and outputs."""
    return _Reader(sizes).program(graph)


def left_bytes(loop: tf.Operation) -> int:
    """What a loop leaves in lists for its gradient, as if it ran once where
    its graph does not tell how often it runs."""
    node = Node(loop.name, [], [], [], [0] * len(loop.outputs), [])
    _Reader(Sizes(iterations=1))._loop(loop.graph, loop, node)
    return sum(node.sizes)


class _Reader:
    """Numbers values and nodes."""

    def __init__(self, sizes: Sizes):
        self._sizes = sizes
        self._bytes = sizes.num_bytes
        self._operations: list[tf.Operation] = []
        self._nodes: list[Node] = []
        self._num_values = 0
        # What goes into lists.
        self._pushed: list[int] = []

    def program(self, graph) -> Program:
        arguments = self._values(len(graph.inputs))
        results, _ = self._inline(graph, arguments, [])
        return Program(self._nodes, results, arguments, self._operations)

    def _values(self, count: int) -> list[int]:
        self._num_values += count
        return list(range(self._num_values - count, self._num_values))

    def _inline(self, graph, arguments: list[int], waits: list[int]):
        """Adds a graph's nodes; returns the values of its results, and the
        nodes that change variables."""
        values: dict = {}
        for tensor, value in zip(graph.inputs, arguments, strict=True):
            values[tensor.op, 0] = value
        # Of each operation the nodes that end it.
        ends: dict = {tensor.op: [] for tensor in graph.inputs}
        operations = graph.get_operations()
        changes = [op for op in operations if _CHANGES.match(op.type)]
        roots = changes + [tensor.op for tensor in graph.outputs]
        for op in ordering.needed(graph, roots):
            if op in ends:
                continue
            reads = [values[t.op, t.value_index] for t in op.inputs]
            before = [n for c in op.control_inputs for n in ends[c]]
            if not op.inputs and not op.control_inputs:
                before = waits
            inner = self._function(graph, op, "f")
            if inner is not None:
                made, ends[op] = self._inline(inner, reads, before)
            else:
                made = self._values(len(op.outputs))
                ends[op] = [len(self._nodes)]
                node = self._node(graph, op, reads, before, made)
                self._nodes.append(node)
                self._operations.append(op)
            for place, value in enumerate(made):
                values[op, place] = value
        results = [values[t.op, t.value_index] for t in graph.outputs]
        return results, [n for op in changes for n in ends[op]]

    def _function(self, graph, op, name: str) -> Any:
        if name == "f" and op.type not in _CALLS:
            return None
        called = op.node_def.attr[name].func.name
        function = called and private_tf.function_in(graph, called)
        return function.graph if function else None

    def _node(self, graph, op, reads, before, made) -> Node:
        kind = op.type
        sizes = [self._bytes(tensor) for tensor in op.outputs]
        views = [-1] * len(made)
        if kind in _VIEWS:
            views[0] = 0
        elif kind == "Mul" and (one := _place_of_one(op)) is not None:
            # TensorFlow leaves such a product out.
            views[0] = 1 - one
        elif kind == "IdentityN":
            views = list(range(len(made)))
        elif kind in _SMALL:
            sizes = [0] * len(made)
        if kind in _PUSHES:
            self._pushed.append(reads[_PUSHES[kind]])
        node = Node(
            name=op.name,
            reads=reads,
            waits=before,
            makes=made,
            sizes=sizes,
            views=views,
            forwards=kind in _FORWARDS,
        )
        if kind in ordering.LOOPS:
            self._loop(graph, op, node)
        elif kind in _BRANCHES:
            self._branches(graph, op, node)
        elif kind == "MaxPoolGrad":
            # The maxima anew, with their places in 64 bits.
            node.workspace_bytes = 3 * self._bytes(op.inputs[1])
        if kind not in _SMALL and kind not in _VIEWS:
            node.seconds = self._seconds(op, sizes)
        return node

    def _seconds(self, op, sizes: list[int]) -> float:
        """Roughly: threads differ in what is long or short."""
        given = [self._bytes(tensor) for tensor in op.inputs]
        seconds = _LEAST_SECONDS + sum(sizes + given) / _BYTES_PER_SECOND
        if "MatMul" in op.type or "Conv2D" in op.type:
            # Of a product of matrices the root of the product of all sizes.
            product = math.prod(max(size / 4, 1.0) for size in sizes + given)
            seconds += 2 * product**0.5 / _FLOPS_PER_SECOND
        return seconds

    def _loop(self, graph, op, node: Node) -> None:
        body = self._function(graph, op, "body")
        if body is None:
            return  # Of a model that was loaded as a graph.
        inner = _Reader(self._sizes)
        program = inner.program(body)
        peak = allocations.simulate(program.nodes, program.results)
        node.workspace_bytes = peak.num_bytes
        growth = inner._growth(program)
        lists = [
            place
            for place, tensor in enumerate(op.outputs)
            if tensor.dtype == tf.variant and tensor.consumers()
        ]
        if growth and lists:
            # The gradient of the loop reads the last ones.
            node.sizes[lists[-1]] = growth * self._iterations(graph, op)

    def _iterations(self, graph, op) -> int:
        """How often a loop runs, which counts up to a number."""
        condition = self._function(graph, op, "cond")
        given = zip([t.op for t in condition.inputs], op.inputs, strict=True)
        outside, counts = dict(given), []
        for each in condition.get_operations():
            if each.type != "Less" or not each.inputs[0].dtype.is_integer:
                continue
            limit = fusion.source(each.inputs[1], _COPIES)
            limit = fusion.source(outside.get(limit.op, limit), _COPIES)
            if limit.op.type in ordering.LOOPS:
                # As often as the loop that this one is the gradient of.
                counts.append(self._iterations(graph, limit.op))
                continue
            value = tf.get_static_value(limit)
            if value is not None:
                counts.append(int(value))
        if counts:
            return min(counts)
        if self._sizes.iterations is None:
            raise ValueError(
                "The model's loops must run a number of times that is known "
                f"when the step is traced. Received: the loop {op.name}"
            )
        return self._sizes.iterations

    def _growth(self, program: Program) -> int:
        """What an iteration leaves in lists."""
        maker = {
            value: (node, place)
            for node in program.nodes
            for place, value in enumerate(node.makes)
        }
        next_value = dict(zip(program.arguments, program.results, strict=True))

        def origin(value: int) -> int:
            while value in maker:
                node, place = maker[value]
                if node.views[place] < 0:
                    break
                value = node.reads[node.views[place]]
            return value

        # What the iteration before it made, or what is always the same.
        before = (next_value.get(v, v) for v in map(origin, self._pushed))
        made = [maker[v] for v in set(map(origin, before)) if v in maker]
        return sum(node.sizes[place] for node, place in made)

    def _branches(self, graph, op, node: Node) -> None:
        attributes = op.node_def.attr
        names = [f.name for f in attributes["branches"].list.func]
        for key in ("then_branch", "else_branch"):
            names += [attributes[key].func.name] if key in attributes else []
        for name in names:
            function = private_tf.function_in(graph, name)
            if function is None:
                continue
            program = read(function.graph, self._sizes)
            peak = allocations.simulate(program.nodes, program.results)
            more = peak.num_bytes - peak.end_bytes
            node.workspace_bytes = max(node.workspace_bytes, more)


def _place_of_one(op) -> int | None:
    """Which factor of a product is the number 1, if one is."""
    for place, tensor in enumerate(op.inputs):
        is_number = tensor.op.type == "Const" and tensor.shape.rank == 0
        if is_number and tf.get_static_value(tensor) == 1:
            return place
    return None
