"""Collectives: the operations in which all processes take part together.

The only place that calls TensorFlow's collective runtime (a ring over gRPC on
the CPU, NCCL on GPUs, where every call has to ask for it). Who takes part is
read from TF_CONFIG, in the order of its tasks. Every process has to make the
same calls in the same order: within a `tf.function` TensorFlow keeps the order
in which they were traced.

A call's name, with its operation, dtype and shape, is what matches it across
processes: it must not depend on how often a process has traced a step. The
same name may be used again, one call after another.

TensorFlow's own timeout of a collective is a thread that sleeps as long, for
every call: thousands of them in a training. Here one thread watches whatever
Python waits for, a step or a single collective, and ends all collectives of
this process when that takes too long.

What it does not do: survive. After an error in a collective, or when a process
is gone, the runtime of all processes is lost: each has to be started anew. Nor
does it tell a step that is slow from one that waits. It makes the same calls
on GPUs as on CPUs, and never ran on GPUs.
"""

import contextlib
import contextvars
import faulthandler
import functools
import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem.base import private_tf
from kmem.base.checks import must_be
from kmem.base.patching import setting
from kmem.launching.cluster import Cluster

_GROUP_KEY = 7600
_HEARTBEAT_SECONDS = 10
# Of every step: a process that comes too late ends the others.
_TIMEOUT = "KMEM_TIMEOUT_SECONDS"
_TIMEOUT_SECONDS = 600.0
_LOOK_SECONDS = 1.0

# How much is sent of a gradient at a time: TensorFlow lets go of what it has
# sent and got only some time after that has arrived.
_PIECE_BYTES = 2**22

# How dtypes travel that the runtime does not take.
_SAME_BITS = {tf.bfloat16: tf.float16, tf.uint32: tf.int32, tf.uint64: tf.int64}
_WIDER = dict.fromkeys(
    (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)
# Sums of 16 bits would be rounded once for each process.
_SUMMED_IN = {tf.bfloat16: tf.float32, tf.float16: tf.float32}

# Whether what runs, or is traced, now is watched.
_is_watched = contextvars.ContextVar("is_watched", default=False)


class Engine:
    """The collectives of one process, which here is alone: nothing is sent.

    Attributes:
        size: The number of processes.
        rank: This one's number.
        device: Where its collectives run.
        host: The device of host memory.
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
        """The sum over the processes of the row that is this one's, of a tensor
        `[size, n]`."""
        return tensor[0]

    def all_reduce(
        self, tensor: tf.Tensor, name: str, operation: str = "Add"
    ) -> tf.Tensor:
        """The sum, or the `"Max"` or `"Min"`, of every process's `tensor`."""
        return tensor

    def broadcast(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The `tensor` of process 0. All have its shape and dtype."""
        return tensor

    @contextlib.contextmanager
    def watching(self, times: int = 1) -> Iterator[None]:
        """Within, nothing may wait for other processes for too long: `times`
        as long as a single step may. Nothing in a graph that is traced: it
        runs at another time."""
        yield


class Group(Engine):
    """One process of several."""

    def __init__(self, size: int, rank: int, device: str, timeout: float):
        super().__init__(size, rank, device)
        self._timeout = timeout
        self._deadline: float | None = None
        self._watchdog: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, times=1):
        if _is_watched.get() or not tf.executing_eagerly():
            yield
            return
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._watch, daemon=True)
            self._watchdog.start()
        self._deadline = time.monotonic() + times * self._timeout
        try:
            with setting(_is_watched, True):
                yield
        finally:
            self._deadline = None

    def _watch(self) -> None:
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            time.sleep(min(_LOOK_SECONDS, self._timeout / 4))
            deadline = self._deadline
        private_tf.context().abort_collective_ops(
            tf.errors.DEADLINE_EXCEEDED,
            "Other processes must take part within "
            f"{self._timeout:g} s (KMEM_TIMEOUT_SECONDS).",
        )

    def gather(self, tensor, name):
        sent, received = _coded(tensor)
        gathered = self._call(tf.raw_ops.CollectiveGatherV2, sent[None], name)
        return received(gathered)

    def reduce_scatter(self, tensor, name):
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
        rows = received(self._call(tf.raw_ops.CollectiveAllToAllV2, sent, name))
        wider: Any = _SUMMED_IN.get(rows.dtype, rows.dtype)
        rows = tf.cast(rows, wider)
        with tf.device(self.device):
            return tf.cast(tf.reduce_sum(rows, axis=0), tensor.dtype)

    def all_reduce(self, tensor, name, operation="Add"):
        # NCCL gets other dtypes from TensorFlow as if they were float32.
        sent = tf.cast(tensor, _SUMMED_IN.get(tensor.dtype, tensor.dtype))
        result = self._call(
            tf.raw_ops.CollectiveReduceV2,
            sent,
            f"{name}/{operation}",
            merge_op=operation,
            final_op="Id",
        )
        return tf.cast(result, tensor.dtype)

    def broadcast(self, tensor, name):
        sent, received = _coded(tensor)
        if self.rank == 0:
            part = {"input": sent}
            operation = tf.raw_ops.CollectiveBcastSendV2
        else:
            part = {"shape": sent.shape, "T": sent.dtype}
            operation = tf.raw_ops.CollectiveBcastRecvV2
        key = _key("broadcast", name, sent)
        return received(self._take_part(operation, key, **part))

    def _call(self, operation, tensor, name, **arguments):
        key = _key(operation.__name__, name, tensor)
        return self._take_part(
            operation, key, input=tensor, ordering_token=[], **arguments
        )

    def _take_part(self, operation, key: int, **arguments) -> tf.Tensor:
        if not tf.executing_eagerly() and not _is_watched.get():
            # Nobody knows from where a graph of a user's own is run.
            arguments["timeout_seconds"] = self._timeout
        with self.watching(), tf.device(self.device):
            return operation(
                group_size=self.size,
                group_key=_GROUP_KEY,
                instance_key=key,
                # Ignored but on GPUs, where TensorFlow's default is a ring.
                communication_hint="nccl",
                **arguments,
            )


@functools.cache
def engine() -> Engine:
    """Joins the processes that TF_CONFIG names, of the kinds `chief` and
    `worker`; without it, there is one. The first call has to come before
    TensorFlow's first operation, and waits for the others."""
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
    return Group(
        cluster.size,
        cluster.rank,
        device=f"/job:{kind}/replica:0/task:{number}/device:{gpu}:0",
        timeout=timeout,
    )


def join_at_first_operation() -> None:
    """Has the processes join just before TensorFlow's first operation, unless
    it runs already."""
    current = private_tf.context()

    def join():
        join_no_more()
        engine()
        current.ensure_initialized()

    if not private_tf.has_started():
        current.ensure_initialized = join


def join_no_more() -> None:
    """Takes back `join_at_first_operation`."""
    vars(private_tf.context()).pop("ensure_initialized", None)


def _timeout_seconds() -> float:
    text = os.environ.get(_TIMEOUT, _TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    is_right = 0 < seconds < threading.TIMEOUT_MAX
    must_be(is_right, text, _TIMEOUT, "a positive number of seconds")
    return seconds


def _join(cluster: dict, timeout: float) -> None:
    """Connects TensorFlow's runtime with the other processes'."""
    if private_tf.has_started():
        raise RuntimeError(
            "Processes must join before TensorFlow's first operation: under "
            "`kmem launch` import kmem, else make a `kmem.ShardedStrategy()`, "
            "at the start of the program. Received: TensorFlow runs already."
        )
    join_no_more()
    leader = "chief" if "chief" in cluster else "worker"
    private_tf.context().configure_coordination_service(
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
    convert: Any = tf.bitcast if dtype in _SAME_BITS else tf.cast
    sent = convert(tensor, (_SAME_BITS | _WIDER).get(dtype, dtype))
    return sent, lambda arrived: convert(arrived, dtype)


def _key(operation: str, name: str, tensor: tf.Tensor) -> int:
    """The same in every process, and never used with another shape."""
    text = f"{operation} {name} {tensor.dtype.name} {tensor.shape}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
