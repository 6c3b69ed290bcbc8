"""What the command line's arguments may be, for `add_argument(type=...)`.

What is wrong with one is said while the command line is read, before any work:
the exit code is 2 then. An error of another kind would lose its text there.
"""

import argparse
import contextlib
import pathlib

from kmem.base.sizes import parse_size

# What matplotlib draws without a program besides.
_PICTURES = (".png", ".svg", ".pdf")


class WrongFileError(ValueError):
    """A file is there, but is not what the command reads: as an argument that
    is wrong, but seen only when it is read."""


def positive(text: str) -> int:
    """How many."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(
            f"must be a positive integer. Received: {text}"
        )
    return int(text)


def seed(text: str) -> int:
    """What random numbers begin with."""
    if not (text.isdecimal() and int(text) < 2**64):
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to 2**64 - 1. Received: {text}"
        )
    return int(text)


def existing_file(text: str) -> pathlib.Path:
    """What is read."""
    path = pathlib.Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"must be a file that exists. Received: {text}"
        )
    return path


def output_file(text: str) -> pathlib.Path:
    """What is written to."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists. Received: {text}"
        )
    return path


def picture_file(text: str) -> pathlib.Path:
    """What is drawn to."""
    path = output_file(text)
    if path.suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(
            f"must end in one of {', '.join(_PICTURES)}. Received: {text}"
        )
    return path


def share_or_size(text: str) -> float | int:
    """Bytes as everywhere; a plain number is a share of a peak."""
    with contextlib.suppress(ValueError):
        return parse_size(text)
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(
        "must be a size such as 500MB, 2GB or 2GiB, or a share above 0 and at "
        f"most 1. Received: {text}"
    )
