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

import numpy as np

# Of custom_ops/dtr/simulate.h.
_CONSTANT, _CALL, _RETAIN, _RELEASE = range(4)
_OWN_STORAGE = -1


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
    reader = _Reader()
    path = pathlib.Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                reader.read(json.loads(line))
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    "A trace must hold one instruction of the format on each "
                    f"line. Received: {path.name}, line {number}: "
                    f"{line.strip()[:200]} ({error!r})"
                ) from error
    return reader.program()


class _Reader:
    """Turns a trace's names into numbers."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.names: dict[str, int] = {}  # Name -> tensor.
        self.sizes: list[int] = []  # Of the storage of each tensor.
        self.constant: str | None = None  # Its bytes are to come.
        self.call: dict = {}
        self.pending: list[str] = []  # Results of the call that are to come.
        self.bytes = 0
        self.constant_bytes = 0
        self.nanoseconds = 0
        self.num_operators = 0

    def read(self, line: dict) -> None:
        instruction = line["INSTRUCTION"]
        if instruction == "MEMORY":
            self._memory(line["NAME"], int(line["MEMORY"]))
        elif instruction == "ALIAS":
            self._result(line["NAME"], int(line["ALIAS"]))
        elif self.pending or self.constant:
            raise ValueError("sizes of what was made must come first")
        elif instruction == "CONSTANT":
            self.constant = line["NAME"]
        elif instruction == "CALL":
            self.pending = list(reversed(line["RESULT"]))
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
        if num_bytes < 0:
            raise ValueError("bytes must not be negative")
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
        nanoseconds = int(line["TIME"])
        if nanoseconds < 0:
            raise ValueError("time must not be negative")
        inputs = [self.names[name] for name in line["ARGS"]]
        self.call = {**line, "inputs": inputs}
        self.nanoseconds += nanoseconds
        self.num_operators += 1
        self.numbers += (_CALL, nanoseconds, len(inputs), *inputs, num_outputs)

    def _result(self, name: str, view_of: int) -> None:
        if name != self.pending.pop():
            raise ValueError("not the result that is due")
        num_bytes = self.bytes
        if view_of != _OWN_STORAGE:
            if view_of < 0:
                raise ValueError("no such argument")
            num_bytes = self.sizes[self.call["inputs"][view_of]]
        self.numbers += (num_bytes, view_of)
        self._make(name, num_bytes)

    def _mutate(self, line: dict) -> None:
        self._call(line, num_outputs=len(line["MUTATE"]))
        changed = [line["ARGS"][index] for index in line["MUTATE"]]
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
        self._name(line["DST"], tensor)

    def _make(self, name: str, num_bytes: int) -> None:
        self.sizes.append(num_bytes)
        self._name(name, len(self.sizes) - 1)

    def _name(self, name: str, tensor: int) -> None:
        if name in self.names:
            raise ValueError("the name is taken")
        self.names[name] = tensor

    def program(self) -> Program:
        if self.pending or self.constant:
            raise ValueError("A trace must end with a whole instruction.")
        return Program(
            numbers=np.array(self.numbers, np.int64),
            constant_bytes=self.constant_bytes,
            num_operators=self.num_operators,
            seconds=self.nanoseconds / 1e9,
        )
