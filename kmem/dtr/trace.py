"""Reads a recorded step for the simulator of DTR: every name and handle of it.

The format is of Kirisame et al. (ICLR 2021): a JSON object a line, which says
what was called, how long it took, what it made and when a name was let go. A
trace becomes a list of numbers that says what was called, held and released,
in that order. What changes a tensor in place makes a new one.
"""

import dataclasses
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Iterator

import numpy as np

# Of custom_ops/dtr/simulate.h.
_CONSTANT, _CALL, _RETAIN, _RELEASE = range(4)
_OWN_STORAGE = -1
# Of bytes or nanoseconds, in all: 4,600 petabytes, or a century.
_MOST = 2**62
_MALFORMED = (
    *(ValueError, KeyError, IndexError, TypeError),
    *(OverflowError, RecursionError),
)
_UNREADABLE = EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError


@dataclasses.dataclass(frozen=True)
class Program:
    """A recorded step, as the native core reads it.

    Attributes:
        numbers: Instructions and their operands (custom_ops/dtr/simulate.h).
        constant_bytes: What it reads of what was there before.
        num_operators: How many there are.
        seconds: How long they take.
    """

    numbers: np.ndarray
    constant_bytes: int
    num_operators: int
    seconds: float


def read_program(path: str | os.PathLike[str]) -> Program:
    """Reads a trace.

    Args:
        path: A file of JSON lines, compressed if its name ends in `.gz`.

    Returns:
        A `Program`.

    Raises:
        ValueError: If a line is not as the format has it. It names the line.
    """
    path = pathlib.Path(path)
    reader = _Reader()
    for number, line in _lines(path):
        try:
            reader.read(json.loads(line))
        except _MALFORMED as error:
            raise ValueError(
                "A trace must hold one instruction of the format on each "
                f"line. Received: {path.name}, line {number}: "
                f"{line.strip()[:200]} ({error!r})"
            ) from error
    if reader.is_amid:
        raise ValueError(
            f"A trace must end with a whole instruction. Received: {path.name}"
        )
    return reader.program()


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """A file's lines, with their numbers from 1 on."""
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line
    except _UNREADABLE as error:
        raise ValueError(
            "A trace must be text in UTF-8, or such text compressed by gzip "
            f"in a file that ends in .gz. Received: {path.name}, from line "
            f"{number + 1} on: {error}"
        ) from error


def _number(value: str | int | float) -> int:
    """Bytes or nanoseconds, of which there are not too many to add up."""
    number = int(value)
    if not 0 <= number <= _MOST:
        raise ValueError(f"must be a number from 0 to {_MOST}")
    return number


def _names(values: list) -> list[str]:
    is_list = isinstance(values, list)
    if not (is_list and all(isinstance(value, str) for value in values)):
        raise ValueError("names must be a list of texts")
    return values


class _Reader:
    """Turns a trace's names into numbers."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.names: dict[str, int] = {}  # Name -> tensor.
        self.sizes: list[int] = []  # Of the storage of each tensor.
        self.constant: str | None = None  # Its bytes are to come.
        self.inputs: list[int] = []  # Of the call that was read last.
        self.pending: list[str] = []  # Results of the call that are to come.
        self.bytes = 0
        self.constant_bytes = 0
        self.made_bytes = 0
        self.nanoseconds = 0
        self.num_operators = 0

    @property
    def is_amid(self) -> bool:
        """Whether an instruction has not ended."""
        return bool(self.pending) or self.constant is not None

    def read(self, line: dict) -> None:
        instruction = line["INSTRUCTION"]
        if instruction == "MEMORY":
            self._memory(line["NAME"], _number(line["MEMORY"]))
        elif instruction == "ALIAS":
            self._result(line["NAME"], int(line["ALIAS"]))
        elif self.is_amid:
            raise ValueError("sizes of what was made must come first")
        elif instruction == "CONSTANT":
            (self.constant,) = _names([line["NAME"]])
        elif instruction == "CALL":
            self.pending = _names(line["RESULT"])[::-1]
            self._call(line, num_outputs=len(self.pending))
        elif instruction == "MUTATE":
            self._mutate(line)
        elif instruction in ("COPY", "COPY_FROM"):
            self._copy(line, rebinds=instruction == "COPY_FROM")
        elif instruction == "RELEASE":
            self.numbers += (_RELEASE, self.names.pop(line["NAME"]))
        elif instruction != "ANNOTATE":
            raise ValueError("no such instruction")

    def _memory(self, name: str, num_bytes: int) -> None:
        if self.constant is None:
            self.bytes = num_bytes
        elif name == self.constant:
            self.constant = None
            self.numbers += (_CONSTANT, num_bytes)
            self.constant_bytes += num_bytes
            self._make(name, num_bytes)
        else:
            raise ValueError("not the bytes of the constant")

    def _call(self, line: dict, num_outputs: int) -> None:
        nanoseconds = _number(line["TIME"])
        inputs = [self.names[name] for name in _names(line["ARGS"])]
        self.inputs = inputs
        self.nanoseconds = _number(self.nanoseconds + nanoseconds)
        self.num_operators += 1
        self.numbers += (_CALL, nanoseconds, len(inputs), *inputs, num_outputs)

    def _result(self, name: str, view_of: int) -> None:
        if name != self.pending.pop():
            raise ValueError("not the result that is due")
        num_bytes = self.bytes
        if view_of != _OWN_STORAGE:
            if view_of < 0:
                raise ValueError("no such argument")
            num_bytes = self.sizes[self.inputs[view_of]]
        self.numbers += (num_bytes, view_of)
        self._make(name, num_bytes)

    def _mutate(self, line: dict) -> None:
        self._call(line, num_outputs=len(line["MUTATE"]))
        changed = [line["ARGS"][_number(index)] for index in line["MUTATE"]]
        sizes = [self.sizes[self.names[name]] for name in changed]
        for num_bytes in sizes:
            self.numbers += (num_bytes, _OWN_STORAGE)
        for name, num_bytes in zip(changed, sizes, strict=True):
            self.numbers += (_RELEASE, self.names.pop(name))
            self._make(name, num_bytes)

    def _copy(self, line: dict, rebinds: bool) -> None:
        tensor = self.names[line["SRC"]]
        self.numbers += (_RETAIN, tensor)
        if rebinds:
            self.numbers += (_RELEASE, self.names.pop(line["DST"]))
        (name,) = _names([line["DST"]])
        self._name(name, tensor)

    def _make(self, name: str, num_bytes: int) -> None:
        self.made_bytes = _number(self.made_bytes + num_bytes)
        self.sizes.append(num_bytes)
        self._name(name, len(self.sizes) - 1)

    def _name(self, name: str, tensor: int) -> None:
        if name in self.names:
            raise ValueError("the name is taken")
        self.names[name] = tensor

    def program(self) -> Program:
        return Program(
            numbers=np.array(self.numbers, np.int64),
            constant_bytes=self.constant_bytes,
            num_operators=self.num_operators,
            seconds=self.nanoseconds / 1e9,
        )
