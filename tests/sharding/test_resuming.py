"""A training that goes on is the training that was not interrupted."""

import json
import os
import signal

import keras
import numpy as np
import pytest
import resumed

from kmem import callbacks
from kmem.commands import cli


def weights(model):
    return [np.asarray(x) for x in model.get_weights()]


def assert_near(found, wanted, tolerance):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def uninterrupted():
    """The weights, and the losses of all epochs."""
    model = resumed.make_model()
    x, y = resumed.data()
    history = model.fit(
        x, y, epochs=resumed.EPOCHS, batch_size=8, shuffle=False, verbose=0
    )
    return weights(model), history.history["loss"]


class Ended(keras.callbacks.Callback):
    """Sends its process SIGTERM at the end of some batches."""

    def __init__(self, *places):
        super().__init__()
        self._places = places

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) in self._places:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def exits():
    """SIGTERM raises an error, as this process is to go on."""

    def end(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    yield end
    assert signal.signal(signal.SIGTERM, before) is end


class Interrupted(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self._place = (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._place:
            raise KeyboardInterrupt


def fit(folder, *others, save_freq="epoch", **options):
    model = resumed.make_model()
    x, y = resumed.data()
    saved = callbacks.ShardedCheckpoint(folder, save_freq)
    history = model.fit(
        x,
        y,
        **{"epochs": resumed.EPOCHS, "batch_size": 8, **options},
        shuffle=False,
        callbacks=[saved, *others],
        verbose=0,
    )
    return weights(model), history.history.get("loss", []), history.epoch


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}])
def test_it_goes_on_with_the_next_epoch(tmp_path, uninterrupted, options):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Interrupted(1, 3), **options)
    found, losses, epochs = fit(tmp_path, **options)
    assert epochs == [1, 2]
    np.testing.assert_allclose(losses, uninterrupted[1][1:], rtol=1e-6)
    assert_near(found, uninterrupted[0], 1e-6)


@pytest.mark.parametrize(
    "save_freq, place", [(1, (0, 4)), (2, (1, 0)), (3, (2, 3))]
)
def test_it_goes_on_with_the_next_batch(
    tmp_path, uninterrupted, save_freq, place
):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Interrupted(*place), save_freq=save_freq)
    found, losses, _ = fit(tmp_path, save_freq=save_freq)
    assert_near(found, uninterrupted[0], 0)
    assert losses[1:] == uninterrupted[1][resumed.EPOCHS - len(losses) + 1 :]


def test_the_next_epoch_is_whole_where_this_one_has_become_shorter(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Interrupted(0, 3), save_freq=1)
    seen = keras.callbacks.LambdaCallback()
    fit(tmp_path, seen, batch_size=20)
    # Four in the first epoch, before it was interrupted; then two in each.
    assert int(seen.model.optimizer.iterations) == 4 + 2 * 2


@pytest.mark.parametrize("save_freq", ["epoch", 3])
@pytest.mark.parametrize("place", [(0, 0), (1, 3), (1, 4)])
def test_sigterm_ends_it_once_it_is_saved(
    place, save_freq, exits, tmp_path, uninterrupted
):
    with pytest.raises(SystemExit, match="143"):
        fit(tmp_path, Ended(place), save_freq=save_freq)
    found, losses, epochs = fit(tmp_path, save_freq=save_freq)
    assert epochs[0] == place[0] + (place == (1, 4))
    assert_near(found, uninterrupted[0], 0)
    # Of the epoch that it goes on with, there may be no batch left.
    wanted = uninterrupted[1][epochs[0] + 1 :]
    assert losses[len(losses) - len(wanted) :] == wanted


def test_sigterm_waits_for_the_end_of_an_update(exits, tmp_path):
    options = {"gradient_accumulation_steps": 3, "save_freq": 2}
    wanted, _, _ = fit(tmp_path / "whole", **options)
    ends = Ended((0, 0), (1, 1))
    for _ in range(2):
        with pytest.raises(SystemExit):
            fit(tmp_path, ends, **options)
    found, _, epochs = fit(tmp_path, **options)
    assert epochs == [1, 2]
    assert_near(found, wanted, 0)


def test_a_second_sigterm_ends_it_at_once(exits, tmp_path):
    with pytest.raises(SystemExit):
        fit(tmp_path, Ended((0, 0)), Ended((0, 0)))
    assert list(tmp_path.iterdir()) == []


def test_sigterm_after_a_training_that_failed_is_not_held_back(exits, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Interrupted(0, 0))
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_training_that_was_complete_has_nothing_to_do(
    tmp_path, uninterrupted
):
    fit(tmp_path)
    found, _, epochs = fit(tmp_path)
    assert epochs == []
    assert_near(found, uninterrupted[0], 0)
    assert fit(tmp_path, epochs=resumed.EPOCHS + 1)[2] == [resumed.EPOCHS]


def test_the_next_fit_begins_where_it_says(tmp_path):
    model = resumed.make_model()
    x, y = resumed.data()
    saved = callbacks.ShardedCheckpoint(tmp_path)
    model.fit(x, y, callbacks=[saved], verbose=0)
    model.fit(x, y, epochs=2, callbacks=[saved], verbose=0)
    assert model.fit(x, y, epochs=2, verbose=0).epoch == [0, 1]


def test_a_model_with_further_optimizers_is_refused_before_it_trains(tmp_path):
    model = resumed.make_model()
    model.second = keras.optimizers.SGD()
    before = weights(model)
    saved = callbacks.ShardedCheckpoint(tmp_path)
    with pytest.raises(
        ValueError, match="no optimizer but `model.opt.*SGD as well"
    ):
        model.fit(*resumed.data(), callbacks=[saved], verbose=0)
    assert_near(weights(model), before, 0)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("save_freq", [0, "batch"])
def test_how_often_it_saves_must_be_known(save_freq, tmp_path):
    with pytest.raises(ValueError, match="`save_freq` must be"):
        callbacks.ShardedCheckpoint(tmp_path, save_freq)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, options",
    [
        pytest.param(1, ["--stage", "full"], marks=pytest.mark.exhaustive),
        (2, ["--stage", "optimizer", "--save-freq", "2"]),
        pytest.param(3, ["--stage", "full"], marks=pytest.mark.exhaustive),
        pytest.param(
            4,
            ["--stage", "gradients", "--save-freq", "3"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_it_goes_on_after_a_process_was_killed(
    size, options, tmp_path, uninterrupted, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["launch", "--processes", str(size), "--restarts", "1"]
    script = [resumed.__file__, str(tmp_path), *options]
    assert cli.main([*command, *script]) == 0
    errors = capsys.readouterr().err
    assert f"rank {size - 1} failed first: killed by SIGKILL" in errors
    assert_is_whole(tmp_path, uninterrupted)


def assert_is_whole(folder, uninterrupted):
    model = resumed.make_model()
    # The file has the optimizer's variables, too.
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / "model.weights.h5")
    assert_near(weights(model), uninterrupted[0], 1e-6)


@pytest.mark.slow
def test_processes_save_the_same_step_when_one_is_ended(
    tmp_path, uninterrupted, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["launch", "--processes", "2", resumed.__file__, str(tmp_path)]
    options = ["--stage", "full", "--signal", "SIGTERM"]
    assert cli.main([*command, *options]) == 143
    assert "failed first: killed by SIGTERM" in capsys.readouterr().err
    content = json.loads((tmp_path / "checkpoint/index.json").read_text())
    assert content["content"]["position"] == {"epoch": 1, "batch": 3}
    assert cli.main([*command, *options]) == 0
    assert_is_whole(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_process_that_saves_nothing_is_ended_at_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["launch", "--processes", "2", resumed.__file__, str(tmp_path)]
    options = ["--stage", "full", "--signal", "SIGTERM", "--unsaved"]
    assert cli.main([*command, *options]) == 143
    assert "rank 1 failed first: killed by SIGTERM" in capsys.readouterr().err
