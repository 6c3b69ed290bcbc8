"""The files of a checkpoint, which tell whether they are as they were written.

A file of numbers has a CRC-32 checksum for each block of 4 MiB, which the
index keeps. So a reader that needs part of a file reads, and checks, that part
alone. The index is a JSON file with a checksum of itself. It is taken only if
writing it again gives the same bytes: no change of a single one is overlooked.
What this module does not do: protect from somebody who alters the checksums
too.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import Any
from typing import BinaryIO

import numpy as np

from kmem.base import cache
from kmem.base.checks import must_be

BLOCK_BYTES = 2**22

_INDEX = "index.json"
_FORMAT = 2
_BEGIN = '{"kmem checkpoint": '

# In a variable's path: what Keras counts by, and a word with that.
_NUMBER = re.compile(r"(?<=[^/_])_\d+(?![^/_])")
_WORD = re.compile(r"[^/_]+((?:_\d+(?![^/_]))*)")


@contextlib.contextmanager
def _appearing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file that has its name only once it is complete, without an error."""
    part = f"kmem-{path.stem.removeprefix('kmem-')}.part"
    with cache.appearing(path, part) as written, open(written, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


class Writer(contextlib.ExitStack):
    """Writes arrays one after another. Only on leaving it without an error the
    file has its name; `checksums` are those of all blocks so far."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._path = path
        self.num_bytes = 0
        self.checksums: list[int] = []

    def __enter__(self) -> "Writer":
        self._file = self.enter_context(_appearing(self._path))
        return self

    def write(self, array: np.ndarray) -> None:
        view: Any = np.ascontiguousarray(array).reshape(-1).view("u1")
        view = memoryview(view)
        while view:
            room = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES
            piece, view = view[:room], view[room:]
            self._file.write(piece)
            if room == BLOCK_BYTES:
                self.checksums.append(0)
            self.checksums[-1] = zlib.crc32(piece, self.checksums[-1])
            self.num_bytes += len(piece)


class Reader:
    """Reads parts of a file, and checks them: a `ValueError` if it is missing
    or has another length, or, when a part is read, has been altered."""

    def __init__(
        self, path: pathlib.Path, num_bytes: int, checksums: list[int]
    ):
        self._path = path
        self._checksums = checksums
        self._block: tuple[int, bytes] = (-1, b"")
        if not path.is_file():
            raise self._error("no such file")
        size = path.stat().st_size
        if size != num_bytes:
            raise self._error(f"{size} bytes instead of {num_bytes}")

    def read(self, start: int, stop: int) -> bytearray:
        """Returns the bytes from `start` to before `stop`."""
        contents = bytearray()
        while start < stop:
            number, first = divmod(start, BLOCK_BYTES)
            piece = self._read_block(number)[first : first + stop - start]
            contents += piece
            start += len(piece)
        return contents

    def _read_block(self, number: int) -> bytes:
        # Small arrays lie in one block: it is read once.
        if self._block[0] != number:
            with open(self._path, "rb") as file:
                file.seek(number * BLOCK_BYTES)
                block = file.read(BLOCK_BYTES)
            if zlib.crc32(block) != self._checksums[number] or not block:
                raise self._error(
                    "other contents than were written, between the bytes "
                    f"{number * BLOCK_BYTES} and "
                    f"{number * BLOCK_BYTES + len(block)}"
                )
            self._block = number, block
        return self._block[1]

    def _error(self, received: str) -> ValueError:
        return _harmed(self._path, f"with {received}")


def _harmed(path: pathlib.Path, received: str) -> ValueError:
    """The error of a file that is not as it was written."""
    return ValueError(
        "A checkpoint's files must be as this version of kmem wrote them: "
        "copy the checkpoint again, or load another one. Received: "
        f"{path} {received}"
    )


def has_index(folder: pathlib.Path) -> bool:
    return (folder / _INDEX).is_file()


def check_is_free(folder: pathlib.Path) -> None:
    """Checks that a folder has no index of anything else."""
    path = folder / _INDEX
    if has_index(folder) and not path.read_bytes().startswith(_BEGIN.encode()):
        raise ValueError(
            "`folder` must be empty or hold a checkpoint of kmem: give another "
            f"one, or remove {path.name}. Received: {path}, not of a checkpoint"
        )


def write_index(folder: pathlib.Path, content: dict) -> None:
    """Writes an index in one go: there is the old one, or the new."""
    with _appearing(folder / _INDEX) as file:
        file.write(_sealed({"format": _FORMAT, **content}).encode())
    # The name is in the folder, which is written apart.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_index(folder: pathlib.Path) -> dict[str, Any]:
    """What was written; a `ValueError` if it is not as this version of kmem
    writes it."""
    path = folder / _INDEX
    contents = path.read_bytes()
    try:
        content = json.loads(contents)["content"]
        if _sealed(content).encode() != contents:
            raise ValueError("other contents than were written")
        if content["format"] != _FORMAT:
            raise ValueError(f"format={content['format']}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _harmed(path, f"({error})") from error
    return content


def _sealed(content: dict) -> str:
    text = json.dumps(content)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return f'{_BEGIN}"{checksum}", "content": {text}}}'


def plain(position: dict) -> dict:
    """A position as JSON holds it: NumPy's numbers become Python's. A
    `ValueError` if it would be read as another one."""
    try:
        as_read = json.loads(json.dumps(position, default=np.generic.item))
        is_same = isinstance(position, dict) and as_read == position
    except (TypeError, ValueError, RecursionError):
        is_same = False
    kind = "a dictionary of what JSON holds, with strings as keys, such as "
    must_be(is_same, position, "position", kind + "{'epoch': 3}")
    return as_read


def forms(paths: list[str]) -> list[tuple[str, int]]:
    """Variables' paths, whatever their process has made before.

    Keras counts layers: what is `dense` and `dense_1` in one process may be
    `dense_7` and `dense_8` in another. So numbers become their places among
    those of paths that are alike otherwise.
    """
    numbers_of: dict[str, set] = {}
    split = [(_NUMBER.sub("", path), _numbers(path)) for path in paths]
    for words, numbers in split:
        numbers_of.setdefault(words, set()).add(numbers)
    return [
        (words, sorted(numbers_of[words]).index(numbers))
        for words, numbers in split
    ]


def _numbers(path: str) -> tuple[tuple[int, ...], ...]:
    """What follows each word of a path."""
    return tuple(
        tuple(map(int, counts.split("_")[1:])) for counts in _WORD.findall(path)
    )
