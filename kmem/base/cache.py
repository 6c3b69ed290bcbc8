"""The user's own folder: kmem's native library, and choices of `memory_budget`.

What is found there is loaded into the process. So the folder is used only if it
is the user's and nobody else can write to it.
"""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator


def folder() -> pathlib.Path:
    """Where things are kept. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # The XDG specification: ignore it then.
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "kmem"


def files() -> list[pathlib.Path]:
    """What is kept there."""
    return [path for path in sorted(folder().glob("*")) if path.is_file()]


def clear() -> None:
    """Removes what is kept. A library that is in use stays with its process."""
    if folder().exists():
        check_private(folder())
    for path in files():
        # Somebody may wait for the lock, or have it.
        if path.name != "lock":
            path.unlink(missing_ok=True)


def make_private(path: pathlib.Path) -> None:
    """Makes a folder that only the user can use, unless it is there; an
    `OSError` if it cannot."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"kmem cannot make its cache folder {path}: {error.strerror}. "
            "Set the environment variable XDG_CACHE_HOME to a folder of "
            "yours that can be written to."
        ) from error
    check_private(path)


@contextlib.contextmanager
def appearing(path: pathlib.Path, part: str = "") -> Iterator[pathlib.Path]:
    """What to write to: `path` appears on leaving without an error. Until then
    it is named `part`, in the same folder."""
    written = path.with_name(part or f"{path.name}.{os.getpid()}.part")
    try:
        yield written
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


def check_private(path: pathlib.Path) -> None:
    """Checks that nobody else could have put something into a folder; an
    `OSError` if so."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a folder"
    elif status.st_uid != os.geteuid():
        problem = "belongs to another user"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "can be written to by other users"
    else:
        return
    raise PermissionError(
        f"kmem's cache folder {path} {problem}, and what is found there would "
        "be used in this process. It must be a folder of yours that only you "
        f"can write to: `chmod 700 {path}`, or set the environment variable "
        "XDG_CACHE_HOME to another place."
    )
