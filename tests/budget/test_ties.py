"""Of two ways that take the same time the one with larger micro-batches is
chosen, each time, however much the times that are measured differ."""

import contextlib
import gc
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.budget import choosing
from kmem.budget import dry_run
from kmem.budget import search
from kmem.budget.dry_run import Measurement
from kmem.budget.menu import Menu
from kmem.budget.trial import Trial
from kmem.budget.trial import longest_in_turns

pytestmark = pytest.mark.usefixtures("native_library")

_ROWS = 32
_EACH = 1_000_000


class _Timed:
    """Steps whose times are computed, then measured beside busy processes."""

    session = None

    def __init__(self, seconds, random):
        self._seconds = seconds
        self._random = random

    def rows(self, size):
        return _ROWS

    @contextlib.contextmanager
    def ready(self, size):
        yield lambda: self._seconds * self._random.uniform(1, 1.5)


def test_noise_of_half_the_time_decides_nothing(monkeypatch):
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(dry_run, "installed", lambda session: nothing)
    monkeypatch.setattr(dry_run, "timed", lambda step: step())

    def ratio(seed, seconds):
        random = np.random.default_rng(seed)
        two = _Timed(seconds, random), _Timed(1.0, random)
        return longest_in_turns(*((timed, 8) for timed in two))

    # Below 1, the first would be chosen.
    ties = [ratio(seed, seconds=1.0) >= 1 for seed in range(100)]
    assert sum(ties) >= 95
    assert all(ratio(seed, seconds=0.6) < 1 for seed in range(100))


@pytest.mark.parametrize(
    ("of_a_step", "of_a_part", "count"),
    # In 4 micro-batches it fits. Each adds nothing, costs, or saves.
    [(1.0, 0.0, 4), (1.0, 0.1, 4), (1.0, -0.03, 32)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_ties_go_to_the_larger_micro_batch(
    monkeypatch, of_a_step, of_a_part, count, seed
):
    random = np.random.default_rng(seed)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")

    def seconds(size):
        return of_a_step + of_a_part * math.ceil(_ROWS / size)

    def measure(trial, size):
        noise = random.uniform(1, 1.02) if of_a_part == 0 else 1
        return Measurement(_EACH * size, noise * seconds(size))

    def in_turns(smaller, larger):
        return seconds(smaller[1]) / seconds(larger[1])

    monkeypatch.setattr(Trial, "measure", measure)
    monkeypatch.setattr(search, "longest_in_turns", in_turns)
    monkeypatch.setattr(Menu, "drawn", lambda *arguments: None)
    batch = tf.TensorSpec((_ROWS, 4)), tf.TensorSpec((_ROWS, 1))
    gc.collect()
    budget = kmem.memory.current() + 9 * _EACH
    options = kmem.MemoryOptions(memory_budget=budget)

    _, report = choosing.choose(model, options, batch, budget)

    assert report.chosen.options.num_parts == count
