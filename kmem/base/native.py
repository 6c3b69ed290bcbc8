"""The native library in this process: loaded, and its allocator put in place.

That has to be before the first TensorFlow operation, so `import kmem` does it,
and builds the library (building.py) if need be. Where that cannot be,
everything in kmem that needs no native code works.
"""

import contextlib
import ctypes
import os
import pathlib
import sys
import threading

from kmem.base import bindings
from kmem.base.building import NativeLibraryError
from kmem.base.building import build
from kmem.base.building import find_library
from kmem.base.building import has_failed
from kmem.base.sizes import parse_size

_TOO_LATE = """\
kmem's allocator must be in place before the first TensorFlow operation, and \
TensorFlow has already allocated memory in this process. Import kmem before \
any TensorFlow operation. The native library {is_built}, so that `import \
kmem` is enough{then}."""

_LATE_IN_A_NOTEBOOK = """\
kmem cannot count bytes in this kernel, which has run TensorFlow before \
`import kmem`: restart it, and import kmem first."""


def prepare(builds: bool = True) -> None:
    """Puts the allocator in place, built if need be, as far as that can be.

    What `import kmem` does, since it is too late after the first TensorFlow
    operation. Whatever is in the way is reported when the allocator is
    needed, by `allocator`.

    Args:
        builds: Whether the library may be built.
    """
    with contextlib.suppress(NativeLibraryError, OSError):
        # A compiler that fails would do so at each import.
        can_build = builds and not has_failed()
        path = build() if can_build else find_library()
        if path and not _register(path) and "ipykernel" in sys.modules:
            print(_LATE_IN_A_NOTEBOOK, file=sys.stderr)


def is_command() -> bool:
    """Whether this process is the `kmem` command, which calls `prepare` once
    it has read its command line: it may only be asked for help."""
    name = os.path.basename(sys.argv[0])
    if name == "-m":  # While Python looks for the module.
        after = sys.orig_argv.index("-m") + 1 if "-m" in sys.orig_argv else 0
        name = sys.orig_argv[after]
    return name in ("kmem", "kmem.commands.cli")


def library() -> ctypes.CDLL:
    """Returns the library, built if need be; its allocator may be unused."""
    if not _state.loaded:
        path = build()
        with _state.lock:
            _load_once(path)
    return _state.library


def allocator() -> ctypes.CDLL:
    """Returns the library, with its allocator in place; `NativeLibraryError` if
    it is too late for that, or the library cannot be built."""
    if not _state.registered:
        was_built = find_library() is not None
        if not _register(build()):
            raise NativeLibraryError(
                _TOO_LATE.format(
                    is_built="is built" if was_built else "is now built",
                    then="" if was_built else " from the next run on",
                )
            )
    if os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() in ("1", "true"):
        raise NativeLibraryError(
            "The environment variable TF_CPU_ALLOCATOR_USE_BFC must not be "
            "set: with it TensorFlow keeps a pool of its own, and kmem would "
            "count the pool instead of the bytes in use. Unset it."
        )
    return _state.library


def stats(device: int = 0) -> bindings.Stats:
    """The counters of a device's allocator now: 0 is the CPU, i + 1 is GPU
    i."""
    counters = bindings.Stats()
    allocator().kmem_stats(device, ctypes.byref(counters))
    return counters


def is_registered() -> bool:
    """Whether kmem's allocator is, or will be, TensorFlow's on the CPU."""
    return _state.registered


class _State:
    """What has happened in this process, and cannot be undone."""

    library: ctypes.CDLL
    loaded = False
    registered = False
    lock = threading.Lock()


_state = _State()


def _register(path: pathlib.Path | None) -> bool:
    """Returns False if there is no library, or if it is too late."""
    with _state.lock:
        if path is None or _state.registered:
            return _state.registered
        _load_once(path)
        _state.registered = _state.library.kmem_register_allocator()
        size = os.environ.get("KMEM_POOL")
        if size and _state.registered:
            _state.library.kmem_ask_for_pool(
                0, bindings.OWN_POOL, parse_size(size, "KMEM_POOL")
            )
        return _state.registered


def _load_once(path: pathlib.Path) -> None:
    if _state.loaded:
        return
    try:
        library = ctypes.CDLL(str(path))
        bindings.declare(library)
    except OSError as error:
        raise NativeLibraryError(
            f"The native library cannot be loaded: {error}. Build it anew "
            "with `kmem build --force`."
        ) from error
    _state.library, _state.loaded = library, True
