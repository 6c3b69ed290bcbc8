"""The custom TensorFlow device that runs a program under DTR.

TensorFlow hands every eager operator that is placed on it to
custom_ops/dtr/tf_device.cc, which runs it on the CPU and remembers how to run
it again. kmem's allocator asks there for memory when a request would exceed
the threshold, so that the threshold is a limit on the peak and not a hint.
With a GPU the operators run there.

What it does not do: run operators inside of graphs. A `tf.function` is one
operator here, and tensors that it makes and drops are its own.
"""

import contextlib
import ctypes
import dataclasses
import os
import threading
import weakref
from collections.abc import Iterator

import tensorflow as tf

from kmem import memory
from kmem.base import bindings
from kmem.base import native
from kmem.base import private_tf
from kmem.base.sizes import format_size
from kmem.dtr.failures import freed_on_failure
from kmem.options import DTR

# Of custom_ops/dtr/tf_device.cc.
_NAME = "/job:localhost/replica:0/task:0/device:KMEM_DTR:0"
_NO_LIMIT = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What DTR has done.

    Attributes:
        num_evictions: How often a tensor was chosen to be evicted.
        num_recomputations: How many operators ran again.
        recomputed_seconds: How long those take. Of each operator that is the
            least time that one of its kind and size had taken when it ran
            first.
        total_seconds: The time of all operators that ran on the device and
            can run again, the first time and again, likewise.
        num_operators: How many operators are remembered now.
        live_bytes: Bytes of the tensors that are known to the device now.
        pinned_bytes: Those of them that cannot be made again.
        heuristic: What chooses now what is evicted.
    """

    num_evictions: int
    num_recomputations: int
    recomputed_seconds: float
    total_seconds: float
    num_operators: int
    live_bytes: int
    pinned_bytes: int
    heuristic: str


class DeviceSession:
    """A program that runs under DTR, on and off. Tensors that are still held
    when it is off stay valid: a value is made again when it is asked for."""

    # The one that was last on the device.
    latest: "DeviceSession | None" = None

    def __init__(self, options: DTR):
        context = _context()
        self._library = native.allocator()
        self._options = options
        self._limit_bytes = int(options.eviction_threshold) or _NO_LIMIT
        self.limit_bytes = self._limit_bytes
        made = bindings.Options(
            threshold_bytes=_NO_LIMIT,
            evictee_minimum_bytes=int(options.evictee_minimum_size),
            recomputation_limit=_NO_LIMIT,
            sqrt_sampling=options.enable_sqrt_sampling,
        )
        self._native = self._library.kmem_dtr_new_session(
            context, options.heuristic.encode(), ctypes.byref(made)
        )
        weakref.finalize(
            self, self._library.kmem_dtr_delete_session, self._native
        )

    def again(self) -> "DeviceSession":
        """Another one, which begins as this one did."""
        options = self._options
        if options.heuristic == bindings.AUTO:
            first = bindings.HEURISTICS[0]
            options = dataclasses.replace(options, heuristic=first)
        return DeviceSession(options)

    @property
    def heuristic(self) -> str:
        """What chooses now what is evicted."""
        name = ctypes.create_string_buffer(50)
        self._library.kmem_dtr_heuristic(self._native, name, len(name))
        return name.value.decode()

    @contextlib.contextmanager
    def scope(self, grows_from: int | None = None) -> Iterator[None]:
        """Runs the operators of a block of code on the device.

        Args:
            grows_from: A threshold in bytes that takes the place of the one in
                the options, and is raised where nothing is left to evict:
                afterwards `limit_bytes` is where it ended.

        Raises:
            ValueError: If another session is on the device, or if more is in
                use already than the threshold.
        """
        _register(self._library)
        if not _in_use.acquire(blocking=False):
            raise ValueError(
                "DTR must not be enabled twice at the same time: use "
                "`fit(dtr=...)` or `kmem.dtr`, in one thread. Received: "
                "DTR is enabled already"
            )
        try:
            self._begin(grows_from)
            failed = False
            try:
                with tf.device(_NAME), freed_on_failure():
                    DeviceSession.latest = self
                    yield
            except tf.errors.ResourceExhaustedError:
                failed = True
                raise
            finally:
                # Lets go of what TensorFlow keeps on the device as the gradient
                # of what a loss does not depend on.
                private_tf.context().zeros_cache().flush()
                self.limit_bytes = self._library.kmem_dtr_end(failed)
        finally:
            _in_use.release()

    def _begin(self, grows_from: int | None) -> None:
        grows = grows_from is not None
        limit = grows_from if grows else self._limit_bytes
        if not self._library.kmem_dtr_begin(self._native, limit, grows):
            raise ValueError(
                "`eviction_threshold` must be larger than what is in use, "
                f"which is {format_size(memory.current())}. Received: "
                f"eviction_threshold={self._options.eviction_threshold!r}"
            )

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Writes what runs on the device to a file."""
        begin = self._library.kmem_dtr_begin_trace
        if not begin(self._native, os.fsencode(path)):
            raise OSError(f"The trace cannot be written to {path}.")
        try:
            yield
        finally:
            self._library.kmem_dtr_end_trace(self._native)

    def statistics(self) -> Statistics:
        """What has been done up to now."""
        found = bindings.Statistics()
        self._library.kmem_dtr_statistics(self._native, ctypes.byref(found))
        return Statistics(
            num_evictions=found.num_evictions,
            num_recomputations=found.num_recomputations,
            recomputed_seconds=found.recomputed_nanoseconds / 1e9,
            total_seconds=found.total_nanoseconds / 1e9,
            num_operators=found.num_operators,
            live_bytes=found.live_bytes,
            pinned_bytes=found.pinned_bytes,
            heuristic=self.heuristic,
        )


_in_use = threading.Lock()


def _register(library: ctypes.CDLL) -> None:
    """Makes the device known to TensorFlow, which never forgets it."""
    if private_tf.is_custom_device(_NAME):
        return
    message = ctypes.create_string_buffer(500)
    if not library.kmem_dtr_register(_context(), message, len(message)):
        raise RuntimeError(message.value.decode())


def _context() -> int:
    """The address of TensorFlow's TFE_Context."""
    return bindings.pointer_in(private_tf.runtime_handle())
