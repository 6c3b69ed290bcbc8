"""Collectives: the operations in which all processes take part together.

The only place that calls TensorFlow's collective runtime (a ring over gRPC on
the CPU, NCCL on the GPU). Who takes part is read from TF_CONFIG, in the order
of its tasks. Every process has to make the same calls in the same order:
within a `tf.function` TensorFlow keeps the order in which they were traced.

A call's name, with its operation, dtype and shape, is what matches it across
processes: it must not depend on how often a process has traced a step. The
same name may be used again, one call after another.

What it does not do: survive. After an error in a collective, or when a process
is gone, the runtime of all processes is lost: each has to be started anew.
The GPU's own reduce-scatter is written after TensorFlow's documentation, and
was never run.
"""

import contextlib
import faulthandler
import functools
import hashlib
import os
import signal
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# Private in TensorFlow, and used nowhere else: it has no public operations
# for shards, and no public switch for heartbeats. test_sharding_engine.py
# fails if they move.
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_collective_ops

from kmem.launching.cluster import Cluster
from kmem.sharding.watchdog import Watchdog
from kmem.sharding.watchdog import is_watching

_GROUP_KEY = 7600
_HEARTBEAT_SECONDS = 10
# Of every step: a process that comes too late ends the others.
_TIMEOUT = "KMEM_TIMEOUT_SECONDS"
_TIMEOUT_SECONDS = 600.0

# How much is sent of a gradient at a time: TensorFlow lets go of what it has
# sent and got only some time after that has arrived.
_PIECE_BYTES = 2**22

# How dtypes travel that the runtime does not take.
_SAME_BITS = {
    tf.bfloat16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
}
_WIDER = {
    dtype: tf.int32
    for dtype in (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)
}


class Engine:
    """The collectives of one process, which here is alone: nothing is sent.

    Attributes:
        size: The number of processes.
        rank: This one's number.
        device: Where its collectives run.
        host: The device of the machine's own memory.
    """

    def __init__(self, size: int = 1, rank: int = 0, device: str = ""):
        self.size = size
        self.rank = rank
        self.device = device
        self.host = f"{device.partition('/device:')[0]}/device:CPU:0"

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Every process's `tensor`, of one shape, along a new first axis."""
        return tensor[None]

    def reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The sum over the processes of the row that is this one's.

        Args:
            tensor: Of shape `[size, n]`; row `r` is for process `r`.
            name: See the module.
        """
        return tensor[0]

    def all_reduce(
        self, tensor: tf.Tensor, name: str, operation: str = "Add"
    ) -> tf.Tensor:
        """The sum, or the `"Max"` or `"Min"`, of every process's `tensor`."""
        return tensor

    def broadcast(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The `tensor` of process 0. All have its shape and dtype."""
        return tensor

    def watching(self, times: int = 1) -> contextlib.AbstractContextManager:
        """A context: what runs within may not wait for others for too long.

        Args:
            times: How many times as long as a single step it may.
        """
        return contextlib.nullcontext()

    def watched(self, function: Callable, times: int) -> Callable:
        """A train function of so many steps that is run in `watching`."""

        def call(iterator):
            with self.watching(times):
                return function(iterator)

        return call


class _Group(Engine):
    """One process of several."""

    def __init__(self, size: int, rank: int, device: str, timeout: float):
        super().__init__(size, rank, device)
        self._on_gpu = "GPU" in device
        self._timeout = timeout
        self._watchdog = Watchdog(timeout)

    def watching(self, times=1):
        return self._watchdog.watching(times)

    def gather(self, tensor, name):
        sent, received = _coded(tensor)
        gathered = self._call(
            gen_collective_ops.collective_gather_v2, sent[None], name
        )
        return received(gathered)

    def reduce_scatter(self, tensor, name):
        if self._on_gpu:
            flat = self._call(
                gen_collective_ops.collective_reduce_scatter_v2,
                tf.reshape(tensor, [-1]),
                name,
                merge_op="Add",
                final_op="Id",
            )
            return tf.ensure_shape(flat, tensor.shape[1:])
        length: Any = tensor.shape[1]
        width = _PIECE_BYTES // (tensor.dtype.size * self.size)
        sums: list[tf.Tensor] = []
        for number, start in enumerate(range(0, length, width)):
            # In a graph all pieces would be cut out at once.
            with tf.control_dependencies(sums[-1:]):
                piece = tensor[:, start : start + width]
            sums.append(self._exchanged(piece, f"{name}/{number}"))
        return sums[0] if len(sums) == 1 else tf.concat(sums, axis=0)

    def _exchanged(self, tensor, name):
        """The sum of the rows that are this one's."""
        sent, received = _coded(tensor)
        rows = received(
            self._call(gen_collective_ops.collective_all_to_all_v2, sent, name)
        )
        if rows.dtype.size < 4:
            rows = tf.cast(rows, tf.float32)
        with tf.device(self.device):
            return tf.cast(tf.reduce_sum(rows, axis=0), tensor.dtype)

    def all_reduce(self, tensor, name, operation="Add"):
        return self._call(
            gen_collective_ops.collective_reduce_v2,
            tensor,
            f"{name}/{operation}",
            merge_op=operation,
            final_op="Id",
        )

    def broadcast(self, tensor, name):
        sent, received = _coded(tensor)
        arguments: dict[str, Any] = {
            "group_size": self.size,
            "group_key": _GROUP_KEY,
            "instance_key": _key("broadcast", name, sent),
        }
        with self._timed(arguments), tf.device(self.device):
            if self.rank == 0:
                return received(
                    gen_collective_ops.collective_bcast_send_v2(
                        sent, **arguments
                    )
                )
            return received(
                gen_collective_ops.collective_bcast_recv_v2(
                    shape=sent.shape, T=sent.dtype, **arguments
                )
            )

    def _call(self, operation, tensor, name, **arguments):
        with self._timed(arguments), tf.device(self.device):
            return operation(
                tensor,
                group_size=self.size,
                group_key=_GROUP_KEY,
                instance_key=_key(operation.__name__, name, tensor),
                ordering_token=[],
                **arguments,
            )

    @contextlib.contextmanager
    def _timed(self, arguments: dict) -> Iterator[None]:
        """Lets a collective wait for a while only."""
        if tf.executing_eagerly():
            with self.watching():
                yield
            return
        if not is_watching():
            # Nobody knows from where a graph of a user's own is run.
            arguments["timeout_seconds"] = self._timeout
        yield


@functools.cache
def engine() -> Engine:
    """Joins the processes that TF_CONFIG names; without it, there is one.

    The first call has to come before TensorFlow's first operation. It waits
    for the others.

    Raises:
        ValueError: If TF_CONFIG names tasks that are neither `chief` nor
            `worker`.
        RuntimeError: If TensorFlow runs already.
    """
    cluster = Cluster(os.environ.get("TF_CONFIG") or "{}")
    others = sorted(cluster.jobs.keys() - {"chief", "worker"})
    if others:
        raise ValueError(
            "TF_CONFIG must have tasks of the kinds `chief` and `worker` "
            f"only. Received: {', '.join(others)}"
        )
    if cluster.size < 2:
        return Engine()
    (kind, number), timeout = cluster.task, _timeout_seconds()
    _join(cluster.jobs, timeout)
    gpu = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return _Group(
        cluster.size,
        cluster.rank,
        device=f"/job:{kind}/replica:0/task:{number}/device:{gpu}:0",
        timeout=timeout,
    )


def join_at_first_operation() -> None:
    """Has the processes join just before TensorFlow's first operation.

    Nothing if TensorFlow runs already.
    """
    current: Any = context.context()

    def join():
        join_no_more()
        engine()
        current.ensure_initialized()

    if current._context_handle is None:
        current.ensure_initialized = join


def join_no_more() -> None:
    """Takes back `join_at_first_operation`."""
    vars(context.context()).pop("ensure_initialized", None)


def _timeout_seconds() -> float:
    text = os.environ.get(_TIMEOUT, _TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(
            f"{_TIMEOUT} must be a positive number of seconds. "
            f"Received: {_TIMEOUT}={text}"
        )
    return seconds


def _join(cluster: dict, timeout: float) -> None:
    """Connects TensorFlow's runtime with the other processes'."""
    current: Any = context.context()
    if current._context_handle is not None:
        raise RuntimeError(
            "Processes must join before TensorFlow's first operation: under "
            "`kmem launch` import kmem, else make a `kmem.ShardedStrategy()`, "
            "at the start of the program. Received: TensorFlow runs already."
        )
    join_no_more()
    leader = "chief" if "chief" in cluster else "worker"
    current.configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        heartbeat_timeout_in_ms=_HEARTBEAT_SECONDS * 1000,
        cluster_register_timeout_in_ms=int(timeout * 1000),
    )
    # TensorFlow itself would wait for the others for ever, in a call during
    # which no other code of Python runs.
    standard_error = 2
    ends = signal.getsignal(signal.SIGTERM)
    faulthandler.dump_traceback_later(timeout, exit=True, file=standard_error)
    try:
        # The object alone is enough: it starts the server, and finds the
        # others.
        tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        faulthandler.cancel_dump_traceback_later()
    # TensorFlow's runtime takes the signal, and does nothing with it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ends)


def _coded(tensor: tf.Tensor):
    """A tensor as it travels, and what makes it of what has arrived."""
    dtype = tensor.dtype
    if dtype in _SAME_BITS:
        return (
            tf.bitcast(tensor, _SAME_BITS[dtype]),
            lambda arrived: tf.bitcast(arrived, dtype),
        )
    if dtype in _WIDER:
        return (
            tf.cast(tensor, _WIDER[dtype]),
            lambda arrived: tf.cast(arrived, dtype),
        )
    return tensor, lambda arrived: arrived


def _key(operation: str, name: str, tensor: tf.Tensor) -> int:
    """The same in every process, and never used with another shape."""
    text = f"{operation} {name} {tensor.dtype.name} {tensor.shape}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
