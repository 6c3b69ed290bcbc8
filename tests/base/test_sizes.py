import copy
import json
import pickle
from fractions import Fraction

import numpy as np
import pytest

from kmem.base.checks import budget
from kmem.base.sizes import format_size
from kmem.base.sizes import parse_size


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
        ("9007199254740993B", 2**53 + 1),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_bytes_in_powers_of_ten_or_two(size, num_bytes):
    assert parse_size(size) == num_bytes


@pytest.mark.parametrize(
    "size",
    ["5 GBs", "GB", "", "-1GB", "0MB", "1e3MB", "nanGB", "5", 0, -1, 1.5, True]
    + [float("nan"), float("inf"), None, [5], b"5GB", np.True_, np.float64(5)]
    + [2**63, 2**64 + 5, 10**400, "1e400GB", "9" * 400 + "GB", "10000000TB"],
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
        (999_994, "999.99 KB"),
        (999_999, "1.00 MB"),
        (-999_999_999, "-1.00 GB"),
        (2.5e9, "2.50 GB"),
        (7e15, "7000.00 TB"),
        (float("inf"), "inf"),
    ],
)
def test_bytes_are_written_for_people(num_bytes, text):
    assert format_size(num_bytes) == text


@pytest.mark.parametrize(
    "size",
    [2**64, 10**400, Fraction(10**400, 3), True, 0.0, -0.5, 1.5]
    + [float("nan"), float("inf"), np.float32("nan"), "0.5"],
)
def test_a_budget_is_a_size_or_a_share(size):
    with pytest.raises(ValueError, match="Received: memory_budget="):
        budget(size, "memory_budget")


def test_a_size_is_repeated_as_it_was_written():
    size = parse_size(" 1.5 gb ")
    assert (size, repr(size), str(size)) == (
        15 * 10**8,
        "' 1.5 gb '",
        "1500000000",
    )
    for same in (
        copy.deepcopy(size),
        pickle.loads(pickle.dumps(size)),
        parse_size(size),
    ):
        assert (same, repr(same)) == (size, repr(size))
    assert json.dumps([size]) == "[1500000000]"
    assert repr(size + 0) == "1500000000"


def test_numbers_of_numpy_are_numbers():
    assert budget(np.int64(5), "memory_budget") == 5
    assert budget(np.float32(0.5), "memory_budget") == 0.5
