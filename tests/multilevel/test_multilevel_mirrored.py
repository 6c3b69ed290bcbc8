"""Two replicas train a program as one device does."""

import json

import mirrored_multilevel
import pytest


@pytest.fixture(scope="module")
def results(python):
    status, output, errors = python.run_script(mirrored_multilevel.__file__)
    assert status == 0, errors[-3000:]
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", ["Identity", "ConjugateGradient"])
def test_two_replicas_train_a_program_like_one_device(results, name):
    weights_error, logs_error = results[name]

    assert weights_error < 1e-9
    assert logs_error < 1e-6  # Keras's metrics are of float32.


def test_replicas_draw_random_numbers_of_their_own(results):
    assert results["finite"]
