"""Each example runs as a user runs it: as a script, in a folder of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
# In small, where the defaults take hours.
ARGUMENTS = {
    "data_reweighting.py": "--data digits --blocks 1 1 0 0 --width 8 --batch 8 "
    "--steps 2 --epochs 1 --microbatches 2".split()
}
# Those that take more than about 20 seconds.
SLOW: set[str] = set()


def scripts() -> list:
    return [
        pytest.param(
            path,
            id=path.name,
            marks=pytest.mark.slow if path.name in SLOW else (),
        )
        for path in sorted(EXAMPLES.glob("*.py"))
    ]


@pytest.mark.parametrize("path", scripts())
def test_example_runs(path, tmp_path):
    finished = subprocess.run(
        [sys.executable, path, *ARGUMENTS.get(path.name, [])],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
