"""What kmem takes of TensorFlow that is not public; nothing else does.

TensorFlow has no public function that does what these do. Each says what it
is for, and which test fails when it moves (in 2.20 and 2.21 it is here).
"""

import contextlib
import re
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop
from tensorflow.python.eager import context as eager_context

# What carries a backward pass out, for `kmem.dtr.failures` to replace.
# dtr/test_dtr_device.py
from tensorflow.python.eager import imperative_grad as imperative_grad

# Whether tapes watch some tensors, and how an operation gets a gradient of
# one's own, without the copies of `tf.custom_gradient`.
# remat/test_remat.py, dtr/test_dtr_blocks.py
from tensorflow.python.eager import record as record

# How a variable tells that it is read. remat/test_remat.py
from tensorflow.python.eager.tape import variable_accessed as variable_accessed

# TensorFlow's hook for its debugger: one call for every operation that runs
# or is traced. precision/test_precision_guards.py
from tensorflow.python.framework import op_callbacks as op_callbacks
from tensorflow.python.framework import ops
from tensorflow.python.ops import while_v2

# How TensorFlow computes an operation's gradient, adds gradients up and makes
# those of what is not connected. dtr/test_dtr_device.py
gradient_of_operation = backprop._gradient_function
sum_of_gradients = backprop._aggregate_grads
zero_gradients = backprop._zeros

# The graph of a function, in which `==` compares numbers; and that of a loop's
# gradient. dtr/test_dtr_blocks.py, remat/test_remat.py
FuncGraph: Any = tf.__internal__.FuncGraph
GradientOfLoop: Any = while_v2._WhileBodyGradFuncGraph


def register_gradients(of_operation, add_up, zeros) -> None:
    """Has backward passes call these instead. dtr/test_dtr_device.py"""
    space = backprop._default_vspace._replace(
        aggregate_fn=add_up, zeros_fn=zeros
    )
    pywrap_tfe.TFE_Py_RegisterGradientFunction(of_operation)
    pywrap_tfe.TFE_Py_RegisterVSpace(space)


# Whether no tape records what this thread does. remat/test_remat.py
tapes_are_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped


# TensorFlow's runtime.

# The runtime's face in Python: it starts at the first operation, joins other
# processes, ends collectives and caches zeros.
# sharding/test_sharding_engine.py, launching/test_faults.py,
# dtr/test_dtr_device.py
context: Any = eager_context.context
# Whether a device of a name was registered. dtr/test_dtr_device.py
is_custom_device = eager_context.is_custom_device
# What `tf.random.set_seed` was given. sharding/test_sharding_engine.py
global_seed = eager_context.global_seed


def state_of_draws() -> Any:
    """What `tf.random` makes the seeds of its next operators from in eager
    mode; `None` if they have none. dtr/test_dtr_fit.py"""
    return context()._rng.getstate() if global_seed() is not None else None


def restore_draws(state: Any) -> None:
    """Gives back `state_of_draws`."""
    if state not in (None, state_of_draws()):
        context()._rng.setstate(state)
        # With the same seeds operators go on from where they were.
        context().clear_kernel_cache()


def has_started() -> bool:
    """Whether there was an operation. sharding/test_sharding_engine.py"""
    return context()._context_handle is not None


def runtime_handle() -> Any:
    """A capsule with the runtime's `TFE_Context`. dtr/test_dtr_device.py"""
    eager_context.ensure_initialized()
    return context()._handle


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Within, memory that has run out is a `ResourceExhaustedError` on a GPU
    too, where cuDNN's convolutions end in a `NotFoundError` that quotes it.
    budget/test_dry_run.py"""
    try:
        yield
    except tf.errors.NotFoundError as error:
        if "RESOURCE_EXHAUSTED" not in error.message:
            raise
        raise tf.errors.ResourceExhaustedError(
            error.node_def, error.op, error.message
        ) from None


# Graphs that are traced. TensorFlow can add to them in public, and not change
# what is there, such as the gradients that a user's own tape made.


def in_xla() -> bool:
    """Whether what is traced now will be compiled by XLA.
    remat/test_remat.py"""
    enclosing: Any = tf.__internal__.get_enclosing_xla_context
    return not tf.executing_eagerly() and enclosing() is not None


def is_own_function(graph: Any) -> bool:
    """Whether a graph is that of a `tf.function`, not of a loop or a branch,
    which may be called again: Keras makes one in each call of a convolution in
    groups. remat/test_remat.py, multilevel/test_multilevel_program.py"""
    is_function = type(graph) is FuncGraph
    return is_function and graph.name != "_conv_xla"


# Data sets of as many rows as the one that they are made of.
_KEEP_ROWS = re.compile(
    "_?(AssertCardinality|Cache|Concatenate|Filter|IgnoreErrors|Map|Options|"
    "ParallelMap|Prefetch|Repeat|Shard|Shuffle|Skip|Take|TakeWhile|Zip)Dataset"
)


def batch_size_of(dataset: tf.data.Dataset) -> int | None:
    """How many elements a data set puts into a batch; `None` if that cannot
    be told. A map is taken to keep them all. fit/test_pipeline.py"""
    size = getattr(dataset, "_batch_size", None)
    if size is not None:
        return int(size)
    if not _KEEP_ROWS.fullmatch(type(dataset).__name__):
        return None
    sizes = {batch_size_of(each) for each in dataset._inputs()}
    return sizes.pop() if len(sizes) == 1 else None


def variables_in(graph) -> list[tf.Variable]:
    """What a graph that is being made reads or assigns so far.
    budget/test_no_trace.py"""
    return list(graph._watched_variables)


def function_in(graph: tf.Graph, name: str) -> Any:
    """A function that a graph calls, with its own graph; `None` of one that
    was loaded, or a CTC loss's. remat/test_remat.py, graph/test_releasing.py"""
    function = graph._get_function(name)
    return function if hasattr(function, "graph") else None


def read_instead(ops: Iterable, tensor: tf.Tensor, new: tf.Tensor) -> None:
    """Lets operations read another tensor. graph/test_repeats.py,
    graph/test_control.py, sharding/test_sharding_units.py"""
    for op in ops:
        for index, read in enumerate(op.inputs):
            if read is tensor:
                op._update_input(index, new)


def wait_for(op: tf.Operation, others: list[tf.Operation]) -> None:
    """Lets an operation wait for others. graph/test_ordering.py"""
    op._add_control_inputs(others)


def wait_instead(op: tf.Operation, new: tf.Operation) -> None:
    """Lets what waits for an operation wait for another one.
    graph/test_repeats.py"""
    for waiting in op._control_outputs:
        others = [each for each in waiting.control_inputs if each is not op]
        waiting._remove_all_control_inputs()
        waiting._add_control_inputs([*others, new])


def keep_apart(op: tf.Operation) -> None:
    """Has the graph optimizer neither take an operation out nor join it with
    another one. keras_graph/test_applying.py, graph/test_repeats.py"""
    value = tf.compat.v1.AttrValue(b=True)
    op._set_attr("_grappler_do_not_remove", value)


def set_graph(op: tf.Operation, number: int) -> None:
    """Says to which graph an operation belongs. graph/test_keeping_order.py"""
    op._set_attr("_kmem_graph", tf.compat.v1.AttrValue(i=number))


def run_one_by_one(loop: tf.Operation) -> None:
    """Has a loop begin an iteration after the last one's end.
    graph/test_one_by_one.py"""
    one = tf.compat.v1.AttrValue(i=1)
    loop._set_attr("parallel_iterations", one)


def gradient_name(op: tf.Operation) -> str:
    """By which a graph finds an operation's gradient.
    graph/test_releasing.py"""
    return op.node_def.attr["_gradient_op_type"].s.decode()


def forget_gradient(name: str) -> None:
    """Takes a custom gradient, which TensorFlow keeps until the process ends,
    out of its registry. graph/test_releasing.py"""
    ops.gradient_registry._registry.pop(name, None)


def expect_traces(function: Any) -> None:
    """Has TensorFlow not warn of a function's traces.
    graph/test_releasing.py"""
    function._omit_frequent_tracing_warning = True


# Variables.


def identity_of(variable: Any) -> str:
    """By which optimizers know a variable. sharding/test_sharding_fit.py"""
    return variable._unique_id


def set_identity(variable: Any, identity: str) -> None:
    """Lets a tensor, or a shard, pass for a variable. See `identity_of`."""
    variable._unique_id = identity
