"""A batch in parts trains like the whole batch.

In float64 the two differ by rounding alone, so a wrong weight of a part shows
whatever its size; the tolerances are 1e-12 there and 1e-6 in float32.
"""

import cases
import pytest
from reference import log_error
from reference import relative_error
from reference import state
from reference import train
from reference import whole

PARTS = {"batch_size": 20, "microbatches": 3}


@pytest.mark.parametrize("name", cases.ALL)
def test_parts_train_like_the_whole_batch(name):
    case = cases.ALL[name]
    want, history = whole(case)
    model, logs = train(case, **PARTS)

    assert relative_error(state(model), want) < 1e-12
    assert log_error(logs, history) < 1e-12


@pytest.mark.parametrize("mode, name", cases.MODES)
def test_parts_train_like_the_whole_batch_in_every_mode(mode, name):
    case = cases.ALL[name]
    want, history = whole(case, mode=mode)
    model, logs = train(case, mode=mode, **PARTS)

    assert relative_error(state(model), want) < 1e-12
    assert log_error(logs, history) < 1e-12


@pytest.mark.parametrize("name", ["plain", "masked_sum_over_batch_size"])
def test_parts_train_like_the_whole_batch_in_float32(name):
    case = cases.ALL[name]
    want, history = whole(case, "float32")
    model, logs = train(case, "float32", **PARTS)

    assert relative_error(state(model), want) < 1e-6
    assert log_error(logs, history) < 1e-6


@pytest.mark.parametrize("count", [1, 2, 4, 7, 20])
def test_any_number_of_parts_gives_the_same_update(count):
    want, _ = whole(cases.plain)
    model, _ = train(cases.plain, batch_size=20, microbatches=count)

    assert relative_error(state(model), want) < 1e-12


def test_a_last_batch_with_fewer_rows_than_parts_counts_as_it_is():
    def case():
        model, arguments = cases.plain()
        arguments["x"] = arguments["x"][:43]
        arguments["y"] = arguments["y"][:43]
        return model, arguments

    want, history = whole(case)
    model, logs = train(case, batch_size=20, microbatches=8)

    assert relative_error(state(model), want) < 1e-12
    assert log_error(logs, history) < 1e-12


def test_several_steps_in_one_execution_give_the_same_updates():
    def case():
        return cases.dense(steps_per_execution=2), cases.regression()

    want, history = whole(case)
    model, logs = train(case, **PARTS)

    assert relative_error(state(model), want) < 1e-12
    assert log_error(logs, history) < 1e-12
