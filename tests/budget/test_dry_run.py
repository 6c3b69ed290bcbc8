"""A dry run tells the peak to count with."""

import contextlib
import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem import memory
from kmem.base import bindings
from kmem.budget import dry_run
from kmem.fit.session import Session
from kmem.sharding.engine import Engine

pytestmark = pytest.mark.usefixtures("native_library")


def _measured(monkeypatch, peaks):
    """A dry run of a step whose peaks are given, again and again."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    given = itertools.cycle(peaks)

    @contextlib.contextmanager
    def track():
        peak = next(given)
        yield types.SimpleNamespace(peak_bytes=peak, number=bindings.CPU)

    monkeypatch.setattr(memory, "track", track)
    session = Session(kmem.wrap(model), kmem.MemoryOptions())
    batch = tuple(tf.TensorSpec([4, n], np.float32) for n in (2, 1))
    return dry_run.of_session(session, batch)


def test_a_peak_that_many_steps_have_is_the_one_to_count_with(monkeypatch):
    measurement = _measured(monkeypatch, [2_000_001, 1_900_000, 2_000_001])

    assert measurement.peak_bytes == 2_000_001


def test_where_steps_differ_the_highest_peak_may_be_higher(monkeypatch):
    measurement = _measured(monkeypatch, [2_000_000, 1_900_000, 1_800_000])

    assert measurement.peak_bytes == 2_100_000


def test_a_convolution_without_room_for_its_workspace_is_out_of_memory():
    """What cuDNN says of it, as seen on an H200."""

    def step():
        message = (
            "No algorithm worked!  Error messages:\n  Profiling failure on "
            "CUDNN engine eng1{}: RESOURCE_EXHAUSTED: Out of memory while "
            "trying to allocate 16.00MiB."
        )
        raise tf.errors.NotFoundError(None, None, message)

    assert dry_run.measured(step, Engine()) is None


def test_an_error_that_is_not_of_memory_stays_what_it_is():
    def step():
        raise tf.errors.NotFoundError(None, None, "No such file")

    with pytest.raises(tf.errors.NotFoundError, match="No such file"):
        dry_run.measured(step, Engine())
