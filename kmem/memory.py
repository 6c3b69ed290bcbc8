"""How much memory TensorFlow uses, and how much it may use.

kmem's allocator (custom_ops/memory) stands around that of each device: in the
place of TensorFlow's own on the CPU, and before it on a GPU. It counts every
allocation of every operation, in eager, graph and XLA mode, byte for byte, and
the numbers repeat from run to run as far as the order of the operations does.
A limit holds within operations: what does not fit raises
`tf.errors.ResourceExhaustedError`, so that a CPU behaves as a device of that
size. With a pool it also behaves as one whose memory has holes.

A request counts for its bytes rounded up to a multiple of 64. All logical CPU
devices share one allocator, so "CPU:0" and "CPU:1" give the same numbers.

What is not counted: memory that is not TensorFlow's, such as NumPy arrays,
among them those that a tensor merely points to, and the Python objects.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator

import tensorflow as tf

from kmem.base import bindings
from kmem.base import native
from kmem.base import snapshots
from kmem.base.checks import must_be
from kmem.base.sizes import parse_size

# Where Linux says what a container may take, in its two versions.
_CONTAINER = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
_DEVICE = re.compile(r"/?(?:device:)?(CPU|GPU)(?::(\d+))?", re.IGNORECASE)


def limit(
    size: int | str | None, device: str | None = None, pool: bool | str = False
) -> None:
    """Limits the memory that TensorFlow may use on a device.

    The limit holds at once and can be changed at any time. On the CPU, what
    TensorFlow cannot report as an error is granted even above it: data that
    comes from Python, NumPy or an input pipeline, and what some oneDNN kernels
    (convolution, batch normalization) allocate. It is counted, and the next
    operation that needs memory is refused: for such a kernel in any case,
    for data if it does not fit.

    With a pool, every block of 1 kB or more comes from one region of this
    size, as on a GPU: what is free in it may be enough and still lie in
    pieces, none of which is. Smaller blocks, which on a GPU's computer are
    mostly the host's, come from beside it, as does what cannot be refused.
    The environment variable `KMEM_POOL=1GB` asks for one on the CPU when kmem
    is imported.

    Args:
        size: Bytes (an integer), a string such as `"500MB"`, `"5GB"` (powers
            of ten) or `"5GiB"` (powers of two), or `None` to lift the limit,
            though not that of a pool.
        device: `"CPU"`, `"GPU:1"` and the like. Defaults to `"GPU:0"` if
            there is one, else `"CPU:0"`.
        pool: Whether blocks come from a pool of this size, from the first
            TensorFlow operation until the end of the process. `True`: kmem
            cuts it, and loses little; `"bfc"`: TensorFlow's own
            `GPUBFCAllocator` does, as on a GPU by default.

    Raises:
        ValueError: If `size` is not a size, if more than that is in use
            already, or if there is no such device.
        RuntimeError: If a pool can no longer be had, see above, or if kmem's
            allocator could not be put in place.

    Example:

    ```python
    import kmem

    kmem.memory.limit("2GB", device="CPU")
    kmem.memory.limit(None, device="CPU")
    ```
    """
    kind = _kind(pool)
    number = _number(device)
    num_bytes = None if size is None else parse_size(size)
    library = native.allocator()
    if kind == bindings.NO_POOL:
        native_size = -1 if num_bytes is None else num_bytes
        if not library.kmem_set_limit(number, native_size):
            raise ValueError(
                "`size` must be at least what is in use, which is "
                f"{current(device)} bytes. Received: size={size!r}"
            )
    elif num_bytes is None:
        raise ValueError(
            f"`size` must be the size of the pool. Received: size=None, {pool=}"
        )
    elif not library.kmem_ask_for_pool(number, kind, num_bytes):
        raise RuntimeError(
            "A pool must be set before the first TensorFlow operation, and "
            "only once. Received: TensorFlow runs already, or has a pool"
        )


@dataclasses.dataclass(frozen=True)
class Pool:
    """How a pool is filled, all in bytes.

    Attributes:
        size: The whole region.
        blocks: What TensorFlow has asked for and not freed.
        chunks: What the blocks take in the pool: every block lies in a chunk,
            which may be larger.
        peak_chunks: The most that the chunks took since `reset_peak`.
        largest_free: The largest free piece: a larger request is refused,
            however much is free in total.
    """

    size: int
    blocks: int
    chunks: int
    peak_chunks: int
    largest_free: int


def pool(device: str | None = None) -> Pool | None:
    """Returns how a device's pool is filled, or `None` if it has none.

    Args:
        device: See `kmem.memory.limit`.

    Example:

    ```python
    import kmem

    pool = kmem.memory.pool("CPU")
    if pool:
        print(f"{pool.size - pool.chunks} bytes are free")
    ```
    """
    usage = bindings.PoolUsage()
    library = native.allocator()
    if not library.kmem_pool_usage(_number(device), ctypes.byref(usage)):
        return None
    names = [field.name for field in dataclasses.fields(Pool)]
    return Pool(**{name: getattr(usage, name) for name in names})


def snapshot(device: str | None = None) -> snapshots.Snapshot:
    """Lists the tensors and variables that a device's memory holds now.

    Args:
        device: See `kmem.memory.limit`.

    Returns:
        A `Snapshot` with the tensors and variables that Python holds (name,
        shape, dtype, bytes), the largest first, and what is in use besides.
        Print its `summary()`, or show it in a notebook.

    Raises:
        ValueError: If there is no such device.

    Example:

    ```python
    import keras

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    print(kmem.memory.snapshot("CPU").summary(num_tensors=5))
    ```
    """
    number = _number(device)
    name = "CPU:0" if number == bindings.CPU else f"GPU:{number - 1}"
    return snapshots.snapshot(name, current(device))


def current(device: str | None = None) -> int:
    """Returns the bytes that are in use on a device now.

    Args:
        device: See `kmem.memory.limit`.

    Example:

    ```python
    import kmem
    import tensorflow as tf

    before = kmem.memory.current()
    x = tf.zeros((1000, 1000))
    kmem.memory.current() - before  # 4000000
    ```
    """
    return native.stats(_number(device)).in_use


def peak(device: str | None = None) -> int:
    """Returns the most bytes that were in use since `reset_peak`.

    Without a `reset_peak`, since the start of the program. It is also
    `tf.config.experimental.get_memory_info(device)["peak"]`.

    Args:
        device: See `kmem.memory.limit`.

    Example:

    ```python
    import kmem

    kmem.memory.reset_peak("CPU")
    # ... train ...
    print(f"{kmem.memory.peak('CPU') / 1e6:.1f} MB")
    ```
    """
    return native.stats(_number(device)).peak


def reset_peak(device: str | None = None) -> None:
    """Sets the peak to what is in use now, and the peak of a pool likewise.

    Open blocks of `track` keep their own peaks.

    Args:
        device: See `kmem.memory.limit`.
    """
    native.allocator().kmem_reset_peak(_number(device))


class Usage:
    """What `track` measures, in bytes.

    Inside the block, `peak_bytes` and `end_bytes` are the values up to now.

    Attributes:
        number: The device's, in the native library.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._mark = native.allocator().kmem_open_watermark(number)
        if self._mark < 0:
            raise RuntimeError(
                "At most 64 blocks of `kmem.memory.track` can be open at the "
                "same time."
            )
        self._final: tuple[int, int] | None = None
        self.start_bytes = native.stats(number).in_use

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use in the block."""
        if self._final:
            return self._final[0]
        return native.allocator().kmem_watermark(self.number, self._mark)

    @property
    def end_bytes(self) -> int:
        """The bytes that were in use at the end of the block."""
        if self._final:
            return self._final[1]
        return native.stats(self.number).in_use


@contextlib.contextmanager
def track(device: str | None = None) -> Iterator[Usage]:
    """Measures the peak of a block of code.

    Blocks may be nested and may overlap in several threads, at most 64 at a
    time; each has its own peak, and `kmem.memory.peak` keeps its own too. All
    of them measure the device, that is, every thread of the program.

    Args:
        device: See `kmem.memory.limit`.

    Returns:
        A context manager that gives a `Usage` with `start_bytes`,
        `peak_bytes` and `end_bytes`.

    Example:

    ```python
    import kmem
    import tensorflow as tf

    with kmem.memory.track() as usage:
        x = tf.zeros((1000, 1000))
        x = x + x
    usage.peak_bytes - usage.start_bytes  # 8000000
    ```
    """
    usage = Usage(_number(device))
    try:
        yield usage
    finally:
        usage._final = usage.peak_bytes, usage.end_bytes
        native.allocator().kmem_close_watermark(usage.number, usage._mark)


def capacity(device: str | None = None) -> int:
    """Returns the bytes that a device may have in use: its limit or its size.

    The size of a GPU is what TensorFlow takes of it; `sys.maxsize` if bytes
    cannot be counted. That of a CPU is the machine's memory, or what the
    container in which this runs may take of it.

    Args:
        device: See `kmem.memory.limit`.
    """
    number = _number(device)
    whole = sys.maxsize
    if number == bindings.CPU:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for path in _CONTAINER:
            # "max" says that there is no limit.
            with contextlib.suppress(OSError, ValueError):
                whole = min(whole, int(pathlib.Path(path).read_text("utf-8")))
    if not native.is_registered():
        return whole
    tf.config.list_logical_devices()  # TensorFlow makes them, and their pools.
    stats = native.stats(number)
    if stats.limit >= 0:
        return min(stats.limit, stats.size or stats.limit)
    return stats.size or whole


def is_counted(device: str | None = None) -> bool:
    """Returns whether the bytes in use on a device can be counted.

    They cannot if kmem's allocator is not in place. Plans and budgets then
    use predicted bytes, and a warning says so once.

    Args:
        device: See `kmem.memory.limit`.
    """
    _number(device)
    return _is_counted()


@functools.cache
def _is_counted() -> bool:
    try:
        native.allocator()
    except native.NativeLibraryError as error:
        warnings.warn(
            "kmem cannot count the bytes that TensorFlow uses. `remat`, "
            "`memory_budget`, `kmem.plan` and `kmem.profile` use predicted "
            "bytes and computed times instead, and a step that exceeds its "
            f"budget is neither noticed nor undone. {error}",
            stacklevel=3,
        )
        return False
    return True


def _kind(pool: bool | str) -> int:
    if isinstance(pool, bool):
        return bindings.OWN_POOL if pool else bindings.NO_POOL
    must_be(pool == "bfc", pool, "pool", 'True, False or "bfc"')
    return bindings.BFC_POOL


def _number(device: str | None) -> int:
    """The device's number in the native library: that of GPU i is i + 1."""
    num_gpus = _num_devices("GPU")
    if device is None:
        return 1 if num_gpus else bindings.CPU
    match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    kind = match[1].upper() if match else ""
    index = int(match[2] or 0) if match else 0
    num_cpus = _num_devices("CPU")
    if kind == "CPU" and index < num_cpus:
        return bindings.CPU
    if kind == "GPU" and index < num_gpus:
        return index + 1
    devices = [f"CPU:{i}" for i in range(num_cpus)]
    devices += [f"GPU:{i}" for i in range(num_gpus)]
    raise ValueError(
        f"`device` must be one of {', '.join(devices)}, or None. "
        f"Received: device={device!r}"
    )


def _num_devices(kind: str) -> int:
    """Counts logical devices, without bringing TensorFlow to life."""
    return sum(
        len(tf.config.get_logical_device_configuration(device) or [None])
        for device in tf.config.get_visible_devices(kind)
    )
