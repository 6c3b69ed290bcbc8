"""What the fields of options may hold: checks that name the field, and say
what was received. And whether the packages of an extra are there.
"""

import importlib.util
import math
import numbers
from collections.abc import Iterable

from kmem.base.sizes import parse_size


def set_fields(option, **fields) -> None:
    """Replaces fields of a frozen dataclass while it is being made."""
    for name, value in fields.items():
        object.__setattr__(option, name, value)


def must_be(is_right: bool, value, name: str, kind: str) -> None:
    """Raises a `ValueError` that says what is wrong with an argument."""
    if not is_right:
        raise ValueError(f"`{name}` must be {kind}. Received: {name}={value!r}")


def is_integer(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value, least: float = -math.inf, most: float = math.inf) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and least <= float(value) <= most
    except OverflowError:  # An integer beyond all floats.
        return False


def positive_int(value, name: str) -> int:
    # TensorFlow counts in 32 bits in places.
    is_right = is_integer(value) and 0 < value < 2**31
    must_be(is_right, value, name, "a positive integer, below 2**31")
    return int(value)


def non_negative_int(value, name: str) -> None:
    is_right = is_integer(value) and value >= 0
    must_be(is_right, value, name, "a non-negative integer")


def positive(value, name: str) -> None:
    must_be(is_real(value) and value > 0, value, name, "a positive number")


def non_negative(value, name: str) -> None:
    must_be(is_real(value, 0.0), value, name, "a non-negative number")


def one_of(value, name: str, choices: tuple) -> None:
    listed = ", ".join(repr(choice) for choice in choices)
    must_be(value in choices, value, name, f"one of {listed}")


def classes(value, name: str) -> tuple[type, ...]:
    is_sequence = isinstance(value, list | tuple) and len(value) > 0
    is_right = is_sequence and all(isinstance(each, type) for each in value)
    kind = "a sequence of classes of layers, as in (Residual,)"
    must_be(is_right, value, name, f'"layers", None, or {kind}')
    return tuple(value)


def names(value, name: str) -> tuple[str, ...]:
    are_many = isinstance(value, Iterable) and not isinstance(value, str)
    listed = tuple(value) if are_many else ()
    is_right = are_many and all(isinstance(each, str) for each in listed)
    must_be(is_right, value, name, "a sequence of names, as in ('stem',)")
    return listed


def budget(value, name: str) -> int | float:
    """Bytes, or a share in (0, 1] which stays a float."""
    if is_real(value) and not is_integer(value):
        if not 0 < value <= 1:
            raise ValueError(
                f"`{name}` as a float is a share and must be in (0, 1]. "
                f'Give bytes as an integer or as "2GB". '
                f"Received: {name}={value!r}"
            )
        return float(value)
    return parse_size(value, name)


def require(subject: str, extra: str, *packages: str) -> None:
    """Raises an `ImportError` that says which packages of an extra to install
    if they are missing."""
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        names = " and ".join(missing).replace("sklearn", "scikit-learn")
        raise ImportError(
            f'{subject} needs {names}: pip install "kmem[{extra}]"'
        )
