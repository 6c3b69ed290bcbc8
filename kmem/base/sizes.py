"""Sizes as people write them, and bytes.

Powers of ten for KB, MB, GB, TB; powers of two for KiB, MiB, GiB, TiB. What
this module does not do: shares of a device (0.5), which need the device.
"""

import fractions
import math
import numbers
import re

# TensorFlow and the native library count bytes in 64 bits, with a sign.
_TOO_MANY = 2**63
_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}IB": 1024**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


class Size(int):
    """Bytes that were written as text, which messages repeat."""

    def __new__(cls, num_bytes: int, written: str):
        size = super().__new__(cls, num_bytes)
        size.written = written
        return size

    def __getnewargs__(self):
        return int(self), self.written

    def __repr__(self) -> str:
        return repr(self.written)

    def __str__(self) -> str:
        return int.__repr__(self)


def parse_size(size: int | str, name: str = "size") -> int:
    """Returns the bytes that `size` stands for.

    Args:
        size: A positive integer (bytes), or a string such as `"500MB"`,
            `"5GB"` (powers of ten) or `"5GiB"` (powers of two).
        name: What to call the argument in an error message.

    Returns:
        Bytes, a positive `int`. Its `repr` is that of `size`.

    Raises:
        ValueError: If `size` is not a positive number of bytes, is more than
            a device can count, or has a unit that is not known.
    """
    rule = (
        f"`{name}` must be a positive number of bytes below 2**63, such as "
        f'500000000, "500MB", "5GB" or "5GiB". Received: {name}={size!r}'
    )
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(rule)
        try:
            num_bytes = round(fractions.Fraction(match[1]) * unit)
        except ValueError as error:  # Python reads so many digits only.
            raise ValueError(rule) from error
    elif isinstance(size, Size):
        return size
    elif isinstance(size, numbers.Integral) and not isinstance(size, bool):
        num_bytes = int(size)
    else:
        raise ValueError(rule)
    if not 0 < num_bytes < _TOO_MANY:
        raise ValueError(rule)
    return Size(num_bytes, size) if isinstance(size, str) else num_bytes


def format_size(num_bytes: float) -> str:
    """Writes bytes for people, in powers of ten: `format_size(2.5e9)` is
    `"2.50 GB"`."""
    if not math.isfinite(num_bytes):
        return str(num_bytes)
    unit, *larger = ("B", "KB", "MB", "GB", "TB")
    # Rounded to 1000.00 of one unit, it is 1.00 of the next.
    while larger and abs(num_bytes) >= (999.5 if unit == "B" else 999.995):
        num_bytes /= 1000
        unit, *larger = larger
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
