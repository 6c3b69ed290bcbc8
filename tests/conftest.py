"""Imported before every test: kmem comes before the first TensorFlow op."""

import gc
import os
import pathlib
import re
import textwrap

import forked
import pytest
import shallow
import traced_once

# TensorFlow's notes on its start would stand between the tests' own output.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# No test trains by what another one has chosen.
os.environ.setdefault("KMEM_CACHE", "0")
# Time would go into making code quick that runs a few times.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import kmem
from kmem.base import building
from kmem.base import cache
from kmem.base import native

HAS_COMPILER = building.find_compiler() is not None

if HAS_COMPILER:
    native.allocator()
traced_once.install()
shallow.install()
# TensorFlow makes many objects in a trace, and few of them are garbage.
gc.set_threshold(10_000, 20, 20)


def pytest_configure(config):
    """Hides GPUs from tests that do not ask for one: their numbers are those
    of a CPU."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


# The files that take longest, in that order: they begin first, so that no
# process is left with one of them when the others have ended.
LONGEST = """
    test_uses.py sharding/test_sharding.py dtr/test_dtr_fit.py test_examples.py
    step/test_updates.py remat/test_remat.py budget/test_planner.py
    step/test_batches_and_parts.py budget/test_planned_numbers.py
    base/test_native.py budget/test_memory_budget.py sharding/test_resuming.py
    graph/test_control.py sharding/test_sharding_fit.py test_model.py
    remat/test_remat_memory.py step/test_microbatch_memory.py
    step/test_keras_accumulation.py test_keras_suite.py test_documentation.py
    dtr/test_dtr_core.py step/test_mirrored.py test_memory.py
    multilevel/test_multilevel_mirrored.py sharding/test_sharding_engine.py
""".split()


def pytest_collection_finish():
    # What all tests share, TensorFlow above all, is half of what Python would
    # look through at each of its collections.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    tests = pathlib.Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (
            item.get_closest_marker("early") is None,
            places.get(item.path, len(LONGEST)),
        )
    )
    if native.is_registered():
        return
    skip = pytest.mark.skip(reason="needs the native library, or a compiler")
    for item in items:
        if "native_library" in getattr(item, "fixturenames", ()):
            item.add_marker(skip)


@pytest.fixture
def native_library():
    """For tests that need kmem's allocator: skipped without a compiler."""
    return native.allocator()


@pytest.fixture(autouse=True, scope="module")
def _later_collections_are_quick():
    yield
    # TensorFlow keeps the graphs of models that plain Keras trained. Python
    # would look through all of them whenever something asks it to collect.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_limit_remains():
    yield
    if native.is_registered():
        kmem.memory.limit(None, device="CPU")


@pytest.fixture
def saved_model(tmp_path):
    """The path of a small, compiled model."""
    import keras

    layers = [keras.layers.Dense(64, "relu") for _ in range(4)]
    made = keras.Sequential([keras.Input((64,)), *layers])
    made.compile("sgd", "mse")
    path = tmp_path / "model.keras"
    made.save(path)
    return str(path)


class Python:
    """Runs code in a fresh Python that has a cache folder of its own."""

    def __init__(self, cache: pathlib.Path) -> None:
        self.cache = cache
        self.environment = {
            **os.environ,
            "MPLBACKEND": "Agg",
            "XDG_CACHE_HOME": str(cache),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def run(self, code: str, **environment: str) -> tuple[int, str, str]:
        """Returns the exit status, standard output and standard error."""
        environment = self.environment | environment
        return forked.run(textwrap.dedent(code), environment)

    def run_script(self, path, *arguments) -> tuple[int, str, str]:
        """The same, of a file that is the main program."""
        return forked.run(
            "import runpy, sys; runpy.run_path(sys.argv[0], {}, '__main__')",
            self.environment,
            argv=(str(path), *arguments),
        )


@pytest.fixture
def fresh_python(tmp_path):
    """Fresh processes in which the native library is not built."""
    return Python(tmp_path / "cache")


@pytest.fixture(scope="session")
def python():
    """Fresh processes in which the native library is built, if it can be."""
    return Python(cache.folder().parent)
