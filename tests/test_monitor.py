"""MemoryMonitor in the progress bar, History, CSVLogger and TensorBoard."""

import csv

import keras
import numpy as np
import pytest

from kmem import memory
from kmem.callbacks import MemoryMonitor

pytestmark = pytest.mark.usefixtures("native_library")

NAMES = {"memory_mb", "memory_peak_mb"}


def fit(callbacks, verbose=0, epochs=2, **arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((32, 8)), np.ones((32, 1))
    return model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        callbacks=callbacks,
        verbose=verbose,
        validation_data=(x, y),
        **arguments,
    ).history


class Logs(keras.callbacks.Callback):
    """Keeps what a callback at this place in the list is given."""

    def __init__(self):
        super().__init__()
        self.batches = []
        self.epochs = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def test_history_has_one_value_an_epoch():
    history = fit([MemoryMonitor()])
    assert set(history) == {"loss", "val_loss"} | NAMES
    assert len(history["memory_peak_mb"]) == 2


def test_the_epochs_peak_is_the_trackers():
    class Track(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.block = memory.track("CPU")
            self.usage = self.block.__enter__()

        def on_epoch_end(self, epoch, logs=None):
            self.block.__exit__(None, None, None)
            assert logs["memory_peak_mb"] == self.usage.peak_bytes / 1e6
            assert logs["memory_mb"] == self.usage.end_bytes / 1e6

    fit([MemoryMonitor("CPU"), Track()])


def test_a_batch_has_the_peak_so_far():
    logs = Logs()
    fit([MemoryMonitor(), logs], epochs=1)
    peaks = [batch["memory_peak_mb"] for batch in logs.batches]
    assert len(peaks) == 4
    assert peaks == sorted(peaks)
    assert logs.epochs[0]["memory_peak_mb"] >= peaks[-1]


def test_every_epoch_starts_anew():
    class Use(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.epoch == 0:
                keras.ops.full((1_000_000,), 1.0)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    first, second = fit([MemoryMonitor(), Use()])["memory_peak_mb"]
    assert first > second + 3.9


def test_memory_and_peak_leave_the_numbers_alone():
    plain = fit([])
    watched = fit([MemoryMonitor()])
    assert {name: watched[name] for name in plain} == plain


def test_the_users_own_peak_is_left_alone():
    keras.ops.full((10_000_000,), 1.0)
    before = memory.peak("CPU")
    fit([MemoryMonitor()])
    assert memory.peak("CPU") >= before


@pytest.mark.parametrize("position", [0, 1])
def test_the_progress_bar_shows_it_at_any_position(position, capsys):
    callbacks = [keras.callbacks.TerminateOnNaN()]
    callbacks.insert(position, MemoryMonitor())
    history = fit(callbacks, verbose=2, epochs=1)
    output = capsys.readouterr().out
    assert f"memory_peak_mb: {history['memory_peak_mb'][0]:.4f}" in output
    assert "memory_mb: " in output


def test_the_progress_bar_shows_it_during_an_epoch(capsys):
    fit([MemoryMonitor()], verbose=1, epochs=1)
    first_line = capsys.readouterr().out.split("step")[1]
    assert "memory_peak_mb: " in first_line


def test_csv_logger_writes_it(tmp_path):
    path = tmp_path / "log.csv"
    history = fit([MemoryMonitor(), keras.callbacks.CSVLogger(path)])
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for name in NAMES:
        assert [float(row[name]) for row in rows] == history[name]


def test_tensorboard_writes_it(tmp_path):
    pytest.importorskip("tensorboard")
    history = fit(
        [
            MemoryMonitor(),
            keras.callbacks.TensorBoard(tmp_path, update_freq="batch"),
        ]
    )
    scalars = read_scalars(tmp_path / "train")
    for name in NAMES:
        assert scalars[f"epoch_{name}"] == pytest.approx(history[name])
        assert len(scalars[f"batch_{name}"]) == 8


def read_scalars(folder):
    import tensorflow as tf

    scalars = {}
    paths = [str(path) for path in sorted(folder.glob("*.tfevents.*"))]
    for record in tf.data.TFRecordDataset(paths):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                number = float(tf.make_ndarray(value.tensor))
                scalars.setdefault(value.tag, []).append(number)
    return scalars


def test_an_interrupted_fit_does_not_keep_its_tracker():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    monitor = MemoryMonitor()
    with pytest.raises(KeyboardInterrupt):
        fit([monitor, Interrupt()])
    interrupted = monitor._usage
    assert len(fit([monitor])["memory_mb"]) == 2
    assert interrupted._final is not None


def test_an_unknown_device_is_refused_at_once():
    with pytest.raises(ValueError, match="`device` must be one of CPU:0"):
        MemoryMonitor("GPU:9")
