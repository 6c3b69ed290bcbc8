"""Two replicas train like one device, also where Keras's own do not.

Keras clips each replica's gradient by itself, takes the mean of the replicas'
means whatever they count, and looks for infinities in the first one only. The
reference is one device in all cases.
"""

import json

import mirrored
import pytest
from mirrored import CASES
from mirrored import OPTIONS


@pytest.fixture(scope="module")
def results(python):
    status, output, errors = python.run_script(mirrored.__file__)
    assert status == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    "case",
    [f"{option} {name}" for option in OPTIONS for name in CASES[option]],
)
def test_two_replicas_train_like_one_device(results, case):
    weights_error, _ = results[case]

    assert weights_error < 1e-12


@pytest.mark.parametrize("option", OPTIONS)
def test_logs_of_two_replicas_are_those_of_one_device(results, option):
    _, logs_error = results[f"{option} plain"]

    assert logs_error < 1e-12


def test_replicas_that_take_turns_leave_nothing_behind(results):
    assert results["left behind"] == [[[], 0.0]] * 2


def test_layers_that_synchronize_replicas_compute_in_16_bits(results):
    assert results["16 bits"][0] == "bfloat16"


@pytest.mark.parametrize("when", ["remat", "remat in scope"])
def test_a_plan_changes_nothing_on_two_replicas(results, when):
    assert max(results[when]) < 1e-12


def test_a_budget_is_kept_with_the_same_numbers_on_two_replicas(results):
    chosen, share, error = results["memory_budget"]

    assert chosen == "remat"
    assert share <= 1
    assert error < 1e-12


def test_what_replicas_cannot_do_is_refused(results):
    assert "`synchronized=False`" in results["refused"]


@pytest.mark.parametrize("whose", ["Keras", "kmem"])
def test_an_overflow_in_one_replica_skips_the_update_of_all(results, whose):
    change, num_updates = results[f"overflow of {whose}'s scale"]

    assert (change, num_updates) == (0, 0)
