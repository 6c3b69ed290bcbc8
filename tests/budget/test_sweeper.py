"""`kmem.sweep`: what thresholds cost, measured on the user's own model."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.commands import cli

pytestmark = [
    pytest.mark.early,
    pytest.mark.usefixtures("native_library"),
]

EVERYTHING = kmem.DTR(evictee_minimum_size=0, compile=None)


def compiled(num_layers=2):
    keras.utils.set_random_seed(5)
    x = inputs = keras.Input((64,))
    for _ in range(num_layers):
        x = layers.Dense(64, activation="relu")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Dropout(0.2)(x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def batch(rows=1024):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 64)).astype("float32")
    return x, rng.integers(0, 4, rows)


def state(model):
    found = [*model.variables, *model.optimizer.variables]
    for metric in model.metrics:
        found += metric.variables
    return [variable.numpy() for variable in found]


def test_thresholds_are_measured_and_one_is_recommended():
    model = compiled()
    found = kmem.sweep(
        model, batch(), [0.7, "1KB", 0.8], dtr=EVERYTHING, steps=2
    )

    plain, unlimited, less, nothing, most, *other = found.rows
    assert (found.plain, found.unlimited) == (plain, unlimited)
    assert plain.dtr is None and unlimited.threshold_bytes == 0
    assert unlimited.peak_bytes <= 1.01 * plain.peak_bytes
    assert unlimited.num_recomputations == 0
    for share, row in ((0.7, less), (0.8, most)):
        assert row.threshold_bytes == pytest.approx(
            share * plain.peak_bytes, rel=0.001
        )
        assert row.peak_bytes <= row.threshold_bytes
        assert row.predicted_peak_bytes <= row.threshold_bytes
        assert row.step_seconds > 0
        assert row.predicted_seconds > 0
        assert 0 < row.num_recomputations and 0 < row.num_evictions
    assert nothing.error.startswith("no room: at least ")
    assert nothing.step_seconds is None
    assert np.isinf(nothing.predicted_seconds)
    assert all(row.threshold_bytes < 10**9 for row in other)
    assert found.recommended in [row.dtr for row in found.rows]
    kmem.wrap(model).fit(*batch(), dtr=found.recommended, verbose=0)


def test_the_model_stays_as_it_is_to_the_bit():
    model, other = compiled(), compiled()
    for each in (model, other):
        each.fit(*batch(), verbose=0)
    gc.collect()
    in_use = kmem.memory.current("CPU")
    before = state(model), model.train_function, model.run_eagerly
    kmem.sweep(model, batch(), [0.7], dtr=EVERYTHING, steps=1)

    assert (model.train_function, model.run_eagerly) == before[1:]
    assert abs(kmem.memory.current("CPU") - in_use) < 10**4
    for one, two in zip(before[0], state(model), strict=True):
        np.testing.assert_array_equal(one, two)
    history = [each.fit(*batch(), verbose=0).history for each in (model, other)]
    assert history[0] == history[1]


def test_what_does_not_fit_in_plain_eager_can_be_swept():
    model, data = compiled(), batch(4096)
    # Something else is in memory.
    other = tf.zeros(4 * 10**6, tf.uint8)
    free = kmem.sweep(model, data, [1.0], dtr=EVERYTHING, steps=1)
    kmem.memory.limit(int(0.85 * free.plain.peak_bytes), "CPU")
    found = kmem.sweep(model, data, [0.8], dtr=EVERYTHING, steps=1)

    assert found.plain.error == "out of memory"
    assert found.unlimited.num_recomputations > 0
    row = found.rows[2]
    # Of a peak that can only be simulated.
    assert row.threshold_bytes == pytest.approx(
        0.8 * free.plain.peak_bytes, rel=0.05
    )
    assert row.peak_bytes <= row.threshold_bytes
    assert "out of memory" in found.summary()
    del other


def test_a_threshold_has_room_for_batches_that_are_ready():
    model = keras.Sequential([keras.Input((4096,)), layers.Dense(4)])
    model.compile("sgd", "mse")
    x = np.ones((512, 4096), "float32")
    found = kmem.sweep(model, (x, x[:, :4]), [1.0], steps=1)
    rows = tf.data.Dataset.range(8)
    rows = rows.map(lambda _: (tf.ones(x.shape), tf.ones((512, 4))))
    kmem.wrap(model).fit(rows, shuffle=False, dtr=found.rows[2].dtr, verbose=0)


class Uneven(keras.utils.PyDataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return batch(256 << index)


def test_several_batches_count_with_their_largest_peak():
    model = compiled()
    found = kmem.sweep(model, Uneven(), [], dtr=EVERYTHING, steps=1)
    # Of four batches.
    assert found.plain.peak_bytes > 5 * 2048 * 64 * 4

    rows = tf.data.Dataset.from_tensor_slices(batch(512)).batch(256)
    again = kmem.sweep(model, rows, [], dtr=EVERYTHING, steps=1)
    assert again.plain.peak_bytes < 0.5 * found.plain.peak_bytes
    assert found.recommended == EVERYTHING


def test_a_model_is_built_as_by_its_first_step():
    model = keras.Sequential([layers.Dense(64), layers.Dense(4)])
    model.compile("adam", "mse")
    x = np.ones((64, 8), "float64")
    kmem.sweep(model, (x, x[:, :4]), [], steps=1)
    assert model.built and model.optimizer.iterations == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"thresholds": [1.5]},
            r"must be in \(0, 1\].*Received: thresholds=1.5",
        ),
        ({"thresholds": ["much"]}, "`thresholds` must be a positive number"),
        ({"steps": 0}, "`steps` must be a positive integer"),
        ({"data": tf.data.Dataset.range(0)}, "must have a batch"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_swept_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kmem.sweep(compiled(1), **{"data": batch(), **arguments})


def test_the_command_prints_a_table_and_draws_it(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "model.keras", tmp_path / "sweep.png"
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    words = ["--batch", "4096", "--thresholds", "0.9", "1GB", "--steps", "1"]
    command = ["sweep", str(path), *words, "--plot", str(picture)]
    assert cli.main(command) == 0

    output = capsys.readouterr().out
    assert "\nKeras, eager " in output and "\n1.00 GB " in output
    assert "\nrecommended: " in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_to_draw_one_point_before_any_work(
    tmp_path, capsys
):
    path, picture = tmp_path / "model.keras", tmp_path / "sweep.png"
    path.touch()
    words = ["--batch", "8", "--thresholds", "0.5", "--plot", str(picture)]
    assert cli.main(["sweep", str(path), *words]) == 1
    errors = capsys.readouterr().err
    assert errors.endswith("at least two thresholds. Received: 0.5\n")
    assert not picture.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--batch", "0"],
        ["--batch", "8", "--thresholds", "1.5"],
        ["--batch", "8", "--thresholds", "2XB"],
        ["--batch", "8", "--steps", "none"],
    ],
    ids=" ".join,
)
def test_bad_use_of_the_command_exits_with_2(words, tmp_path, capsys):
    path = tmp_path / "model.keras"
    path.touch()
    with pytest.raises(SystemExit) as caught:
        cli.main(["sweep", str(path), *words])
    assert caught.value.code == 2
    assert words[-1] in capsys.readouterr().err
