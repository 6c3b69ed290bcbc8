"""Two replicas train like one device, also where Keras's own do not.

Keras clips each replica's gradient by itself, takes the mean of the replicas'
means whatever they count, and looks for infinities in the first one only. The
reference is one device in all cases.
"""

import json
import pathlib
import subprocess
import sys

import mirrored
import pytest


@pytest.fixture(scope="module")
def results():
    script = pathlib.Path(mirrored.__file__)
    process = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", mirrored.CASES)
@pytest.mark.parametrize("option", mirrored.OPTIONS)
def test_two_replicas_train_like_one_device(results, option, name):
    weights_error, _ = results[f"{option} {name}"]

    assert weights_error < 1e-12


@pytest.mark.parametrize("option", mirrored.OPTIONS)
def test_logs_of_two_replicas_are_those_of_one_device(results, option):
    _, logs_error = results[f"{option} plain"]

    assert logs_error < 1e-12


@pytest.mark.parametrize("whose", ["Keras", "kmem"])
def test_an_overflow_in_one_replica_skips_the_update_of_all(results, whose):
    change, num_updates = results[f"overflow of {whose}'s scale"]

    assert (change, num_updates) == (0, 0)
