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
_PROBE_BYTES, _NUM_RUNS = 2**20, 3

# For each graph, tensors that were sent with what came back, in order.
_came_back: weakref.WeakKeyDictionary[
    tf.Graph, list[tuple[tf.Tensor, tf.Tensor]]
] = weakref.WeakKeyDictionary()


def sent(tensors: list[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Copies of a graph's tensors in host memory, with their shapes.

    Raises:
        ValueError: If there is no graph, or XLA compiles it.
    """
    if tf.executing_eagerly() or private_tf.in_xla():
        raise ValueError(NO_GRAPH)
    send = _on_host if _has_gpu() else tf.io.serialize_tensor
    copies = []
    for tensor in tensors:
        with names.after(tensor):
            copies.append((send(tensor), tf.shape(tensor)))
    return copies


def fetched(
    copies: list[tuple[tf.Tensor, tf.Tensor]],
    tensors: list[tf.Tensor],
    gradients: list,
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
    for (copy, shape), tensor in zip(copies, tensors, strict=True):
        with names.after(tensor), control.behind(gradients):
            if _has_gpu():
                # There it waits: a copy between devices does not.
                result = tf.identity(_on_host(copy))
            else:
                result = tf.io.parse_tensor(copy, tensor.dtype)
                # TensorFlow's graph optimizer goes by shapes.
                result = tf.reshape(result, shape)
                result.set_shape(tensor.shape)
        _came_back.setdefault(tensor.graph, []).append((tensor, result))
        results.append(result)
    return results


def read_what_came_back() -> None:
    """Lets what was traced in this graph after a tensor came back read that
    instead of the one that was sent."""
    graph = names.current_graph()
    came_back = _came_back.pop(graph, []) if graph is not None else []
    places = {op: place for place, op in enumerate(names.operations())}
    for tensor, result in reversed(came_back):
        before = ordering.ancestors([result.op])
        for reader in tensor.consumers():
            if places[reader] < places[result.op] or reader in before:
                continue
            for index, read in enumerate(reader.inputs):
                if read is tensor:
                    private_tf.replace_input(reader, index, result)


@functools.cache
def seconds_per_byte() -> float:
    """The time that a byte takes to host memory and back, as measured."""

    @tf.function(autograph=False)
    def there_and_back(tensor):
        (result,) = fetched(sent([tensor]), [tensor], [tensor])
        return result[0]

    tensor, seconds = tf.zeros([_PROBE_BYTES], tf.uint8), []
    for _ in range(1 + _NUM_RUNS):
        start = time.perf_counter()
        np.asarray(there_and_back(tensor))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]) / _PROBE_BYTES


def _on_host(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(_HOST):
        return tf.identity(tensor)


@functools.cache
def _has_gpu() -> bool:
    return bool(tf.config.list_logical_devices("GPU"))
