"""The core of DTR passes its own tests, which are in C++."""

import subprocess

import pytest

from kmem.base import building

TESTS = sorted(
    path.stem
    for path in (building.sources_folder() / "tests").glob("dtr_*_test.cc")
)
# What touches memory that is not its own ends a program with an error, and
# what it computes is the same.
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-g1", "-O1")
FLAGS += ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

needs_compiler = pytest.mark.skipif(
    building.find_compiler() is None, reason="needs a C++ compiler"
)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Object files of all that speaks no TensorFlow."""
    folder = tmp_path_factory.mktemp("core")
    objects = []
    for source in sorted((building.sources_folder() / "dtr").glob("*.cc")):
        if source.name.startswith("tf_"):
            continue
        objects.append(folder / f"{source.stem}.o")
        command = [*building.find_compiler(), *FLAGS]
        command += ["-c", source, "-o", objects[-1]]
        subprocess.run(command, check=True)
    return objects


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", TESTS)
def test_the_core_passes_its_own_tests_in_memory_of_its_own(core, name):
    folder = building.sources_folder()
    program = core[0].parent / name
    command = [*building.find_compiler(), *FLAGS, "-I", folder]
    command += [folder / "tests" / f"{name}.cc", *core, "-o", program]
    subprocess.run(command, check=True)

    done = subprocess.run([program], stderr=subprocess.PIPE, text=True)

    assert (done.returncode, done.stderr) == (0, "")


def test_there_are_tests():
    assert len(TESTS) >= 4
