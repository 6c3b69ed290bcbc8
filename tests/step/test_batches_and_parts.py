"""Parts of a batch, and groups of batches, train like the one batch.

In float64 they differ from it by rounding alone, so a wrong weight of a part
shows whatever its size. Of 52 rows the last batch has 12: parts of uneven
sizes, or a group of 10 rows and 2.
"""

import cases
import pytest
from reference import ROUNDING
from reference import log_error
from reference import relative_error
from reference import state
from reference import train
from reference import whole

PARTS = {"batch_size": 20, "microbatches": 3}
GROUPS = {"batch_size": 10, "gradient_accumulation_steps": 2}
BOTH = GROUPS | {"microbatches": 2}
# An optimizer sees one gradient either way. At every run: those that look at
# more of it than an entry, and what Keras does around an update.
OPTIMIZERS = {"adamw", "ema", "global_clipnorm", "dynamic_loss_scale"}
OTHERS = cases.OPTIMIZERS.keys() - OPTIMIZERS


def each(names, at_every_run):
    """All of the names; some of them run in every test run."""
    return [
        pytest.param(
            name,
            marks=() if name in at_every_run else pytest.mark.exhaustive,
        )
        for name in names
    ]


OF_PARTS = each(cases.ALL, cases.ALL.keys() - OTHERS)
# Batches of a group are weighted like parts of a batch.
OF_GROUPS = each(
    sorted(cases.ALL.keys() - OTHERS),
    {*OPTIMIZERS, *cases.FEW, *(n for n in cases.ALL if "weight" in n)},
)


@pytest.mark.parametrize("name", OF_PARTS)
def test_parts_train_like_the_whole_batch(name):
    want, history = whole(cases.ALL[name])
    model, logs = train(cases.ALL[name], **PARTS)

    assert relative_error(state(model), want) < ROUNDING
    assert log_error(logs, history) < ROUNDING


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_of_batches_trains_like_one_batch(name):
    want, _ = whole(cases.ALL[name])
    model, _ = train(cases.ALL[name], **GROUPS)

    assert relative_error(state(model), want) < ROUNDING


@pytest.mark.parametrize("name", cases.FEW)
def test_parts_of_batches_in_groups_multiply(name):
    want, _ = whole(cases.ALL[name])
    model, _ = train(cases.ALL[name], **BOTH)

    assert relative_error(state(model), want) < ROUNDING


@pytest.mark.parametrize("options", [PARTS, GROUPS], ids=["parts", "groups"])
@pytest.mark.parametrize("mode, name", cases.MODES)
def test_they_train_like_it_in_every_mode(mode, name, options):
    want, history = whole(cases.ALL[name], mode=mode)
    model, logs = train(cases.ALL[name], mode=mode, **options)

    assert relative_error(state(model), want) < ROUNDING
    # A group's logs are those of its batches.
    assert options is GROUPS or log_error(logs, history) < ROUNDING


@pytest.mark.parametrize("options", [PARTS, GROUPS], ids=["parts", "groups"])
def test_they_train_like_it_in_float32(options):
    name = "masked_sum_over_batch_size"
    want, _ = whole(cases.ALL[name], "float32")
    model, _ = train(cases.ALL[name], "float32", **options)

    assert relative_error(state(model), want) < 1e-6


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


@pytest.mark.parametrize("options", [PARTS, GROUPS], ids=["parts", "groups"])
def test_several_steps_in_one_execution_give_the_same_updates(options):
    def case():
        return cases.dense(steps_per_execution=2), cases.regression()

    want, _ = whole(cases.plain)
    model, _ = train(case, **options)

    assert relative_error(state(model), want) < 1e-12
