"""Processes that train in shards train like one process.

In float64, where nothing but the order of sums differs. Batches have 17 rows
and the last one a single row: slices are uneven, and the last batch has fewer
rows than there are processes. Each process begins with other weights: those of
process 0 count.
"""

import functools

import cases
import numpy as np
import pytest
import sharded
import sharded_multilevel
from reference import log_error
from reference import relative_error
from sharding_cases import SHARDED
from versions import IS_KERAS_3_12

import kmem

STAGES = ("full", "gradients", "optimizer")
REFUSED = ("constraints", "lamb", "adafactor", "muon", "schedule_free")
ALLOWED = [case for case in cases.ALL | SHARDED if case not in REFUSED]
# Groups of two batches of 9 rows are batches of 18.
GROUPS = {"gradient_accumulation_steps": 2, "batch_size": 9, "whole": 18}
LOCAL = kmem.Sharding(accumulate="local")
# `{key: (case, options)}`: what two processes run in every test run.
TWO = {
    # Of 52 rows, 35 are trained on: batches of 17, 17 and 1.
    f"plain {stage}": (
        "plain",
        {"sharding": stage, "both": {"validation_split": 0.31}},
    )
    for stage in ("gradients", "optimizer")
} | {
    "everything": ("everything", {"sharding": "full"}),
    "own gradients": (
        "own_gradients",
        {"sharding": kmem.Sharding(units=("again",))},
    ),
    "whole weights": ("wide", {"sharding": "full"}),
    "whole lookup": ("wide_lookup", {"sharding": "full"}),
    "microbatches": (
        "masked_regularized",
        {"sharding": "full", "microbatches": 3},
    ),
    "accumulation": ("masked_regularized", GROUPS | {"sharding": LOCAL}),
    "chunks": (
        "words",
        dict(sharding="full", chunked_loss=True, chunked_attention=True),
    ),
}


def errors(runs, results, plain):
    """The largest of any process, `{key: (of the weights, of the logs)}`.

    Args:
        runs: What the processes ran.
        results: What `sharded.main` gave in each.
        plain: Plain trainings, which those in the results are added to.
    """
    for own, _ in results:
        plain.update(own)
    found = {}
    for key, run in runs.items():
        weights, logs = plain[sharded.plain_key(*run)]
        states = [trained[key] for _, trained in results]
        found[key] = (
            max(relative_error(got, weights) for got, _ in states),
            max(log_error(got, logs) for _, got in states),
        )
    return found


@pytest.fixture(scope="module")
def both():
    """What two processes see and come to: they start once for all of it."""
    main = functools.partial(sharded_multilevel.seen_and_trained, TWO)
    return list(zip(*kmem.distributed.launch(main, 2), strict=True))


@pytest.fixture(scope="module")
def two(both):
    return errors(TWO, both[1], {})


@pytest.mark.parametrize("key", TWO)
def test_two_processes_train_like_one(two, key):
    weights_error, logs_error = two[key]
    if TWO[key][0] == "masked_regularized" and IS_KERAS_3_12:
        # It divides by the number of examples plus 1e-7, in each part.
        assert weights_error < 1e-7
        return

    assert weights_error < 1e-11
    # Those of small batches are another mean, where a loss is a sum.
    assert logs_error < 1e-11 or "accumulation" in key


@pytest.fixture(scope="module")
def seen(both):
    return both[0]


@pytest.mark.exhaustive
def test_programs_of_two_levels_train_like_in_one_process():
    for found in kmem.distributed.launch(sharded_multilevel.main, 2):
        for name, (weights_error, logs_error) in found.items():
            in_32_bits = name == "optimizer"
            assert weights_error < (1e-6 if in_32_bits else 1e-11), name
            assert logs_error < 1e-6, name


def test_a_program_in_shards_gathers_its_weights_by_layers(seen):
    for result in seen:
        (_, alone, _, logs), *stages = result["programs"]
        # Shards of the weights and of what Adam keeps.
        kept, peaks, sent, found = zip(*stages, strict=True)
        assert max(kept) < 3 / 2 + 0.1
        # Whole weights, and later as much of gradients, are not there.
        assert peaks[1] < peaks[0] - 0.8 < alone - 0.8
        # Two gradients, each with a gathering; a product gathers its vector,
        # and adds up the gradient that it is of. The weights, and vectors, are
        # gathered again for each backward pass.
        assert sent == pytest.approx([2 + 2 + 3, 3 + 3 + 7], rel=0.02)
        for each in found:
            for key in logs:
                np.testing.assert_allclose(each[key], logs[key], 1e-5)


def test_all_processes_shuffle_alike(seen):
    (_, first), (_, second) = (result["predicted"] for result in seen)

    assert first == second


def test_processes_draw_different_random_numbers_in_training_only(seen):
    (first, after, error, _), (second, other_after, other_error, _) = (
        result["dropout"] for result in seen
    )

    assert len(first) == 2
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert after == other_after
    # A recomputation draws what the forward pass drew.
    assert max(error, other_error) < 1e-11


def test_an_overflow_in_one_process_skips_the_update_of_all(seen):
    assert [result["overflow"] for result in seen] == [[0, 0]] * 2


def test_statistics_are_the_mean_over_all_rows(seen):
    x, want = cases.regression()["x"], np.zeros(5)
    for start in 2 * [*range(0, cases.NUM_ROWS, sharded.BATCH_SIZE)]:
        rows = x[start : start + sharded.BATCH_SIZE]
        want = 0.99 * want + 0.01 * np.mean(rows, axis=0)
    for result in seen:
        # Also where a layer runs twice.
        np.testing.assert_allclose(result["dropout"][-1], want, atol=1e-7)


def test_every_process_predicts_all_rows(seen):
    rows = [n for result in seen for n in result["predicted"][0]]
    assert set(rows) == {cases.NUM_ROWS}


# Two processes together send what each keeps, or gives away, of the weights.
PARAMETER_BYTES = 4 * sharded.DEPTH * sharded.WIDTH**2


@pytest.mark.parametrize(
    "kind, kept, sent",
    [("full", 1.5, 3), ("gradients", 1.5, 2), ("optimizer", 2, 2)],
)
def test_a_process_keeps_its_share_and_sends_what_it_must(
    seen, kind, kept, sent
):
    for result in seen:
        current, _, wire = result[f"bytes {kind}"]
        assert current / PARAMETER_BYTES == pytest.approx(kept, rel=0.02)
        assert wire / 3 / PARAMETER_BYTES == pytest.approx(sent, rel=0.03)


def test_collectives_leave_no_threads_behind(seen):
    # As TensorFlow's own timeouts do, one each.
    assert max(result["threads"] for result in seen) < 100


def test_half_the_bytes_travel_in_bfloat16(seen):
    for result in seen:
        _, _, wire = result["bytes bfloat16"]
        assert wire / 3 / PARAMETER_BYTES == pytest.approx(1.5, rel=0.05)


def test_a_plan_s_segments_gather_once_more(seen):
    for result in seen:
        _, _, wire = result["bytes planned"]
        assert wire / 3 / PARAMETER_BYTES == pytest.approx(3, rel=0.03)


def test_tensors_are_given_up_in_every_process(seen):
    for result in seen:
        error, num_evictions = result["dtr"]
        assert error == 0
        assert num_evictions > 0


def check_budgeted(found):
    (chosen, *_), (other, *_) = found
    assert chosen == other
    assert "microbatches" in chosen or "remat" in chosen
    for _, error, excess, events in found:
        assert error < 1e-11
        assert excess <= 0
        assert not events


def test_all_processes_choose_the_same_within_a_budget(seen):
    check_budgeted([result["budget"] for result in seen])


@pytest.mark.exhaustive
def test_processes_choose_a_stage_where_that_is_allowed():
    main = functools.partial(sharded.budgeted, allow=("sharding",))
    found = kmem.distributed.launch(main, 2)

    check_budgeted(found)
    assert all("sharding=" in chosen for chosen, *_ in found)


def test_a_layer_s_weights_are_forgotten_after_it(seen):
    for result in seen:
        current, full, _ = result["bytes full"]
        _, gradients, _ = result["bytes gradients"]
        largest = PARAMETER_BYTES / sharded.DEPTH
        # Gathered weights, a gradient, and what of it has come from others.
        assert full - current < 5 * largest
        assert full < gradients


def test_a_model_is_built_in_shards(seen):
    for result in seen:
        current, peak, (losses, want) = result["scope"]
        largest = PARAMETER_BYTES / sharded.DEPTH
        assert current == pytest.approx(PARAMETER_BYTES / 2, rel=0.05)
        assert peak < PARAMETER_BYTES / 2 + 3 * largest
        assert losses == pytest.approx(want, rel=1e-5)


def test_processes_with_different_data_are_told_so(seen):
    assert any("given the same batches" in result["refused"] for result in seen)


@pytest.mark.slow
def test_reading_a_shard_in_one_process_ends_with_an_error(monkeypatch):
    monkeypatch.setenv("KMEM_TIMEOUT_SECONDS", "5")

    with pytest.raises(
        kmem.distributed.RankFailed, match="read by all processes together"
    ):
        kmem.distributed.launch(sharded.read_alone, 2)


@pytest.fixture(scope="module")
def plain():
    """What all numbers of processes are compared with, once it is there."""
    return {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_processes_trains_like_one(size, stage, plain):
    runs = {case: (case, {"sharding": stage}) for case in ALLOWED}
    runs["planned"] = ("plain", {"sharding": "full", "remat": "auto"})
    runs["microbatches"] = (
        "several_outputs",
        {"sharding": stage, "microbatches": 3},
    )
    runs["accumulation"] = ("several_outputs", GROUPS | {"sharding": stage})
    main = functools.partial(sharded.main, runs, set(plain))

    found = errors(runs, kmem.distributed.launch(main, size), plain)

    # Logs of small batches are another mean, where a loss is a sum.
    found["accumulation"] = found["accumulation"][:1]
    wrong = {key: each for key, each in found.items() if max(each) > 1e-10}
    assert wrong == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_losses_in_float32_are_those_of_one_process(size, plain):
    options = {"sharding": "full", "both": {"precision": "float32"}}
    runs = {case: (case, options) for case in ALLOWED}
    main = functools.partial(sharded.main, runs, set(plain))

    found = errors(runs, kmem.distributed.launch(main, size), plain)

    wrong = {key: logs for key, (_, logs) in found.items() if logs > 1e-6}
    assert wrong == {}
