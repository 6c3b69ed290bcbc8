"""The index of a checkpoint: what it has, and whether it is as it was written.

It is a JSON file with a checksum of itself. It is taken only if writing it
again gives the same bytes: no change of a single one is overlooked. What this
module does not do: protect from somebody who makes a new checksum as well.
"""

import hashlib
import json
import pathlib
import re
from typing import Any

import numpy as np

from kmem.sharding import files

_NAME = "index.json"
_FORMAT = 2
_BEGIN = '{"kmem checkpoint": '


def exists(folder: pathlib.Path) -> bool:
    return (folder / _NAME).is_file()


def check_is_free(folder: pathlib.Path) -> None:
    """Checks that a folder has no index of anything else.

    Raises:
        ValueError: If it has.
    """
    path = folder / _NAME
    if exists(folder) and not path.read_bytes().startswith(_BEGIN.encode()):
        raise ValueError(
            "`folder` must be one of kmem's own. Give another one, or remove "
            f"what is not of kmem. Received: {path}, which no checkpoint has"
        )


def write(folder: pathlib.Path, content: dict) -> None:
    """Writes an index in one go: there is the old one, or the new."""
    files.replace(folder / _NAME, _sealed({"format": _FORMAT, **content}))


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what was written.

    Raises:
        OSError: If there is none, or it cannot be read.
        ValueError: If it is not as this version of kmem writes it.
    """
    path = folder / _NAME
    contents = path.read_bytes()
    try:
        content = json.loads(contents)["content"]
        if _sealed(content).encode() != contents:
            raise ValueError("other contents than were written")
        if content["format"] != _FORMAT:
            raise ValueError(f"format={content['format']}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise files.harmed(path, f"({error})") from error
    return content


def plain(position: dict) -> dict:
    """A position as JSON holds it: NumPy's numbers become Python's.

    Raises:
        ValueError: If it would be read as another one.
    """
    try:
        found = json.loads(json.dumps(position, default=_number))
        is_same = isinstance(position, dict) and found == position
    except (TypeError, ValueError, RecursionError):
        is_same = False
    if not is_same:
        raise ValueError(
            "`position` must be a dictionary of what JSON holds, with strings "
            f"as keys, such as {{'epoch': 3}}. Received: position={position!r}"
        )
    return found


def forms(paths: list[str]) -> list[tuple[str, int]]:
    """Variables' paths, whatever their process has made before.

    Keras counts layers: what is `dense` and `dense_1` in one process may be
    `dense_7` and `dense_8` in another. So numbers become their places among
    those of paths that are alike otherwise.
    """
    known: dict[str, set] = {}
    split = [(_NUMBER.sub("", path), _numbers(path)) for path in paths]
    for words, numbers in split:
        known.setdefault(words, set()).add(numbers)
    return [
        (words, sorted(known[words]).index(numbers)) for words, numbers in split
    ]


_NUMBER = re.compile(r"(?<=[^/_])_\d+(?![^/_])")
_WORD = re.compile(r"[^/_]+((?:_\d+(?![^/_]))*)")


def _numbers(path: str) -> tuple[tuple[int, ...], ...]:
    """What follows each word of a path."""
    return tuple(
        tuple(map(int, found.split("_")[1:])) for found in _WORD.findall(path)
    )


def _sealed(content: dict) -> str:
    text = json.dumps(content)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return f'{_BEGIN}"{checksum}", "content": {text}}}'


def _number(value: object) -> int | float:
    if not isinstance(value, np.generic):
        raise TypeError
    return value.item()
