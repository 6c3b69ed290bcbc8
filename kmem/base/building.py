"""Finds the native library, or builds it: compiled once, by the user.

TensorFlow has no stable C++ ABI, so no one binary fits every installation. A
wheel may bring one for each of several versions of TensorFlow (`.ci/wheels`).
For any other the sources in custom_ops/ are compiled against the TensorFlow
that is installed, at the first import or ahead of time by `kmem build`. All
that is needed is a C++ compiler.

The result is kept in the user's own cache folder (`kmem.base.cache`). What this
module does not do: load it (native.py), or remove libraries that were built
for another TensorFlow or an older kmem.
"""

import contextlib
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
from collections.abc import Iterator
from concurrent import futures

from kmem.base import cache

_FLAGS = ("-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden")
# Within the folder of the sources.
_BROUGHT = "built"
_DIGEST_BYTES = hashlib.sha256().digest_size
_NO_COMPILER = """\
kmem needs a C++ compiler, once, to build its native library. Install one:
  Debian, Ubuntu:  sudo apt-get install g++
  Fedora:          sudo dnf install gcc-c++
  conda:           conda install -c conda-forge gxx
or set the environment variable CXX to one that is installed elsewhere. \
Then run `kmem build`."""


class NativeLibraryError(RuntimeError):
    """The native library cannot be built, loaded or put to use."""


def sources_folder() -> pathlib.Path:
    """Inside the package when installed, beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
    installed = package / "custom_ops"
    return installed if installed.is_dir() else package.parent / "custom_ops"


def find_compiler() -> list[str] | None:
    """The command that compiles C++: `$CXX`, which must be a command line, else
    the first one found."""
    given = os.environ.get("CXX", "")
    if given.strip():
        try:
            command = shlex.split(given)
        except ValueError as error:
            raise NativeLibraryError(
                "The environment variable CXX must be a command that compiles "
                f"C++, as in a shell ({error}). Received: CXX={given}"
            ) from error
        path = shutil.which(command[0])
        return [path, *command[1:]] if path else None
    paths = map(shutil.which, ("g++", "clang++", "c++"))
    return next(([path] for path in paths if path), None)


def find_library() -> pathlib.Path | None:
    """The library: what was built for exactly this installation, else what
    the wheel brought for this version of TensorFlow."""
    paths = [*_cached_libraries(), sources_folder() / _BROUGHT / _wheel_name()]
    return next((path for path in paths if _is_whole(path)), None)


def build(force: bool = False) -> pathlib.Path:
    """Compiles the library unless it is there, or in any case by `force`, and
    returns its path. Raises `NativeLibraryError` if there is no compiler, if it
    fails, or if the cache folder cannot be used."""
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
    with open(folder / "lock", "w") as lock:
        # Let go when the file is closed, also if the process is killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have built it while this one waited.
        if force or not _is_whole(path):
            try:
                _compile(compiler, path)
            except NativeLibraryError:
                _failure(path).touch()
                raise
            _failure(path).unlink(missing_ok=True)
    return path


def build_for_wheel(package: pathlib.Path) -> pathlib.Path:
    """Adds the library for the TensorFlow that is installed to a wheel's folder
    `kmem`, unpacked, and returns its path there."""
    path = package / "custom_ops" / _BROUGHT / _wheel_name()
    path.parent.mkdir(exist_ok=True)
    return pathlib.Path(shutil.copyfile(build(), path))


def has_failed() -> bool:
    """Whether the last try to build the library with this compiler failed."""
    compiler = find_compiler()
    if compiler is None:
        return False
    return _failure(cache.folder() / _library_name(compiler)).exists()


def _cached_libraries() -> list[pathlib.Path]:
    folder = cache.folder()
    if not folder.exists():
        return []
    with _explained():
        cache.check_private(folder)
    compiler = find_compiler()
    if compiler:
        return [folder / _library_name(compiler)]
    # Built where there was a compiler, which was removed since.
    return sorted(folder.glob(f"{_installation_name()}-*.so"))


def _failure(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".failed")


def _compile(compiler: list[str], path: pathlib.Path) -> None:
    import tensorflow as tf

    # For who waits; nothing is printed where a program's output is kept.
    if sys.stderr is not None and sys.stderr.isatty():
        print(
            "kmem: compiling its native library for TensorFlow "
            f"{tf.__version__} (about a minute, once)",
            file=sys.stderr,
            flush=True,
        )
    # In the cache folder, so that the result can be renamed into place.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = os.path.join(folder, path.name)
        command = [*compiler, *_compile_flags()]

        def compiled(source: pathlib.Path) -> str:
            name = f"{source.parent.name}_{source.stem}.o"
            made = os.path.join(folder, name)
            _run([*command, "-c", str(source), "-o", made])
            return made

        with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, _sources(".cc")))
        _run([*command, *objects, "-o", output, *_link_flags()])
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


def _wheel_name() -> str:
    """Names what no user's installation changes: sources and TensorFlow."""
    import tensorflow as tf

    folder = sources_folder()
    versions = tf.version.GIT_VERSION, tf.version.COMPILER_VERSION
    parts: list[object] = [platform.machine(), *versions, *_FLAGS]
    for source in _sources(".cc", ".h"):
        parts += [source.relative_to(folder), source.read_bytes()]
    return f"tensorflow-{tf.version.VERSION}-{_digest(*parts)}.so"


def _installation_name() -> str:
    """Names the sources, the flags and the TensorFlow to build against."""
    libc = os.confstr("CS_GNU_LIBC_VERSION")
    flags = (*_compile_flags(), *_link_flags())
    return f"kmem-{_digest(_wheel_name(), libc, *flags)}"


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
