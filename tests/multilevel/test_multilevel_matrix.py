"""Every hypergradient, for kinds of layers and memory options, is that of
differences of first derivatives."""

import pytest
from multilevel_matrix import LAYERS
from multilevel_matrix import OPTIONS
from multilevel_matrix import errors
from multilevel_matrix import rounding

# Where it has been wrong, or would be first: what has a state, in parts and run
# again, and what is normalized.
SOME = [
    ("batch_norm", "microbatches"),
    ("dropout", "both"),
    ("attention", "plain"),
]
# Off by the curvature within their step, too.
ESTIMATES = {"FiniteDifference": 1e-3, "SAMA": 1e-3}


def check(kind, option):
    # Of 16 bits the rounding, of 64 what differences leave of them.
    most = 1e-7
    if option == "bfloat16":
        most = max(0.03, 2 * rounding(kind))
    wrong = {
        name: error
        for name, error in errors(kind, option).items()
        if not error < max(most, ESTIMATES.get(name, 0))
    }
    assert not wrong


@pytest.mark.parametrize("kind, option", SOME)
def test_hypergradients_are_those_of_differences(kind, option):
    check(kind, option)


# Dropout in 16 bits draws other masks than in 64.
ALL = [
    (kind, option)
    for kind in LAYERS
    for option in OPTIONS
    if (kind, option) != ("dropout", "bfloat16")
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, option", ALL)
def test_hypergradients_of_the_whole_matrix_are_those_of_differences(
    kind, option
):
    check(kind, option)
