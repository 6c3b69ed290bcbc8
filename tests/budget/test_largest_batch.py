"""`kmem.largest_batch`: what it finds trains, and a little more does not."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from peaks import in_one_order

import kmem
from kmem.commands import cli

SPEC = tf.TensorSpec((1, 4))
# Beside what other tests have left in memory, in bytes.
_ROOM = 5_000_000


def make_model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu") for _ in range(4)]
    last = keras.layers.Dense(4)
    model = keras.Sequential([keras.Input((4,)), *layers, last])
    model.compile("sgd", "mse", jit_compile=False)
    return kmem.wrap(model)


def train(model, size: int, num_steps: int, **options):
    """Trains and validates, with batches that are made as they are needed."""
    data = tf.data.Dataset.range(num_steps).map(
        lambda _: (tf.zeros((size, 4)), tf.zeros((size, 4)))
    )
    model.fit(
        data, validation_data=data.take(1), shuffle=False, verbose=0, **options
    )


@pytest.mark.parametrize("options", [{}, {"microbatches": 4}], ids=str)
def test_what_it_finds_trains_and_more_does_not(options):
    # Threads vary the peak of a plain step. Micro-batches come in a loop.
    with contextlib.nullcontext() if options else in_one_order():
        _check_what_it_finds(options)


def _check_what_it_finds(options):
    model = make_model()
    weights = model.get_weights()
    memory = kmem.memory.current("CPU") + _ROOM
    found = kmem.largest_batch(model, (SPEC, SPEC), memory, 8, **options)

    assert found.num_runs <= 10 and found.batch_size % 8 == 0
    assert found.peak_bytes <= memory == found.memory_bytes
    assert found.seconds_per_example > 0
    for left, right in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    # When the next batch is there beside a plain step is up to threads, too.
    kmem.memory.limit(memory if options else memory + _ROOM, "CPU")
    try:
        train(model, found.batch_size, 50, **options)
        more = 1.05 if options else 4
        with pytest.raises(tf.errors.ResourceExhaustedError):
            train(model, int(more * found.batch_size) + 8, 50, **options)
    finally:
        kmem.memory.limit(None, "CPU")


def test_nothing_fits_in_less_than_the_weights(tmp_path, capsys):
    model = make_model()
    found = kmem.largest_batch(model, (SPEC, SPEC), "1KB")
    assert found.batch_size == 0 and found.num_runs == 1
    assert found.summary() == "no batch trains in 1.00 KB"
    assert "no batch" in found._repr_html_()
    path = tmp_path / "model.keras"
    model.save(path)
    command = ["largest-batch", str(path), "--memory"]
    assert cli.main([*command, "1KB"]) == 1
    in_use = kmem.memory.current("CPU") // 1000 + 3_000
    assert cli.main([*command, f"{in_use}KB", "--multiple-of", "64"]) == 0
    assert "ms an example" in capsys.readouterr().out


def test_what_it_cannot_do_is_an_error():
    model = make_model()
    with pytest.raises(ValueError, match="no options but.*Received: remat"):
        kmem.largest_batch(model, SPEC, "1GB", remat="auto")
    with pytest.raises(ValueError, match="positive.*Received: multiple_of=0"):
        kmem.largest_batch(model, SPEC, "1GB", 0)
    with pytest.raises(ValueError, match="Received: memory='8XB'"):
        kmem.largest_batch(model, SPEC, "8XB")
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must be built"):
        kmem.largest_batch(unbuilt, SPEC, "1GB")
