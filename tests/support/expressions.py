"""What a training step computes, after TensorFlow's graph optimizer.

Two steps whose graphs compute the same expressions of the same variables give
the same bits, whatever the numbers are: that says more than equal numbers do.
"""

import functools
import hashlib

import keras
import tensorflow as tf
from tensorflow.python.eager import context

# Their result holds the numbers of their argument.
_COPIES = {
    *("Identity", "IdentityN", "StopGradient"),
    *("ParseTensor", "SerializeTensor"),
}
_SAME_NUMBERS = {"BroadcastTo", "ExpandDims", "Reshape", "Squeeze", "Tile"}
_COMMUTATIVE = {"AddV2", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mul"}
_OF_MEMORY = {"AssignAddVariableOp", "AssignVariableOp", "NoOp", "_Retval"}
_ATTRIBUTES = (
    "adj_x adj_y begin_mask end_mask equation epsilon fused_ops is_training "
    "keep_dims op_names padding shrink_axis_mask strides transpose_a "
    "transpose_b DstT SrcT"
).split()


class _Watched(keras.callbacks.Callback):
    """Has TensorFlow give the graphs that a training step runs."""

    graphs: tuple = ()

    def on_train_batch_begin(self, batch, logs=None):
        context.context().enable_graph_collection()

    def on_train_batch_end(self, batch, logs=None):
        made = context.context().export_run_metadata()
        context.context().disable_graph_collection()
        self.graphs = [
            graph
            for function in made.function_graphs
            for graph in function.partition_graphs
        ]


def of_training(model: keras.Model, x, y, **options) -> dict[str, str]:
    """The expressions of a step of `fit`, each with the name of an operation
    that computes it; neither what prepares the data nor the update."""
    return _expressions(ran(model, x, y, **options))


def ran(model: keras.Model, x, y, **options):
    """The graph of a step of `fit`, as it runs."""
    watched = _Watched()
    model.fit(x, y, len(x), verbose=0, callbacks=[watched], **options)
    return max(watched.graphs, key=lambda g: len(g.node))


def _expressions(graph) -> dict[str, str]:
    nodes = {node.name: node for node in graph.node}
    known: dict[str, str] = {}

    def expression(tensor: str) -> str:
        name, _, index = tensor.partition(":")
        node = nodes[name]
        arguments = [each for each in node.input if not each.startswith("^")]
        if node.op in _COPIES:
            return expression(arguments[int(index or 0)])
        if node.op in _SAME_NUMBERS:
            return expression(arguments[0])
        if name not in known:
            known[name] = _described(node, list(map(expression, arguments)))
        return known[name] + index

    optimizer = ("sgd", "adam")
    return {
        expression(node.name): f"{node.op} {node.name}"
        for node in graph.node
        if node.op not in _COPIES | _SAME_NUMBERS | _OF_MEMORY | {"Const"}
        and not any(f"/{each}" in node.name for each in optimizer)
    }


def _described(node, arguments: list[str]) -> str:
    if node.op in ("Rank", "Shape", "Size"):
        return node.op
    if node.op == "Const":
        value = tf.make_ndarray(node.attr["value"].tensor)
        arguments = [str(value.dtype), value.tobytes().hex()]
    elif node.op == "_Arg":
        arguments = [node.name]
    elif node.op == "AddN":
        # One after another.
        return functools.reduce(_sum, arguments)
    attributes = [
        f"{each}={node.attr[each]}" for each in _ATTRIBUTES if each in node.attr
    ]
    return _digest(node.op, attributes, arguments)


def _sum(a: str, b: str) -> str:
    return _digest("AddV2", [], [a, b])


def _digest(kind: str, attributes: list[str], arguments: list[str]) -> str:
    if kind in _COMMUTATIVE:
        arguments = sorted(arguments)
    text = "|".join([kind, *attributes, *arguments])
    return hashlib.md5(text.encode()).hexdigest() + ":"
