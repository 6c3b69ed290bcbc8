"""Processes that train in shards train like one process.

In float64, where nothing but the order of sums differs. Batches have 17 rows
and the last one a single row: slices are uneven, and the last batch has fewer
rows than there are processes.
"""

import functools

import cases
import pytest
import sharded
from sharding_cases import SHARDED

import kmem

STAGES = ("full", "gradients", "optimizer")
FEW = (*SHARDED, "masked_regularized")


def _runs():
    """`{key: (case, options)}`, what two processes run in every test run."""
    runs = {
        f"plain {stage}": ("plain", {"sharding": stage}) for stage in STAGES
    }
    for case in FEW:
        runs.setdefault(f"{case} full", (case, {"sharding": "full"}))
    # Groups of two batches of 9 rows are batches of 18.
    groups = {"gradient_accumulation_steps": 2, "batch_size": 9, "whole": 18}
    local = {"sharding": kmem.Sharding(accumulate="local")}
    runs |= {
        "microbatches": (
            "several_outputs",
            {"sharding": "full", "microbatches": 3},
        ),
        "validation": (
            "plain",
            {"sharding": "full", "both": {"validation_split": 0.3}},
        ),
        "accumulation": ("several_outputs", groups | {"sharding": "full"}),
        "local accumulation": ("several_outputs", groups | local),
    }
    return runs


TWO = _runs()
REFUSED = ("constraints", "lamb", "adafactor", "muon", "schedule_free")


def train_together(runs, size):
    """The largest errors of any process, `{key: (weights, logs)}`."""
    main = functools.partial(sharded.main, runs)
    results = kmem.distributed.launch(main, size)
    return {
        key: tuple(map(max, zip(*[r[key] for r in results], strict=True)))
        for key in runs
    }


@pytest.fixture(scope="module")
def two():
    return train_together(TWO, 2)


@pytest.mark.parametrize("key", TWO)
def test_two_processes_train_like_one(two, key):
    weights_error, logs_error = two[key]

    assert weights_error < 1e-11
    # Those of small batches are another mean, where a loss is a sum.
    assert logs_error < 1e-11 or "accumulation" in key


@pytest.fixture(scope="module")
def seen():
    return kmem.distributed.launch(sharded.observe, 2)


def test_training_begins_with_what_process_0_has(seen):
    assert max(result["first weights"] for result in seen) < 1e-11


def test_all_processes_shuffle_alike(seen):
    first, second = (result["shuffled"] for result in seen)

    assert first == second


def test_processes_draw_different_random_numbers_in_training_only(seen):
    (first, after, error), (second, other_after, other_error) = (
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
    for result in seen:
        want, found = result["statistics"]
        assert found == pytest.approx(want, rel=1e-9)


def test_every_process_predicts_all_rows(seen):
    assert {n for result in seen for n in result["rows"]} == {cases.NUM_ROWS}


# Two processes together send what each keeps, or gives away, of the weights.
PARAMETER_BYTES = 4 * sharded.DEPTH * sharded.WIDTH**2


@pytest.mark.parametrize(
    "kind, kept, sent",
    [("full", 1.5, 3), ("gradients", 1.5, 2), ("optimizer", 2.5, 2)],
)
def test_a_process_keeps_its_share_and_sends_what_it_must(
    seen, kind, kept, sent
):
    for result in seen:
        current, _, wire = result[f"bytes {kind}"]
        assert current / PARAMETER_BYTES == pytest.approx(kept, rel=0.02)
        assert wire / 3 / PARAMETER_BYTES == pytest.approx(sent, rel=0.03)


def test_half_the_bytes_travel_in_bfloat16(seen):
    for result in seen:
        _, _, wire = result["bytes bfloat16"]
        assert wire / 3 / PARAMETER_BYTES == pytest.approx(1.5, rel=0.05)


def test_a_layer_s_weights_are_forgotten_after_it(seen):
    for result in seen:
        current, full, _ = result["bytes full"]
        _, gradients, _ = result["bytes gradients"]
        largest = PARAMETER_BYTES / sharded.DEPTH
        assert full - current < 5 * largest
        assert full < gradients


def test_a_model_is_built_in_shards(seen):
    for result in seen:
        current, peak, (losses, want) = result["scope"]
        largest = PARAMETER_BYTES / sharded.DEPTH
        assert current == pytest.approx(PARAMETER_BYTES / 2, rel=0.05)
        assert peak < PARAMETER_BYTES / 2 + 3 * largest
        assert losses == pytest.approx(want, rel=1e-5)


def test_processes_with_different_data_are_told_so():
    with pytest.raises(kmem.distributed.RankFailed, match="the same batches"):
        kmem.distributed.launch(sharded.train_on_other_data, 2)


def test_offloaded_shards_are_updated_where_they_are():
    ((updates, kept, after, error),) = kmem.distributed.launch(
        sharded.offload, 1
    )

    assert {device[-5:] for device in (*updates, *kept)} == {"CPU:0"}
    assert {device[-5:] for device in after} == {"CPU:1"}
    assert error < 1e-12


@pytest.mark.slow
def test_reading_a_shard_in_one_process_ends_with_an_error(monkeypatch):
    monkeypatch.setenv("KMEM_TIMEOUT_SECONDS", "5")

    with pytest.raises(
        kmem.distributed.RankFailed, match="read by all processes together"
    ):
        kmem.distributed.launch(sharded.read_alone, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_number_of_processes_trains_like_one(size):
    runs = {
        f"{case} {stage}": (case, {"sharding": stage})
        for stage in STAGES
        for case in cases.ALL | SHARDED
        if case not in REFUSED
    }

    errors = train_together(runs, size)

    wrong = {key: found for key, found in errors.items() if max(found) > 1e-10}
    assert wrong == {}
