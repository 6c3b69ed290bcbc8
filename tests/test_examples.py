"""Each example runs as a user runs it: as a script, in a folder of its own."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
# In small, where the defaults take hours.
ARGUMENTS = {
    "architecture_search.py": "--search 1 --epochs 1 --others 1".split(),
    "data_reweighting.py": "--data digits --blocks 1 0 0 0 --width 8 --batch 8 "
    "--steps 2 --epochs 1 --microbatches 2".split(),
    "domain_adaptation.py": "--seeds 1 --steps 2".split(),
    "few_shot.py": "--tasks 8 --epochs 1 --test-tasks 2".split(),
    "reweighting_digits.py": "--seeds 1 --steps 2".split(),
    "weight_decay.py": "--seeds 1 --updates 2".split(),
}
# Those to which it does not matter run in this process, where TensorFlow has
# started already.
HERE = {
    "architecture_search.py",
    "data_pipelines.py",
    "domain_adaptation.py",
    "few_shot.py",
    "image_classification.py",
    "reweighting_digits.py",
    "transformer.py",
    "weight_decay.py",
}


def scripts(names) -> list:
    return [pytest.param(EXAMPLES / name, id=name) for name in sorted(names)]


# Starts processes that run the same file, which has to be Python's own.
LAUNCHES = {"sharded_transformer.py"}
OTHERS = {path.name for path in EXAMPLES.glob("*.py")} - HERE - LAUNCHES


# Keras warns of its own default where the data are a `tf.data.Dataset`.
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")
@pytest.mark.parametrize("path", scripts(HERE))
def test_example_runs_here(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    arguments = ARGUMENTS.get(path.name, [])
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", scripts(OTHERS))
def test_example_runs(path, tmp_path, monkeypatch, python):
    monkeypatch.chdir(tmp_path)
    status, output, errors = python.run_script(
        path, *ARGUMENTS.get(path.name, [])
    )
    assert status == 0, output + errors


@pytest.mark.parametrize("path", scripts(LAUNCHES))
def test_example_launches_processes(path, tmp_path):
    finished = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
