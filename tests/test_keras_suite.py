"""Keras's own tests, in each of which `fit` trains through kmem.

They are those that the installed Keras brings. A part of them runs with the
slow tests, other ones under each set of options; all of them, in two hours,
with `pytest -m exhaustive tests/test_keras_suite.py`.
"""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest
from keras_suite import expected
from keras_suite import options

KERAS = pathlib.Path(keras.__file__).parent / "src"
# All whose models train: also those of its layers' tests would.
FOLDERS = ("trainers", "callbacks", "models", "optimizers", "saving")
FOLDERS += ("distillation",)
SETS = [name for name in options.SETS if name != "plain"]
SLOW = ("none", "microbatches", "accumulation_of_one", "accumulation")
# Every so many of the tests are the part that runs with the slow ones.
PART = 48


def run(option_set, folder, **environment) -> dict[str, dict]:
    """Runs tests of Keras; returns the results by name."""
    results = folder / f"{option_set}.json"
    tests = str(pathlib.Path(__file__).parent)
    paths = [tests, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "ignore"),
            *("-W", "error:Memory options had no effect:UserWarning"),
            # Some need what TensorFlow does not, such as JAX.
            "--continue-on-collection-errors",
            *("-c", os.devnull, "--rootdir", KERAS),
            *("-p", "keras_suite.plugin"),
            *("-p", "no:cacheprovider", "-p", "no:xdist"),
            *(KERAS / folder for folder in FOLDERS),
        ],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "KMEM_SUITE_OPTIONS": option_set,
            "KMEM_SUITE_RESULTS": str(results),
        }
        | environment,
        capture_output=True,
        text=True,
    )
    assert results.exists(), process.stdout[-3000:] + process.stderr[-3000:]
    rows = map(json.loads, results.read_text().splitlines())
    return {row["test"]: row for row in rows}


def judge(option_set, results, folder) -> dict[str, list]:
    """Sorts results into passed, listed, failed, and not Keras's either."""
    kinds = {"passed": [], "listed": [], "failed": [], "not in Keras": []}
    unlisted = []
    for test, result in results.items():
        listed = [e for e in expected.LISTED if e.names(option_set, test)]
        failed = result["outcome"] == "failed"
        said = " ".join([result.get("message", ""), *result["raised"]])
        words = [entry.says for entry in listed]
        if any(raised.startswith("ValueError") for raised in result["raised"]):
            words += [
                refusal
                for refusal, sets in expected.REFUSALS.items()
                if option_set in sets
            ]
        if failed and any(each in said for each in words):
            kinds["listed"].append(test)
        elif failed:
            unlisted.append(test)
        elif listed:
            kinds["failed"].append(f"{test} passes, and is listed")
        elif result["outcome"] == "passed":
            kinds["passed"].append(test)
    if unlisted:
        only = folder / "only.txt"
        only.write_text("\n".join(unlisted))
        alone = run("plain", folder, KMEM_SUITE_ONLY=str(only))
        for test in unlisted:
            fails = alone[test]["outcome"] != "passed"
            message = f"{test}: {results[test].get('message')}"
            kinds["not in Keras" if fails else "failed"].append(message)
    return kinds


def check(option_set, folder, capsys, **environment) -> dict[str, list]:
    results = run(option_set, folder, **environment)
    kinds = judge(option_set, results, folder)
    counts = ", ".join(f"{len(tests)} {k}" for k, tests in kinds.items())
    with capsys.disabled():
        print(f"\nKeras's own tests under {option_set}: {counts}")
    assert kinds["passed"]
    assert kinds["failed"] == []
    return kinds


@pytest.mark.slow
@pytest.mark.parametrize("option_set", SLOW)
def test_a_part_of_what_passes_in_keras_passes(option_set, tmp_path, capsys):
    part = f"{SETS.index(option_set)}/{PART}"
    check(option_set, tmp_path, capsys, KMEM_SUITE_PART=part)


@pytest.mark.exhaustive
@pytest.mark.parametrize("option_set", SETS)
def test_all_that_passes_in_keras_passes(option_set, tmp_path, capsys):
    kinds = check(option_set, tmp_path, capsys)
    for entry in expected.LISTED:
        if option_set in entry.sets:
            assert any(entry.names(option_set, t) for t in kinds["listed"])
