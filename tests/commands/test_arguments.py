"""What commands say of a model's file that they cannot use."""

import keras
import pytest

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
