"""A rehearsal tells the peak to count with."""

import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem import memory
from kmem.budget import dry_run
from kmem.fit.session import Session

pytestmark = pytest.mark.usefixtures("native_library")


def _rehearsed(monkeypatch, peaks):
    """A rehearsal of a step whose peaks are given, again and again."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seen = []

    @contextlib.contextmanager
    def track():
        seen.append(peaks[len(seen) % len(peaks)])
        yield types.SimpleNamespace(peak_bytes=seen[-1])

    monkeypatch.setattr(memory, "track", track)
    session = Session(kmem.wrap(model), kmem.MemoryOptions())
    batch = tuple(tf.TensorSpec([4, n], np.float32) for n in (2, 1))
    return dry_run.rehearse(session, batch)


def test_a_peak_that_many_steps_have_is_the_one_to_count_with(monkeypatch):
    found = _rehearsed(monkeypatch, [2_000_000, 1_900_000, 2_000_001])

    assert (found.peak_bytes, found.spread_bytes) == (2_000_001, 0)


def test_a_peak_that_few_steps_have_may_not_be_the_highest(monkeypatch):
    found = _rehearsed(monkeypatch, [1_900_000] * 9 + [2_000_000])

    assert (found.peak_bytes, found.spread_bytes) == (2_100_000, 100_000)
