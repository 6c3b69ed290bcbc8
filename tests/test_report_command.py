"""`kmem report`, called in this process."""

import keras
import pytest

from kmem import cli


@pytest.fixture
def model(tmp_path, native_library):
    layers = [keras.layers.Dense(64, "relu") for _ in range(2)]
    made = keras.Sequential([keras.Input((64,)), *layers])
    made.compile("sgd", "mse")
    path = tmp_path / "model.keras"
    made.save(path)
    return str(path)


def test_it_draws_what_is_chosen_for_a_budget(model, tmp_path, capsys):
    page = tmp_path / "page.html"
    command = ["report", model, "--batch", "4096", "--budget", "1TB"]
    assert cli.main([*command, "--output", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"drawn: {page}\n")
    assert "fits in" in page.read_text()
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert "page_step.png" in pictures
