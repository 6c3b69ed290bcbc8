"""What was found out is found again: by later calls, and later processes."""

import gc
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.base.store import Store
from kmem.budget import planner

KEY = "a model", 64, "auto"


def save(thing, path):
    path.write_text(json.dumps(thing))


def new_store():
    """As another process has it."""
    return Store("things", save, lambda path: json.loads(path.read_text()))


def test_what_one_process_kept_another_finds():
    store = new_store()
    store.keep(KEY, 1000, ["a thing"])

    assert list(new_store().find(KEY)) == [(1000, ["a thing"])]
    assert not list(new_store().find((*KEY[:2], 0.5)))
    assert store.folder().stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_is_as_none():
    store = new_store()
    store.keep(KEY, 1000, ["a thing"])
    (path,) = store.folder().glob("*.json")
    path.write_bytes(path.read_bytes()[:-2])

    assert not list(new_store().find(KEY))


def test_a_folder_that_cannot_be_written_to_does_no_harm(tmp_path):
    (tmp_path / "kmem").write_text("not a folder")
    store = new_store()

    store.keep(KEY, 1000, ["a thing"])

    assert next(store.find(KEY)) == (1000, ["a thing"])


@pytest.mark.parametrize("shared", ["kmem", "kmem/things"])
def test_what_others_could_have_written_is_not_read(tmp_path, shared):
    store = new_store()
    store.keep(KEY, 1000, ["a thing"])
    (tmp_path / shared).chmod(0o770)

    other = new_store()
    assert not list(other.find(KEY))
    other.keep(KEY, 2000, ["another thing"])
    assert len(list(store.folder().iterdir())) == 1


def test_what_has_an_address_is_kept_in_this_process_only():
    store = new_store()

    store.keep((object(),), 1000, ["a thing"])

    assert not store.folder().exists()


def make(kernel_size=3, trained=True):
    inputs = keras.Input((8, 4))
    x = layers.Conv1D(4, kernel_size, padding="same")(inputs)
    x = layers.Dropout(0.5)(x, training=trained)
    for _ in range(6):
        x = layers.Dense(4, "relu")(x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile("sgd", "mse")
    return model


def test_a_model_is_measured_and_planned_for_once(monkeypatch):
    x = np.zeros((4096, 8, 4), "float32")
    gc.collect()
    first = kmem.plan(make(), (x, x))
    monkeypatch.setattr(planner, "_learned", {})
    planner._plans._kept.clear()

    def measure(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(planner.profiling, "measure", measure)

    assert kmem.plan(make(), (x, x)) == first
    # Of the same sizes, but not of the same costs.
    for other in ({"kernel_size": 5}, {"trained": False}):
        with pytest.raises(AssertionError, match="measured again"):
            kmem.plan(make(**other), (x, x))
    # What is in memory is part of the peak.
    ballast = tf.zeros([first.predicted_peak_bytes // 40])
    with pytest.raises(AssertionError, match="measured again"):
        kmem.plan(make(), (x, x))
    del ballast
