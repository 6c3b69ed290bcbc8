import numpy as np
import pytest

from kmem.units import format_size
from kmem.units import parse_size


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (1, 1),
        (np.int64(500), 500),
        ("7B", 7),
        ("500MB", 500 * 10**6),
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        (" 1.5 gb ", 1_500_000_000),
        (".5KiB", 512),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_are_bytes_in_powers_of_ten_or_two(size, num_bytes):
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize(
    "size",
    ["5 GBs", "GB", "", "-1GB", "0MB", "1e3MB", "nanGB", "5", 0, -1, 1.5, True]
    + [float("nan"), None, [5], b"5GB"],
)
def test_anything_else_is_refused_with_its_value(size):
    with pytest.raises(ValueError, match="positive number of bytes") as error:
        parse_size(size, "budget")

    assert str(error.value).endswith(f"Received: budget={size!r}")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.50 KB"),
        (2.5e9, "2.50 GB"),
        (7e15, "7000.00 TB"),
        (float("inf"), "inf"),
    ],
)
def test_bytes_are_written_for_people(num_bytes, text):
    assert format_size(num_bytes) == text
