"""The core of DTR passes its own tests, which are in C++."""

import pathlib
import subprocess

import pytest

from kmem.base import building

TESTS = sorted(
    path.stem
    for path in (building.sources_folder() / "tests").glob("dtr_*_test.cc")
)
WARNINGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-g1")
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)

needs_compiler = pytest.mark.skipif(
    building.find_compiler() is None, reason="needs a C++ compiler"
)


def compile_core(folder: pathlib.Path, *flags: str) -> list[pathlib.Path]:
    """Object files of all that speaks no TensorFlow."""
    objects = []
    for source in sorted((building.sources_folder() / "dtr").glob("*.cc")):
        if source.name.startswith("tf_"):
            continue
        objects.append(folder / f"{source.stem}.o")
        command = [*building.find_compiler(), *WARNINGS, *flags]
        command += ["-c", source, "-o", objects[-1]]
        subprocess.run(command, check=True)
    return objects


def run_test(name: str, objects: list[pathlib.Path], *flags: str) -> None:
    folder = building.sources_folder()
    program = objects[0].parent / name
    command = [*building.find_compiler(), *WARNINGS, *flags, "-I", folder]
    command += [folder / "tests" / f"{name}.cc", *objects, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    return compile_core(tmp_path_factory.mktemp("core"), "-O1")


@needs_compiler
@pytest.mark.parametrize("name", TESTS)
def test_the_core_passes_its_own_tests(core, name):
    run_test(name, core, "-O1")


@pytest.mark.slow
@needs_compiler
def test_the_core_touches_no_memory_that_is_not_its_own(tmp_path):
    objects = compile_core(tmp_path, "-O1", *SANITIZERS)
    for name in TESTS:
        run_test(name, objects, "-O1", *SANITIZERS)


def test_there_are_tests():
    assert len(TESTS) >= 4
