"""Lets tensors wait in host memory, from a forward pass to its gradient.

A GPU's tensor is copied to the CPU and back. On a CPU, whose bytes kmem counts
as an accelerator's, what waits is a string: none of the device's tensors.
TensorFlow has no other name for what came back. So whoever comes later and
would read the first tensor reads that one: nothing of it stays on the device
in the meantime. What this module does not do: fetch a tensor before its
gradient's turn; or anything in eager mode and in XLA.
"""

import functools
import time
import weakref

import numpy as np
import tensorflow as tf

from kmem.base import private_tf
from kmem.graph import control
from kmem.graph import names
from kmem.graph import ordering

NO_GRAPH = (
    "`cpu_offload` must be in a graph that XLA does not compile: compile the "
    "model with `jit_compile=False`, and not with `run_eagerly=True`. "
    "Received: a step that is eager, or compiled"
)
_HOST = "CPU:0"
# The largest that is sent to see how long it takes, and how often.
_MOST_BYTES, _NUM_RUNS = 2**24, 3

# What was sent: its copy, and its shape; nothing of what stays.
Sent = tuple[tf.Tensor, tf.Tensor] | None
# For each graph, names of tensors that were sent with those that came back.
_came_back: weakref.WeakKeyDictionary[tf.Graph, list[tuple[str, str]]] = (
    weakref.WeakKeyDictionary()
)


def sent(tensors: list[tf.Tensor]) -> list[Sent]:
    """Copies of tensors in host memory, but for those of no graph.

    Raises:
        ValueError: If there is no graph, or XLA compiles it.
    """
    if tf.executing_eagerly() or private_tf.in_xla():
        raise ValueError(NO_GRAPH)
    send = _on_host if _has_gpu() else tf.io.serialize_tensor
    copies: list[Sent] = []
    for tensor in tensors:
        copy = None
        if tf.is_symbolic_tensor(tensor):
            with names.after(tensor):
                copy = send(tensor), tf.shape(tensor)
        copies.append(copy)
    return copies


def fetched(
    copies: list[Sent], tensors: list[tf.Tensor], gradients: list
) -> list[tf.Tensor]:
    """What was sent, on the device again once gradients are there.

    Args:
        copies: What `sent` gave; nothing if all stayed.
        tensors: What it was given.
        gradients: The gradients.
    """
    if not copies:
        return tensors
    results = []
    for each, tensor in zip(copies, tensors, strict=True):
        if each is None:
            results.append(tensor)
            continue
        copy, shape = each
        with names.after(tensor), control.behind(gradients):
            if _has_gpu():
                # There it waits: a copy between devices does not.
                result = tf.identity(_on_host(copy))
            else:
                result = tf.io.parse_tensor(copy, tensor.dtype)
                # TensorFlow's graph optimizer goes by shapes.
                result = tf.reshape(result, shape)
                result.set_shape(tensor.shape)
        known = _came_back.setdefault(tensor.graph, [])
        known.append((tensor.name, result.name))
        results.append(result)
    return results


def read_what_came_back() -> None:
    """Lets what was traced in this graph after a tensor came back read that
    instead of the one that was sent."""
    graph = names.current_graph()
    if graph is None or graph not in _came_back:
        return
    places = {op: place for place, op in enumerate(names.operations())}
    for pair in reversed(_came_back.pop(graph)):
        tensor, result = map(graph.get_tensor_by_name, pair)
        before = ordering.ancestors([result.op])
        later = [
            reader
            for reader in tensor.consumers()
            if places[reader] >= places[result.op] and reader not in before
        ]
        private_tf.read_instead(later, tensor, result)


@functools.cache
def seconds_per_byte(num_bytes: int) -> float:
    """The time that a byte takes to host memory and back, as measured.

    Args:
        num_bytes: The size of what is sent there: each way takes some time
            whatever its size.
    """
    num_bytes = min(num_bytes, _MOST_BYTES)

    @tf.function(autograph=False)
    def there_and_back(tensor):
        (result,) = fetched(sent([tensor]), [tensor], [tensor])
        return result[0]

    tensor, seconds = tf.zeros([num_bytes], tf.uint8), []
    for _ in range(1 + _NUM_RUNS):
        start = time.perf_counter()
        np.asarray(there_and_back(tensor))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) / num_bytes


def _on_host(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(_HOST):
        return tf.identity(tensor)


@functools.cache
def _has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))
