"""Files of numbers that tell whether they are as they were written.

A file has a CRC-32 checksum for each block of 4 MiB, which whoever writes it
keeps elsewhere. So a reader that needs part of a file reads, and checks, that
part alone. What this module does not do: protect from somebody who alters the
checksums too.
"""

import contextlib
import os
import pathlib
import zlib
from typing import Any

import numpy as np

BLOCK_BYTES = 2**22


class Writer:
    """Writes arrays one after another. A context manager: only on leaving it
    without an error the file appears under its name.

    Args:
        path: The file's name.

    Attributes:
        num_bytes: How many have been written.
        checksums: Those of all blocks, once the file is complete.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._part = path.with_suffix(".part")
        self._checksum = 0
        self.num_bytes = 0
        self.checksums: list[int] = []

    def __enter__(self) -> "Writer":
        self._file = open(self._part, "wb")
        return self

    def __exit__(self, kind, *exception) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._part.unlink, missing_ok=True)
            with self._file:
                if kind is not None:
                    return
                if self.num_bytes % BLOCK_BYTES:
                    self.checksums.append(self._checksum)
                self._file.flush()
                os.fsync(self._file.fileno())
            self._part.rename(self._path)

    def write(self, array: np.ndarray) -> None:
        view: Any = np.ascontiguousarray(array).reshape(-1).view("u1")
        view = memoryview(view)
        while view:
            room = BLOCK_BYTES - self.num_bytes % BLOCK_BYTES
            piece, view = view[:room], view[room:]
            self._file.write(piece)
            self._checksum = zlib.crc32(piece, self._checksum)
            self.num_bytes += len(piece)
            if len(piece) == room:
                self.checksums.append(self._checksum)
                self._checksum = 0


class Reader:
    """Reads parts of a file, and checks them.

    Args:
        path: The file.
        num_bytes: How many it must have.
        checksums: Those of its blocks.

    Raises:
        ValueError: If the file is missing or has another length; when a part
            is read, if it has been altered.
    """

    def __init__(
        self, path: pathlib.Path, num_bytes: int, checksums: list[int]
    ):
        self._path = path
        self._num_bytes = num_bytes
        self._checksums = checksums
        self._block: tuple[int, bytes] = (-1, b"")
        if not path.is_file():
            raise self._error("no such file")
        found = path.stat().st_size
        if found != num_bytes:
            raise self._error(f"{found} bytes instead of {num_bytes}")

    def read(self, start: int, stop: int) -> bytearray:
        """Returns the bytes from `start` to before `stop`."""
        found = bytearray()
        while start < stop:
            number, first = divmod(start, BLOCK_BYTES)
            piece = self._read_block(number)[first : first + stop - start]
            found += piece
            start += len(piece)
        return found

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
        return harmed(self._path, f"with {received}")


def harmed(path: pathlib.Path, received: str) -> ValueError:
    """The error of a file that is not as it was written."""
    return ValueError(
        "A checkpoint's files must be as this version of kmem wrote them: "
        "copy the checkpoint again, or load another one. Received: "
        f"{path} {received}"
    )


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a whole file in one go: there is the old one, or the new."""
    part = path.with_name(f"kmem-{path.stem}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    # The name is in the folder, which is written apart.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
