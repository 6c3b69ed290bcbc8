"""What commands say of a model's file that they cannot use."""

import argparse

import keras
import pytest
import tensorflow as tf

from kmem.commands import arguments
from kmem.commands import cli


class Custom(keras.layers.Layer):
    """A layer that Keras alone does not know."""


def save(path, *layers):
    keras.Sequential([keras.Input((None, 4)), *layers]).save(path)


def write_nothing(path):
    path.touch()


def write_text(path):
    path.write_text("no model")


def write_half(path):
    save(path, keras.layers.Dense(1))
    path.write_bytes(path.read_bytes()[:-100])


def write_custom(path):
    save(path, Custom())


@pytest.mark.parametrize("command", ["plan", "sweep"])
@pytest.mark.parametrize(
    "write", [write_nothing, write_text, write_half, write_custom]
)
def test_a_file_that_is_no_model_is_one_message(
    command, write, tmp_path, capsys
):
    path = tmp_path / "model.keras"
    write(path)
    assert cli.main([command, str(path), "--batch", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"kmem {command}: A model's file must be one that `model.save` wrote"
    )
    assert str(path) in line


def test_a_model_without_a_shape_is_refused(tmp_path, capsys):
    path = tmp_path / "model.keras"
    save(path, keras.layers.Dense(1))
    assert cli.main(["plan", str(path), "--batch", "8"]) == 2
    assert "must have a fixed shape" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:You are saving a model that has not yet")
def test_a_model_that_is_not_built_is_refused(tmp_path, capsys):
    path = tmp_path / "model.keras"
    keras.Sequential([keras.layers.Dense(1)]).save(path)
    assert cli.main(["plan", str(path), "--batch", "8"]) == 2
    assert "must be built: begin it with" in capsys.readouterr().err


SPARSE = "sparse_categorical_crossentropy"
SPARSE_LOSS = keras.losses.SparseCategoricalCrossentropy()


def as_list(outputs):
    return [outputs["grade"], outputs["kind"]]


@pytest.mark.parametrize(
    "form, loss, num_sparse",
    [
        (as_list, ["mse", SPARSE], 1),
        (as_list, {"kind": SPARSE_LOSS, "grade": "mse"}, 1),
        (dict, {"grade": "mse", "kind": SPARSE}, 1),
        (as_list, SPARSE, 2),
        (dict, "mse", 0),
    ],
)
def test_targets_are_classes_where_the_loss_of_the_output_is_sparse(
    form, loss, num_sparse, tmp_path
):
    path = tmp_path / "model.keras"
    inputs = keras.Input((4,))
    outputs = {
        name: keras.layers.Dense(size, name=name)(inputs)
        for name, size in {"kind": 5, "grade": 2}.items()
    }
    model = keras.Model(inputs, form(outputs))
    model.compile("sgd", loss)
    model.save(path)

    args = argparse.Namespace(model=path, batch=8)
    _, (_, targets) = arguments.load_model(args)

    dense = tf.TensorSpec((8, 2)), tf.TensorSpec((8, 5))
    sparse = [tf.TensorSpec((8,), tf.int64)] * num_sparse
    assert keras.tree.flatten(targets) == [*dense[: 2 - num_sparse], *sparse]
