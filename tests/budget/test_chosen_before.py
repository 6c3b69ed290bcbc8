"""What `memory_budget` chose is kept on disk, and tried before it is used."""

import gc
import json

import keras
import numpy as np
import pytest
from keras import layers

import kmem
from kmem.base import cache
from kmem.budget.report import describe

pytestmark = pytest.mark.usefixtures("native_library")

_ROWS = 8


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KMEM_CACHE", raising=False)


def _model(length):
    """A model that no other test has; its length tells it from those here."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((length, 4))
    x = inputs
    for _ in range(6):
        x = layers.Conv1D(16, 3, padding="same", activation="tanh")(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return kmem.wrap(model)


def _data(model):
    random = np.random.default_rng(0)
    x = random.normal(size=(_ROWS, *model.input_shape[1:])).astype("float32")
    return x, random.normal(size=(_ROWS, 3)).astype("float32")


def _fit(model, **options):
    x, y = _data(model)
    with kmem.memory.track() as usage:
        model.fit(x, y, batch_size=_ROWS, shuffle=False, verbose=0, **options)
    return usage.peak_bytes


def _budget(length):
    """Half of what plain steps need, beside what is in memory."""
    model = _model(length)
    gc.collect()
    before = kmem.memory.current()
    peak = _fit(model)
    return before + (peak - before) // 2


def _kept():
    return [path for path in cache.files() if path.name.startswith("choice-")]


def _tries(capsys, length, budget):
    """What a fit says that it tries, and the model."""
    model = _model(length)
    x, y = _data(model)
    capsys.readouterr()
    model.fit(x, y, batch_size=_ROWS, verbose=1, memory_budget=budget)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "memory_budget tries" in line], model


def segments(plan):
    return plan and plan.segments


def test_the_next_run_takes_what_was_chosen(capsys):
    budget = _budget(4096)

    searched, first = _tries(capsys, 4096, budget)
    tried, second = _tries(capsys, 4096, budget)

    assert len(_kept()) == 1
    before = first.memory_report.chosen
    chosen = before.options
    assert chosen != kmem.MemoryOptions()
    assert searched[0].startswith("memory_budget tries 1 of at most")
    assert tried == [f"memory_budget tries what it chose: {describe(chosen)}"]
    after = second.memory_report.chosen
    assert after.options == chosen
    assert segments(after.plan) == segments(before.plan)
    assert after.predicted_peak_bytes <= budget
    for got, value in zip(second.weights, first.weights, strict=True):
        np.testing.assert_array_equal(got, value)


def test_what_no_longer_fits_is_searched_for(capsys):
    budget = _budget(4160)
    _fit(_model(4160), memory_budget=budget)
    (path,) = _kept()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"chosen": kept["plain"]}))

    tried, model = _tries(capsys, 4160, budget)

    assert tried[0] == "memory_budget tries what it chose: plain"
    chosen = model.memory_report.chosen
    assert chosen.options != kmem.MemoryOptions()
    assert chosen.measured_peak_bytes <= budget
    again = json.loads(path.read_text())["chosen"]
    assert again["predicted_peak_bytes"] == chosen.predicted_peak_bytes


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A budget, and the name of the file that a search within it has left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("KMEM_CACHE", raising=False)
        budget = _budget(4224)
        _fit(_model(4224), memory_budget=budget)
        (path,) = _kept()
    return budget, path.name


@pytest.mark.parametrize("damage", ["", "no JSON", "{}", '{"plain": 1}'])
def test_a_damaged_file_is_searched_for(capsys, searched, damage):
    budget, name = searched
    path = cache.folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(damage)

    tried, _ = _tries(capsys, 4224, budget)

    assert "what it chose" not in tried[0]
    assert _kept() == [path]
    assert path.read_text() != damage


def test_another_budget_is_searched_for(capsys):
    budget = _budget(4352)
    _fit(_model(4352), memory_budget=budget)

    tried, _ = _tries(capsys, 4352, budget + 1)

    assert "what it chose" not in tried[0]
    assert len(_kept()) == 2


def test_nothing_is_kept_if_it_is_not_to_be(capsys, monkeypatch):
    monkeypatch.setenv("KMEM_CACHE", "0")
    budget = _budget(4416)
    _fit(_model(4416), memory_budget=budget)

    tried, _ = _tries(capsys, 4416, budget)

    assert "what it chose" not in tried[0]
    assert _kept() == []
