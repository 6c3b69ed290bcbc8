"""Each everyday use of Keras under each option: equal, or refused clearly."""

import functools
import pathlib
import tempfile

import numpy as np
import pytest
from reference import log_error
from reference import relative_error
from uses import USES
from uses import expected
from uses import harness
from uses import page


@functools.cache
def plain(use, precision, classifies):
    """What Keras alone makes of a use, in the precision of an option."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        if precision == "float32":
            alone = harness.in_32_bits(functools.partial(USES[use]))
            return harness.run(alone, None, path, classifies)
        return harness.run(USES[use], None, path, classifies)


def cell(number, use, option):
    """One of the table, with the stage of CI at which it is tried.

    Each use is tried at every run under two options, the next use under the
    next ones, and under two others by the slow tests. What is left is tried
    before a release, and so is `memory_budget`, which takes its time.
    """
    often = [name for name in harness.OPTIONS if name != "memory_budget"]
    marks = [pytest.mark.exhaustive]
    if option in often:
        turn = (often.index(option) - number) % len(often)
        # Only the optimizer is another.
        quick, slow = (1, 1) if use.startswith("optimizer_") else (2, 4)
        marks = [] if turn < quick else [pytest.mark.slow] * (turn < slow)
        marks = marks or [pytest.mark.exhaustive] * (turn >= slow)
    return pytest.param(use, option, marks=marks, id=f"{use}-{option}")


CELLS = [
    cell(number, use, option)
    for number, use in enumerate(USES)
    for option in harness.OPTIONS
]


@pytest.mark.parametrize(("use", "option"), CELLS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_use_is_as_in_keras_or_refused(use, option, tmp_path):
    classifies = option == "chunked_loss"
    refused = expected.REFUSED.get((use, option))
    if refused is not None:
        with pytest.raises(ValueError) as info:
            harness.run(USES[use], option, tmp_path, classifies)
        assert refused in str(info.value)
        return
    got = harness.run(USES[use], option, tmp_path, classifies)
    precision = "float32" if option == "mixed_precision" else "float64"
    want = plain(use, precision, classifies)
    if (use, option) in expected.DIFFERS:
        assert relative_error(got.state, want.state) > harness.ROUNDING
        assert all(np.isfinite(array).all() for array in got.state)
        return
    check(got, want, option, getattr(USES[use], "precision", precision))


def check(got, want, option, precision):
    assert got.logs.keys() == want.logs.keys()
    if option == "mixed_precision":
        assert all(np.isfinite(array).all() for array in got.state)
        if want.logs:
            loss = {"loss": got.logs["loss"]}, {"loss": want.logs["loss"]}
            assert log_error(*loss) < harness.HALF_ROUNDING
        return
    rounding = harness.ROUNDING if precision == "float64" else 1e-4
    assert relative_error(got.state, want.state) < rounding
    # Keras weighs the losses of several outputs by the size of a batch where
    # it knows that: when it runs eagerly, as it does under `dtr`. With
    # accumulation the batches are others.
    counts = {
        "dtr": lambda name: not name.endswith("_loss"),
        "gradient_accumulation_steps": lambda name: False,
    }.get(option, lambda name: True)
    names = [name for name in want.logs if counts(name)]
    if names:
        pair = [{n: logs[n] for n in names} for logs in (got.logs, want.logs)]
        assert log_error(*pair) < harness.LOG_ROUNDING


def test_each_exception_is_of_a_use_and_an_option():
    for use, option in [*expected.REFUSED, *expected.DIFFERS]:
        assert use in USES and option in harness.OPTIONS
    assert not expected.REFUSED.keys() & expected.DIFFERS.keys()


def test_the_page_of_the_documentation_is_of_this_table():
    assert page.PATH.read_text(encoding="utf-8") == page.text(), (
        "write it anew: PYTHONPATH=tests python -m uses.page"
    )
