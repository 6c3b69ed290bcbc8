"""Keras's own tests, in each of which `fit` trains through kmem.

They are those that the installed Keras brings. A part of them runs with the
slow tests, other ones under each set of options; all of them with
`pytest -m exhaustive tests/test_keras_suite.py`. They run in plain Keras first:
those in which nothing trains, or that fail there, say nothing of kmem. Without
an option all others run, and under each set those that train a model, compiled
and with arguments, of kinds that none before them has.
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
from keras_suite import kinds
from keras_suite import options

KERAS = pathlib.Path(keras.__file__).parent / "src"
# All whose models train: also those of its layers' tests would.
FOLDERS = ("trainers", "callbacks", "models", "optimizers", "saving")
FOLDERS += ("distillation",)
# To import the others takes longer than to run a part of the tests.
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((KERAS / folder).rglob("*_test.py"))
    if ".fit(" in path.read_text(encoding="utf-8")
]
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
            *FILES,
        ],
        cwd=folder,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "KMEM_SUITE_OPTIONS": option_sets,
            "KMEM_SUITE_RESULTS": str(results),
            # Half of the time would go into code that runs a few times.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
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
    sorts = {"passed": [], "listed": [], "failed": [], "not in Keras": []}
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
            sorts["listed"].append(test)
        elif failed:
            unlisted.append(test)
        elif listed:
            sorts["failed"].append(f"{test} passes, and is listed")
        elif result["outcome"] == "passed":
            sorts["passed"].append(test)
    if unlisted:
        alone = in_keras(unlisted)
        for test in unlisted:
            fails = alone[test]["outcome"] != "passed"
            message = f"{test}: {results[test].get('message')}"
            sorts["not in Keras" if fails else "failed"].append(message)
    return sorts


def run_only(tests, option_set, folder) -> dict[str, dict]:
    """Runs some of Keras's tests."""
    only = folder / "only.txt"
    only.write_text("\n".join(tests))
    return run(option_set, folder, KMEM_SUITE_ONLY=str(only))


def check(option_set, results, in_keras, capsys) -> dict[str, list]:
    sorts = judge(option_set, results, in_keras)
    counts = ", ".join(f"{len(tests)} {k}" for k, tests in sorts.items())
    with capsys.disabled():
        print(f"\nKeras's own tests under {option_set}: {counts}")
    assert sorts["passed"]
    assert sorts["failed"] == []
    return sorts


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """The results of a part of the tests, and those in plain Keras of what
    failed: each in one process for all sets of options, as to collect Keras's
    tests takes longer than to run so few of them."""
    folder = tmp_path_factory.mktemp("part")
    results = run(",".join(SLOW), folder, KMEM_SUITE_EVERY=str(PART))
    failed = [k for k, row in results.items() if row["outcome"] == "failed"]
    return results, functools.cache(lambda: run_only(failed, "plain", folder))


@pytest.mark.slow
@pytest.mark.parametrize("option_set", SLOW)
def test_a_part_of_what_passes_in_keras_passes(option_set, part, capsys):
    results, in_keras = part
    own = {k: v for k, v in results.items() if v["options"] == option_set}
    check(option_set, own, lambda tests: in_keras(), capsys)


@pytest.fixture(scope="module")
def in_keras(tmp_path_factory):
    """The results of all tests in plain Keras."""
    return run("plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("option_set", SETS)
def test_all_that_passes_in_keras_passes(
    option_set, in_keras, tmp_path, capsys
):
    passed = {k: v for k, v in in_keras.items() if v["outcome"] == "passed"}
    trained = [test for test, result in passed.items() if result["kinds"]]
    tests = trained if option_set == "none" else kinds.with_new(passed)
    results = run_only(tests, option_set, tmp_path)
    assert results.keys() == set(tests)
    sorts = check(option_set, results, lambda tests: in_keras, capsys)
    for entry in expected.LISTED:
        named = {test for test in tests if entry.names(option_set, test)}
        assert not named or named & set(sorts["listed"])
