"""The native library: compiled once on the user's machine, then loaded.

TensorFlow has no stable C++ ABI, so no one binary fits every installation:
the sources in custom_ops/ are compiled against the TensorFlow that is
installed, on first use or ahead of time by `kmem build`. All that is needed
is a C++ compiler; without one, everything in kmem that needs no native code
works.

The result is kept in the user's own cache folder (`kmem.cache`). What this
module does not do: remove libraries that were built for another TensorFlow or
an older kmem.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent import futures

from kmem import cache

_FLAGS = ("-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden")
_DIGEST_BYTES = hashlib.sha256().digest_size
_NO_COMPILER = """\
kmem needs a C++ compiler, once, to build its native library. Install one:
  Debian, Ubuntu:  sudo apt-get install g++
  Fedora:          sudo dnf install gcc-c++
  conda:           conda install -c conda-forge gxx
or set the environment variable CXX to one that is installed elsewhere. \
Then run `kmem build`."""
_TOO_LATE = """\
kmem's allocator must be in place before the first TensorFlow operation, and \
TensorFlow has already allocated memory in this process. Import kmem before \
any TensorFlow operation. The native library {is_built}, so that `import \
kmem` is enough{then}."""


class NativeLibraryError(RuntimeError):
    """The native library cannot be built, loaded or put to use."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """The allocator's counters, in bytes but for `num_allocations`."""

    in_use: int
    peak: int
    # None: no limit.
    limit: int | None
    largest: int
    num_allocations: int
    # The size of the request that was refused last; 0 if none was.
    refused: int
    # Freed, and kept to be used again: not in use, but not the system's yet.
    cached: int


class _Stats(ctypes.Structure):
    # In the order of KmemStats in custom_ops/memory/budget_allocator.cc.
    _fields_ = [
        (field.name, ctypes.c_int64) for field in dataclasses.fields(Stats)
    ]


def sources_folder() -> pathlib.Path:
    """Inside the package when installed, beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent
    installed = package / "custom_ops"
    return installed if installed.is_dir() else package.parent / "custom_ops"


def find_compiler() -> list[str] | None:
    """The command that compiles C++: `$CXX`, else the first one found."""
    if os.environ.get("CXX", "").strip():
        command = shlex.split(os.environ["CXX"])
        path = shutil.which(command[0])
        return [path, *command[1:]] if path else None
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            return [path]
    return None


def find_library() -> pathlib.Path | None:
    """The library, if it was built for exactly this installation."""
    folder = cache.folder()
    if not folder.exists():
        return None
    with _explained():
        cache.check_private(folder)
    compiler = find_compiler()
    if compiler:
        paths = [folder / _library_name(compiler)]
    else:
        # Built where there was a compiler, which was removed since.
        paths = sorted(folder.glob(f"{_installation_name()}-*.so"))
    return next((path for path in paths if _is_whole(path)), None)


def build(force: bool = False) -> pathlib.Path:
    """Compiles the library unless that has been done.

    Args:
        force: Compile even if the library is there already.

    Returns:
        The path of the library.

    Raises:
        NativeLibraryError: If there is no compiler, if it fails, or if the
            cache folder cannot be used.
    """
    built = find_library()
    if built and not force:
        return built
    compiler = find_compiler()
    if compiler is None:
        raise NativeLibraryError(_NO_COMPILER)
    folder = cache.folder()
    with _explained():
        cache.make_private(folder)
    path = folder / _library_name(compiler)
    with _locked(folder / "lock"):
        # Another process may have built it while this one waited.
        if force or not _is_whole(path):
            _compile(compiler, path)
    return path


def register_if_built() -> None:
    """Puts the allocator in place if that can be done at once and silently.

    What `import kmem` does. Whatever is in the way is reported when the
    allocator is needed, by `allocator`.
    """
    with contextlib.suppress(NativeLibraryError, OSError):
        _register(find_library())


def library() -> ctypes.CDLL:
    """Returns the library, built if need be; its allocator may be unused."""
    if not _state.loaded:
        path = build()
        with _state.lock:
            _load_once(path)
    return _state.library


def allocator() -> ctypes.CDLL:
    """Returns the library, with its allocator in place.

    Raises:
        NativeLibraryError: If the allocator is not in place and can no
            longer be put there, or if the library cannot be built.
    """
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
            "set: TensorFlow then keeps a pool of its own, and kmem would "
            "count the pool rather than what is in use."
        )
    return _state.library


def stats() -> Stats:
    """The allocator's counters now."""
    library = allocator()
    counters = _Stats()
    library.kmem_stats(ctypes.byref(counters))
    values = {
        field.name: getattr(counters, field.name)
        for field in dataclasses.fields(Stats)
    }
    if values["limit"] < 0:
        values["limit"] = None
    return Stats(**values)


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
        return _state.registered


def _load_once(path: pathlib.Path) -> None:
    if not _state.loaded:
        _state.library = _load(path)
        _state.loaded = True


def _load(path: pathlib.Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(
            f"The native library cannot be loaded: {error}. Build it anew "
            "with `kmem build --force`."
        ) from error
    library.kmem_register_allocator.restype = ctypes.c_bool
    library.kmem_allocator_in_use.restype = ctypes.c_bool
    library.kmem_stats.argtypes = [ctypes.POINTER(_Stats)]
    library.kmem_set_limit.argtypes = [ctypes.c_int64]
    library.kmem_set_limit.restype = ctypes.c_bool
    library.kmem_watermark.restype = ctypes.c_int64
    return library


def _compile(compiler: list[str], path: pathlib.Path) -> None:
    import tensorflow as tf

    print(
        f"kmem: compiling its native library for TensorFlow {tf.__version__} "
        "(about half a minute, once)",
        file=sys.stderr,
        flush=True,
    )
    # In the cache folder, so that the result can be renamed into place.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = os.path.join(folder, path.name)
        command = [*compiler, *_compile_flags()]
        objects = {
            source: os.path.join(
                folder, f"{source.parent.name}_{source.stem}.o"
            )
            for source in _sources(".cc")
        }
        with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            done = [
                pool.submit(_run, [*command, "-c", str(source), "-o", made])
                for source, made in objects.items()
            ]
            for future in done:
                future.result()
        _run([*command, *objects.values(), "-o", output, *_link_flags()])
        with open(output, "rb+") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(output, path)


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        last_lines = "\n".join(done.stdout.splitlines()[-20:])
        raise NativeLibraryError(
            "The C++ compiler failed to build kmem's native library.\n"
            f"{last_lines}\nThe command was:\n  {shlex.join(command)}"
        )


def _is_whole(path: pathlib.Path) -> bool:
    """Whether the file ends with the digest of what comes before.

    To load a library that was cut short ends the process with a bus error;
    that cannot be caught, so it is ruled out beforehand. What follows the
    end of an ELF file does not matter to the loader.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest


def _library_name(compiler: list[str]) -> str:
    # The file, rather than the answer to --version, as this is asked at
    # every import: an upgraded compiler is a changed file.
    path = os.path.realpath(compiler[0])
    file = os.stat(path)
    identity = _digest(path, *compiler[1:], file.st_size, file.st_mtime_ns)
    return f"{_installation_name()}-{identity}.so"


def _installation_name() -> str:
    """Names the sources, the flags and the TensorFlow to build against."""
    import tensorflow as tf

    folder = sources_folder()
    parts: list[object] = [
        platform.machine(),
        os.confstr("CS_GNU_LIBC_VERSION"),
        tf.version.VERSION,
        tf.version.GIT_VERSION,
        tf.version.COMPILER_VERSION,
        *_compile_flags(),
        *_link_flags(),
    ]
    for source in _sources(".cc", ".h"):
        parts += [source.relative_to(folder), source.read_bytes()]
    return f"kmem-{_digest(*parts)}"


def _digest(*parts: object) -> str:
    whole = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        whole.update(b"%d:" % len(content) + content)
    return whole.hexdigest()[:16]


def _sources(*suffixes: str) -> list[pathlib.Path]:
    return sorted(
        path
        for path in sources_folder().glob("*/*")
        if path.suffix in suffixes and path.parent.name != "tests"
    )


def _compile_flags() -> list[str]:
    import tensorflow as tf

    # As folders of the system: warnings in TensorFlow's headers are not for
    # our users. Some of them include one that lies elsewhere.
    include = tf.sysconfig.get_include()
    folders = (include, f"{include}/external/farmhash_archive/src")
    return [*_FLAGS, *(f"-isystem{folder}" for folder in folders)] + [
        flag
        for flag in tf.sysconfig.get_compile_flags()
        if not flag.startswith("-I")
    ]


def _link_flags() -> list[str]:
    import tensorflow as tf

    return [*tf.sysconfig.get_link_flags(), "-l:libtensorflow_cc.so.2"]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns what is wrong with the cache folder into an error of ours."""
    try:
        yield
    except OSError as error:
        raise NativeLibraryError(str(error)) from error


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with open(path, "w") as file:
        # Let go when the file is closed, also if the process is killed.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
