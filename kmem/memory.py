"""How much memory TensorFlow uses, and how much it may use.

On the CPU the numbers come from kmem's own allocator (custom_ops/memory),
which takes the place of TensorFlow's: they count every allocation of every
operation, in eager, graph and XLA mode, byte for byte, and repeat from run to
run as far as the order of the operations does. A limit on the CPU behaves as
a device of that size: what does not fit raises the same
`tf.errors.ResourceExhaustedError` as on a GPU. On a GPU the numbers are
TensorFlow's own. (Those of a CPU leave out what is below 256 kB, and count the
rest for up to twice its bytes.)

A request counts for its bytes rounded up to a multiple of 64. All logical CPU
devices share one allocator, so "CPU:0" and "CPU:1" give the same numbers.

What is not counted: memory that is not TensorFlow's, such as NumPy arrays,
among them those that a tensor merely points to, and the Python objects.
"""

import contextlib
import functools
import os
import re
import threading
import warnings
from collections.abc import Iterator

from kmem.base import native
from kmem.base.sizes import parse_size

_DEVICE = re.compile(r"/?(?:device:)?(CPU|GPU)(?::(\d+))?", re.IGNORECASE)


def limit(size: int | str | None, device: str | None = None) -> None:
    """Limits the memory that TensorFlow may use on a device.

    On the CPU the limit holds at once and can be changed at any time. What
    TensorFlow cannot report as an error is granted even above it: data that
    comes from Python, NumPy or an input pipeline, and what some oneDNN kernels
    (convolution, batch normalization) allocate. It is counted, and the next
    operation that needs memory is refused: for such a kernel in any case,
    for data if it does not fit.

    On a GPU it is the memory limit of TensorFlow's logical device, in whole
    MiB, and must be set before the first TensorFlow operation.

    Args:
        size: Bytes (an integer), a string such as `"500MB"`, `"5GB"` (powers
            of ten) or `"5GiB"` (powers of two), or `None` to lift the limit.
        device: `"CPU"`, `"GPU:1"` and the like. Defaults to `"GPU:0"` if
            there is one, else `"CPU:0"`.

    Raises:
        ValueError: If `size` is not a size, if more than that is in use
            already, or if there is no such device.
        RuntimeError: If the limit can no longer be set, see above, or if
            kmem's allocator could not be put in place.

    Example:

    ```python
    import kmem

    kmem.memory.limit("2GB", device="CPU")
    kmem.memory.limit(None, device="CPU")
    ```
    """
    num_bytes = None if size is None else parse_size(size)
    _meter(device).limit(num_bytes)


def current(device: str | None = None) -> int:
    """Returns the bytes that are in use on a device now.

    Args:
        device: See `kmem.memory.limit`.

    Example:

    ```python
    import kmem
    import tensorflow as tf

    before = kmem.memory.current("CPU")
    x = tf.zeros((1000, 1000)) + 1.0
    kmem.memory.current("CPU") - before  # 4000000
    ```
    """
    return _meter(device).current()


def peak(device: str | None = None) -> int:
    """Returns the most bytes that were in use since `reset_peak`.

    Since the start of the program if that was not called. The same number as
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
    return _meter(device).peak()


def reset_peak(device: str | None = None) -> None:
    """Makes the peak what is in use now.

    `track` blocks that are open do not notice.

    Args:
        device: See `kmem.memory.limit`.
    """
    _meter(device).reset_peak()


class Usage:
    """What `track` measures, in bytes.

    Inside the block `peak_bytes` and `end_bytes` are those up to now.
    """

    def __init__(self, meter: "_Meter") -> None:
        self._meter = meter
        self._mark = meter.open()
        self._final: tuple[int, int] | None = None
        self.start_bytes = meter.current()

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in use in the block."""
        return self._final[0] if self._final else self._meter.read(self._mark)

    @property
    def end_bytes(self) -> int:
        """The bytes that were in use at the end of the block."""
        return self._final[1] if self._final else self._meter.current()

    def _close(self) -> None:
        self._final = (self.peak_bytes, self.end_bytes)
        self._meter.close(self._mark)


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

    with kmem.memory.track("CPU") as usage:
        tf.zeros((1000, 1000)) + 1.0
    usage.peak_bytes - usage.start_bytes  # 8000000
    ```
    """
    usage = Usage(_meter(device))
    try:
        yield usage
    finally:
        usage._close()


def capacity(device: str | None = None) -> int:
    """Returns the bytes that a device may have in use: its limit, or all.

    Args:
        device: See `kmem.memory.limit`.
    """
    return _meter(device).capacity()


def is_counted(device: str | None = None) -> bool:
    """Returns whether the bytes in use on a device can be counted.

    They cannot be on a CPU where kmem's allocator is not in place. What plans
    and budgets go by is predicted then, and a warning says so once.

    Args:
        device: See `kmem.memory.limit`.
    """
    return _meter(device) is not _meters["CPU", 0] or _is_cpu_counted()


@functools.cache
def _is_cpu_counted() -> bool:
    try:
        native.allocator()
    except native.NativeLibraryError as error:
        warnings.warn(
            "kmem cannot count the bytes that TensorFlow uses on the CPU, so "
            "that `remat`, `memory_budget`, `kmem.plan` and `kmem.profile` go "
            "by predicted bytes and computed times, and a step that needs "
            f"more than a budget is neither seen nor undone. {error}",
            stacklevel=3,
        )
        return False
    return True


class _CPU:
    """Asks kmem's allocator.

    It keeps the marks itself: peaks of their own, from `open` to `close`.
    """

    def limit(self, num_bytes: int | None) -> None:
        library = native.allocator()
        if not library.kmem_set_limit(-1 if num_bytes is None else num_bytes):
            raise ValueError(
                "`size` must be at least what is in use, which is "
                f"{self.current()} bytes. Received: size={num_bytes}"
            )

    def capacity(self) -> int:
        limit = native.stats().limit if native.is_registered() else None
        if limit is not None:
            return limit
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def current(self) -> int:
        return native.stats().in_use

    def peak(self) -> int:
        return native.stats().peak

    def reset_peak(self) -> None:
        native.allocator().kmem_reset_peak()

    def open(self) -> int:
        mark = native.allocator().kmem_open_watermark()
        if mark < 0:
            raise RuntimeError(
                "At most 64 blocks of `kmem.memory.track` can be open at the "
                "same time."
            )
        return mark

    def read(self, mark: int) -> int:
        return native.allocator().kmem_watermark(mark)

    def close(self, mark: int) -> None:
        native.allocator().kmem_close_watermark(mark)


class _GPU:
    """Asks TensorFlow, which keeps a single peak.

    That one is reset at the start of every block, after every open mark has
    taken note of it. Mark 0 is the outermost, that of `kmem.memory.peak`.
    """

    def __init__(self, index: int) -> None:
        self._name = f"GPU:{index}"
        self._index = index
        self._marks = {0: 0}
        self._num_opened = 0
        self._lock = threading.Lock()

    def limit(self, num_bytes: int | None) -> None:
        import tensorflow as tf

        mib = None if num_bytes is None else num_bytes // 2**20
        if mib == 0:
            raise ValueError(
                "`size` must be at least 1 MiB on a GPU. "
                f"Received: size={num_bytes}"
            )
        physical = tf.config.get_visible_devices("GPU")[self._index]
        try:
            tf.config.set_logical_device_configuration(
                physical,
                [tf.config.LogicalDeviceConfiguration(memory_limit=mib)],
            )
        except RuntimeError as error:
            raise RuntimeError(
                "The memory limit of a GPU must be set before the first "
                "TensorFlow operation, and there has been one."
            ) from error

    def capacity(self) -> int:
        from kmem.base import private_tf

        return private_tf.memory_limits("GPU")[f"/device:{self._name}"]

    def current(self) -> int:
        return self._info()["current"]

    def peak(self) -> int:
        return self.read(0)

    def reset_peak(self) -> None:
        with self._lock:
            self._restart(0)

    def open(self) -> int:
        with self._lock:
            self._num_opened += 1
            self._restart(self._num_opened)
            return self._num_opened

    def read(self, mark: int) -> int:
        with self._lock:
            self._note()
            return self._marks[mark]

    def close(self, mark: int) -> None:
        with self._lock:
            self._note()
            del self._marks[mark]

    def _info(self) -> dict[str, int]:
        import tensorflow as tf

        return tf.config.experimental.get_memory_info(self._name)

    def _note(self) -> None:
        peak_bytes = self._info()["peak"]
        for mark, highest in self._marks.items():
            self._marks[mark] = max(highest, peak_bytes)

    def _restart(self, mark: int) -> None:
        import tensorflow as tf

        self._note()
        tf.config.experimental.reset_memory_stats(self._name)
        self._marks[mark] = self.current()


_Meter = _CPU | _GPU
_meters: dict[tuple[str, int], _Meter] = {("CPU", 0): _CPU()}


def _meter(device: str | None) -> _Meter:
    import tensorflow as tf

    gpus = tf.config.get_visible_devices("GPU")
    if device is None:
        kind, index = ("GPU" if gpus else "CPU"), 0
    else:
        match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
        kind = match[1].upper() if match else ""
        index = int(match[2] or 0) if match else 0
    if kind == "CPU" and index < _num_cpus():
        return _meters["CPU", 0]
    if kind == "GPU" and index < len(gpus):
        return _meters.setdefault((kind, index), _GPU(index))
    devices = [f"CPU:{i}" for i in range(_num_cpus())]
    devices += [f"GPU:{i}" for i in range(len(gpus))]
    raise ValueError(
        f"`device` must be one of {', '.join(devices)}, or None. "
        f"Received: device={device!r}"
    )


def _num_cpus() -> int:
    """Counts logical devices, without bringing TensorFlow to life."""
    import tensorflow as tf

    return sum(
        len(tf.config.get_logical_device_configuration(cpu) or [None])
        for cpu in tf.config.get_visible_devices("CPU")
    )
