"""Keras's own tests, in each of which `fit` trains through kmem.

They are those that the installed Keras brings. A part of them runs with the
slow tests, other ones under each set of options; all of them, in two hours,
with `pytest -m exhaustive tests/test_keras_suite.py`.
"""

import functools
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
SLOW = SETS[:4]
# Of so many of the tests one is in the part that runs with the slow ones.
PART = 48


def run(option_sets, folder, **environment) -> dict[str, dict]:
    """Runs tests of Keras; returns the results by name."""
    results = folder / f"{option_sets}.json"
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
            "KMEM_SUITE_OPTIONS": option_sets,
            "KMEM_SUITE_RESULTS": str(results),
        }
        | environment,
        capture_output=True,
        text=True,
    )
    assert results.exists(), process.stdout[-3000:] + process.stderr[-3000:]
    rows = map(json.loads, results.read_text().splitlines())
    return {row["test"]: row for row in rows}


def judge(option_set, results, in_keras) -> dict[str, list]:
    """Sorts results into passed, listed, failed, and not Keras's either.

    Args:
        option_set: The set of options.
        results: By test.
        in_keras: Gives the results of these tests, or more, in plain Keras.
    """
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
        alone = in_keras(unlisted)
        for test in unlisted:
            fails = alone[test]["outcome"] != "passed"
            message = f"{test}: {results[test].get('message')}"
            kinds["not in Keras" if fails else "failed"].append(message)
    return kinds


def run_plainly(tests, folder) -> dict[str, dict]:
    """Runs some of Keras's tests in plain Keras."""
    only = folder / "only.txt"
    only.write_text("\n".join(tests))
    return run("plain", folder, KMEM_SUITE_ONLY=str(only))


def check(option_set, results, in_keras, capsys) -> dict[str, list]:
    kinds = judge(option_set, results, in_keras)
    counts = ", ".join(f"{len(tests)} {k}" for k, tests in kinds.items())
    with capsys.disabled():
        print(f"\nKeras's own tests under {option_set}: {counts}")
    assert kinds["passed"]
    assert kinds["failed"] == []
    return kinds


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """The results of a part of the tests, and those in plain Keras of what
    failed: each in one process for all sets of options, as to collect Keras's
    tests takes longer than to run so few of them."""
    folder = tmp_path_factory.mktemp("part")
    results = run(",".join(SLOW), folder, KMEM_SUITE_EVERY=str(PART))
    failed = [k for k, row in results.items() if row["outcome"] == "failed"]
    return results, functools.cache(lambda: run_plainly(failed, folder))


@pytest.mark.slow
@pytest.mark.parametrize("option_set", SLOW)
def test_a_part_of_what_passes_in_keras_passes(option_set, part, capsys):
    results, in_keras = part
    own = {k: v for k, v in results.items() if v["options"] == option_set}
    check(option_set, own, lambda tests: in_keras(), capsys)


@pytest.mark.exhaustive
@pytest.mark.parametrize("option_set", SETS)
def test_all_that_passes_in_keras_passes(option_set, tmp_path, capsys):
    results = run(option_set, tmp_path)
    in_keras = functools.partial(run_plainly, folder=tmp_path)
    kinds = check(option_set, results, in_keras, capsys)
    for entry in expected.LISTED:
        if option_set in entry.sets:
            assert any(entry.names(option_set, t) for t in kinds["listed"])
