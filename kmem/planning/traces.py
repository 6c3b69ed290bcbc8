"""Reads a recorded training step: a trace as the simulator of DTR keeps it.

The format is of Kirisame et al. (ICLR 2021): a JSON object a line, which says
what was called, how long it took, what it made and when a name was let go.
Names that share a storage become one tensor. What changes a tensor in place
becomes an operation that makes a new one, for every name of the old. A call
that makes nothing, such as a reshape, is no operation of its own: whoever
makes its storage again has to make the view again, so its time goes to the
storage's maker (a view of a constant is made once; its time is left out).
Tensors that still have a name at the end are the step's results.

What a trace does not know, the graph does not have: workspace, and which
operations draw random numbers.
"""

import collections
import gzip
import json
import os
import pathlib
from collections.abc import Callable

from kmem.planning.graph import Graph
from kmem.planning.graph import Operation


def read_trace(path: str | os.PathLike[str]) -> Graph:
    """Reads a trace.

    Args:
        path: A file of JSON lines, compressed if its name ends in `.gz`.

    Returns:
        A `Graph`, with seconds and bytes as they were recorded.

    Raises:
        ValueError: If a line is not as the format has it. It names the line.

    Example:

    ```python
    import pathlib

    from kmem.planning.traces import read_trace

    path = pathlib.Path("step.log")
    path.write_text(
        '{"INSTRUCTION": "CONSTANT", "NAME": "x"}\\n'
        '{"INSTRUCTION": "MEMORY", "NAME": "x", "MEMORY": "8"}\\n'
    )
    read_trace(path).constant_bytes  # 8
    ```
    """
    trace = _Trace()
    read_instructions(path, trace.read)
    return trace.graph()


def read_instructions(
    path: str | os.PathLike[str], read: Callable[[dict], None]
) -> None:
    """Calls `read` with each instruction of a trace; an error of its names
    the line, as a `ValueError`."""
    path = pathlib.Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                read(json.loads(line))
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    "A trace must hold one instruction of the format on each "
                    f"line. Received: {path.name}, line {number}: "
                    f"{line.strip()[:200]} ({error!r})"
                ) from error


class _Trace:
    """What has been read so far."""

    def __init__(self):
        self.names: dict[str, int] = {}  # Name -> its tensor.
        self.holders = collections.Counter()  # Tensor -> how many names.
        self.sizes: list[int] = []
        self.constants: list[int] = []
        self.calls: list[dict] = []
        self.maker: dict[int, dict] = {}
        self.pending: dict[str, int] = {}  # A call's result -> its bytes.
        self.num_forward: int | None = None

    def read(self, line: dict) -> None:
        instruction = line["INSTRUCTION"]
        if instruction == "CONSTANT":
            self.constants.append(self._new(line["NAME"]))
        elif instruction == "CALL":
            self._call(line, made=[])
        elif instruction == "MUTATE":
            self._mutate(line)
        elif instruction == "MEMORY":
            num_bytes = int(line["MEMORY"])
            if num_bytes < 0:
                raise ValueError("bytes must not be negative")
            if line["NAME"] in self.names:
                self.sizes[self.names[line["NAME"]]] = num_bytes
            else:
                self.pending[line["NAME"]] = num_bytes
        elif instruction == "ALIAS":
            self._alias(line["NAME"], int(line["ALIAS"]))
        elif instruction in ("COPY", "COPY_FROM"):
            self._bind(line["DST"], self.names[line["SRC"]])
        elif instruction == "RELEASE":
            self.holders[self.names.pop(line["NAME"])] -= 1
        elif instruction == "ANNOTATE":
            if line["ANNOTATION"] == "BACKWARD":
                self.num_forward = len(self._operations())
        else:
            raise ValueError("no such instruction")

    def _bind(self, name: str, tensor: int) -> None:
        if name in self.names:
            self.holders[self.names[name]] -= 1
        self.names[name] = tensor
        self.holders[tensor] += 1

    def _new(self, name: str, num_bytes: int = 0) -> int:
        self.sizes.append(num_bytes)
        self._bind(name, len(self.sizes) - 1)
        return len(self.sizes) - 1

    def _call(self, line: dict, made: list[int]) -> None:
        seconds = int(line["TIME"]) / 1e9
        if seconds < 0:
            raise ValueError("time must not be negative")
        self.calls.append(
            {
                "name": line["NAME"],
                "inputs": [self.names[name] for name in line["ARGS"]],
                "outputs": made,
                "seconds": seconds,
            }
        )

    def _alias(self, name: str, argument: int) -> None:
        num_bytes = self.pending.pop(name)
        call = self.calls[-1]
        if argument == -1:
            tensor = self._new(name, num_bytes)
            call["outputs"].append(tensor)
            self.maker[tensor] = call
        else:
            self._bind(name, call["inputs"][argument])

    def _mutate(self, line: dict) -> None:
        self._call(line, made=[])
        call = self.calls[-1]
        for old in {call["inputs"][i] for i in line["MUTATE"]}:
            self.sizes.append(self.sizes[old])
            new = len(self.sizes) - 1
            for name in [n for n, t in self.names.items() if t == old]:
                self._bind(name, new)
            call["outputs"].append(new)
            self.maker[new] = call

    def _operations(self) -> list[dict]:
        return [call for call in self.calls if call["outputs"]]

    def graph(self) -> Graph:
        for call in self.calls:
            if not call["outputs"] and call["inputs"]:
                maker = self.maker.get(call["inputs"][0])
                if maker:
                    maker["seconds"] += call["seconds"]
        operations = tuple(
            Operation(
                name=call["name"],
                inputs=tuple(dict.fromkeys(call["inputs"])),
                outputs=tuple(call["outputs"]),
                seconds=call["seconds"],
            )
            for call in self._operations()
        )
        held = {tensor for tensor, count in self.holders.items() if count > 0}
        num_forward = self.num_forward
        return Graph(
            operations=operations,
            tensor_bytes=tuple(self.sizes),
            constants=frozenset(self.constants),
            results=frozenset(held.difference(self.constants)),
            num_forward=(
                len(operations) if num_forward is None else num_forward
            ),
        )
