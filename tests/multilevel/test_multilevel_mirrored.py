"""Two replicas train a program as one device does."""

import json
import pathlib
import subprocess
import sys

import mirrored_multilevel
import pytest

SCRIPT = pathlib.Path(mirrored_multilevel.__file__)


@pytest.fixture(scope="module")
def results():
    process = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["Identity", "ConjugateGradient"])
def test_two_replicas_train_a_program_like_one_device(results, name):
    weights_error, logs_error = results[name]

    assert weights_error < 1e-9
    assert logs_error < 1e-6  # Keras's metrics are of float32.


def test_replicas_draw_random_numbers_of_their_own(results):
    assert results["finite"]
