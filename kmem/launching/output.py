"""Passes a process's output on in whole lines, each with its rank before it."""

import contextlib
import os
import sys
from typing import IO

# A line that grows beyond this is passed on in pieces.
_LONGEST_LINE = 1 << 16


class Lines:
    """What a process writes into a pipe, to a stream of this process.

    A progress bar's carriage return ends a line, as nothing can be drawn over
    what another rank has written since.

    Args:
        pipe: The end to read from.
        prefix: What to write before each line.
        stream: `"stdout"` or `"stderr"`, looked up in `sys` at each line.
    """

    def __init__(self, pipe: IO[bytes], prefix: str, stream: str):
        self._pipe = pipe
        self._prefix = prefix
        self._stream = stream
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def forward(self) -> bool:
        """Passes on what is there; returns whether there can be more."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fileno(), _LONGEST_LINE):
                data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                *lines, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > _LONGEST_LINE:
                    lines, self._rest = [*lines, self._rest], b""
                self._write(lines)
            return False
        return True

    def close(self) -> None:
        if self._rest:
            self._write([self._rest])
            self._rest = b""
        self._pipe.close()

    def _write(self, lines: list[bytes]) -> None:
        stream = getattr(sys, self._stream)
        for line in lines:
            text = line.decode(errors="replace")
            stream.write(f"{self._prefix}{text}\n")
        stream.flush()
