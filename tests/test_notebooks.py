"""Each notebook runs from top to bottom, and is stored with its outputs."""

import pathlib

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs(native_library, path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=600, resources=resources
    ).execute()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1))
    assert any(cell.outputs for cell in code)


CELLS = (
    """
import functools
import keras
import numpy as np
import kmem

x = np.ones((8, 4), "float32")
""",
    """
def train(epochs):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    arguments = {"batch_size": 8, "epochs": epochs, "verbose": 0}
    history = kmem.wrap(model).fit(x, x[:, :1], **arguments, sharding="full")
    return history.history["loss"]
""",
    """
first, second = kmem.distributed.launch(functools.partial(train, 2), 2)
assert first == second, (first, second)
assert first[1] < first[0], first
""",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_function_of_a_notebook_trains_in_two_processes(native_library):
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=300).execute()
