"""A batch in parts trains like the whole batch.

In float64 the two differ by rounding alone, so a wrong weight of a part shows
whatever its size; the tolerances are 1e-12 there and 1e-6 in float32.
"""

import cases
import pytest
from reference import log_error
from reference import relative_error
from reference import train

@pytest.mark.parametrize("name", cases.ALL)
def test_parts_train_like_the_whole_batch(name):
    whole, history = train(cases.ALL[name])
    parts, logs = train(cases.ALL[name], microbatches=3)

    assert relative_error(parts, whole) < 1e-12
    assert log_error(logs, history) < 1e-12


@pytest.mark.parametrize("name", cases.FEW)
@pytest.mark.parametrize("mode", cases.MODES)
def test_parts_train_like_the_whole_batch_in_every_mode(name, mode):
    whole, history = train(cases.ALL[name], compile_options=cases.MODES[mode])
    parts, logs = train(
        cases.ALL[name], compile_options=cases.MODES[mode], microbatches=3
    )

    assert relative_error(parts, whole) < 1e-12
    assert log_error(logs, history) < 1e-12


@pytest.mark.parametrize("name", ["plain", "masked_sum_over_batch_size"])
def test_parts_train_like_the_whole_batch_in_float32(name):
    whole, history = train(cases.ALL[name], "float32")
    parts, logs = train(cases.ALL[name], "float32", microbatches=3)

    assert relative_error(parts, whole) < 1e-6
    assert log_error(logs, history) < 1e-6


@pytest.mark.parametrize("count", [1, 2, 4, 7, 20])
def test_any_number_of_parts_gives_the_same_update(count):
    whole, _ = train(cases.plain)
    parts, _ = train(cases.plain, microbatches=count)

    assert relative_error(parts, whole) < 1e-12


def test_a_last_batch_with_fewer_rows_than_parts_counts_as_it_is():
    def case():
        model, arguments = cases.plain()
        arguments["x"] = arguments["x"][:43]
        arguments["y"] = arguments["y"][:43]
        return model, arguments

    whole, history = train(case)
    parts, logs = train(case, microbatches=8)

    assert relative_error(parts, whole) < 1e-12
    assert log_error(logs, history) < 1e-12


def test_several_steps_in_one_execution_give_the_same_updates():
    def case():
        return cases.dense(steps_per_execution=2), cases.regression()

    whole, history = train(case)
    parts, logs = train(case, microbatches=3)

    assert relative_error(parts, whole) < 1e-12
    assert log_error(logs, history) < 1e-12
