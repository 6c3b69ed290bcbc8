"""Plans are found again: by later calls, and by later processes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem import plan_cache
from kmem import planner

KEY = "a model", 64, "auto"


@pytest.fixture
def plan():
    block = [layers.Dense(8, "relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((8,)), *block])
    return kmem.plan(model, tf.TensorSpec((64, 8)), costs="flops")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_cache, "_folder", lambda: tmp_path / "k" / "plans")
    forget(monkeypatch)
    return tmp_path / "k" / "plans"


def forget(monkeypatch):
    """As another process would."""
    monkeypatch.setattr(plan_cache, "_kept", {})


def test_another_process_finds_a_plan(plan, folder, monkeypatch):
    plan_cache.keep(KEY, 1000, plan)
    assert plan_cache.find(KEY, 1000) is plan
    forget(monkeypatch)

    assert plan_cache.find(KEY, 1000) == plan
    assert plan_cache.find((*KEY[:2], 0.5), 1000) is None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_plan_for_more_or_less_in_memory_is_not_found(plan, folder):
    plan_cache.keep(KEY, 10**6, plan)

    assert plan_cache.find(KEY, 10**6 + 64) is plan
    assert plan_cache.find(KEY, 10**7) is None
    assert plan_cache.find(KEY, 10**6 - plan.predicted_peak_bytes // 10) is None


def test_a_damaged_file_is_as_none(plan, folder, monkeypatch):
    plan_cache.keep(KEY, 1000, plan)
    (path,) = folder.glob("*.json")
    path.write_bytes(path.read_bytes()[:-100])
    forget(monkeypatch)

    assert plan_cache.find(KEY, 1000) is None


def test_a_folder_that_cannot_be_written_to_does_no_harm(plan, folder):
    folder.parent.write_text("not a folder")

    plan_cache.keep(KEY, 1000, plan)

    assert plan_cache.find(KEY, 1000) is plan


@pytest.mark.parametrize("shared", ["k", "k/plans"])
def test_what_others_could_have_written_is_not_read(
    plan, folder, tmp_path, monkeypatch, shared
):
    plan_cache.keep(KEY, 1000, plan)
    (tmp_path / shared).chmod(0o770)
    forget(monkeypatch)

    assert plan_cache.find(KEY, 1000) is None
    plan_cache.keep(KEY, 2000, plan)
    assert len(list(folder.iterdir())) == 1


def test_what_has_an_address_is_kept_in_this_process_only(plan, folder):
    plan_cache.keep((object(),), 1000, plan)

    assert not folder.exists()


def make(kernel_size=3, trained=True):
    inputs = keras.Input((8, 4))
    x = layers.Conv1D(4, kernel_size, padding="same")(inputs)
    x = layers.Dropout(0.5)(x, training=trained)
    for _ in range(6):
        x = layers.Dense(4, "relu")(x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile("sgd", "mse")
    return model


def test_a_model_is_measured_and_planned_for_once(folder, monkeypatch):
    x = np.zeros((4096, 8, 4), "float32")
    first = kmem.plan(make(), (x, x))
    monkeypatch.setattr(planner, "_learned", {})
    forget(monkeypatch)

    def measure(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(planner.profiling, "measure", measure)

    assert kmem.plan(make(), (x, x)) == first
    # Of the same sizes, but not of the same costs.
    for other in ({"kernel_size": 5}, {"trained": False}):
        with pytest.raises(AssertionError, match="measured again"):
            kmem.plan(make(**other), (x, x))
