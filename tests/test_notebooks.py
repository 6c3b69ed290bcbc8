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
