"""KerasHub's models train under each option, and are equal to Keras alone."""

import functools
import pathlib
import tempfile

import pytest
import test_uses
from uses import harness

pytest.importorskip("keras_hub")

from uses import hub

# Why the numbers are others; docs/accumulation.md says so as well.
DIFFERS = {
    # Batch normalization.
    ("resnet", "microbatches"),
    ("resnet", "gradient_accumulation_steps"),
}


@functools.cache
def plain(use):
    with tempfile.TemporaryDirectory() as folder:
        return harness.run(hub.USES[use], None, pathlib.Path(folder))


def cell(number, use, option):
    """Each model under one option is slow, under the others exhaustive."""
    first = list(harness.OPTIONS)[1 + number]
    mark = pytest.mark.slow if option == first else pytest.mark.exhaustive
    return pytest.param(use, option, marks=mark, id=f"{use}-{option}")


CELLS = [
    cell(number, use, option)
    for number, use in enumerate(hub.USES)
    for option in harness.OPTIONS
    if (use, option) not in DIFFERS
]


@pytest.mark.parametrize(("use", "option"), CELLS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_of_keras_hub_is_as_in_keras(use, option, tmp_path):
    got = harness.run(hub.USES[use], option, tmp_path)
    test_uses.check(got, plain(use), option, "float32")
