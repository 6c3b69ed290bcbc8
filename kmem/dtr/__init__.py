"""DTR for custom training loops: evicts tensors when memory runs short, and
recomputes them when they are read (Kirisame et al., ICLR 2021).

The names are those of MegEngine's `megengine.dtr`. The settings below are
read by `enable` and `scope`:

* `eviction_threshold`: the peak that is kept, in bytes or as `"5GB"`. 0
  evicts only when the device's own limit would be exceeded.
* `evictee_minimum_size`: smaller tensors are evicted only when nothing else
  is left.
* `enable_sqrt_sampling`: look at about the square root of the candidates at
  each eviction.
* `heuristic`: what is evicted first, see `kmem.DTR`.

What it does not do: the numbers do not change, and nothing inside of a
`tf.function` is evicted. The rules are in custom_ops/dtr/.
"""

import contextlib
import os
from collections.abc import Iterator

from kmem.dtr import device
from kmem.dtr.device import Statistics as Statistics
from kmem.options import DTR

eviction_threshold: int | str = 0
evictee_minimum_size: int | str = "1MB"
enable_sqrt_sampling: bool = False
heuristic: str = "auto"

_enabled = contextlib.ExitStack()


def enable() -> None:
    """Runs eager operators under DTR from here on, until `disable`.

    Raises:
        ValueError: If a setting is not of its form, if DTR is enabled
            already, or if more than the threshold is in use.
        NativeLibraryError: If kmem's allocator is not in place.

    Example:

    ```python
    import tensorflow as tf

    import kmem

    kmem.dtr.eviction_threshold = "5GB"
    kmem.dtr.enable()
    tf.reduce_sum(tf.ones((1000, 1000))).numpy()  # 1000000.0
    kmem.dtr.disable()
    ```
    """
    _enabled.enter_context(scope())


def disable() -> None:
    """Ends what `enable` began. What is held then keeps its value."""
    _enabled.close()


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """`enable` for a block of code.

    Put the training step inside, not the input pipeline: a dataset that is
    made inside would carry the device's name.

    Raises:
        ValueError: As `enable`.
        NativeLibraryError: As `enable`.

    Example:

    ```python
    import tensorflow as tf

    import kmem

    with kmem.dtr.scope():
        total = tf.reduce_sum(tf.ones((1000, 1000)))
    total.numpy()  # 1000000.0
    ```
    """
    with _session().scope():
        yield


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """`scope`, and writes what runs to a file, for `kmem simulate`.

    Record one training step, the second: the first makes what only it needs.
    Operators on tensors below 4 KiB, and those that cannot run again, such as
    assignments, are left out. Tensors that are held when the block ends are
    the step's results.

    Args:
        path: The file. `kmem.dtr.trace` says what is in it.

    Raises:
        OSError: If the file cannot be written.
        ValueError: As `enable`.
        NativeLibraryError: As `enable`.

    Example:

    ```python
    import tensorflow as tf

    import kmem
    from kmem.dtr.trace import read_program

    with kmem.dtr.record("step.log"):
        tf.tanh(tf.ones((100, 100)))
    read_program("step.log").num_operators  # 2
    ```
    """
    session = _session()
    with session.scope(), session.trace(path):
        yield


def _session() -> device.DeviceSession:
    return device.DeviceSession(
        DTR(
            eviction_threshold=eviction_threshold,
            evictee_minimum_size=evictee_minimum_size,
            enable_sqrt_sampling=enable_sqrt_sampling,
            heuristic=heuristic,
        )
    )


def statistics() -> Statistics | None:
    """What DTR has done, in the session that was last on the device.

    A session is what runs from `enable` to `disable`, in a `scope`, or under
    a `fit(dtr=...)`. `None` if there was none.
    """
    session = device.DeviceSession.latest
    return session.statistics() if session else None
