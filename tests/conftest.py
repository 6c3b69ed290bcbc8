"""Imported before every test: kmem comes before the first TensorFlow op."""

import gc
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

# TensorFlow's notes on its start would stand between the tests' own output.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import kmem
from kmem.base import building
from kmem.base import cache
from kmem.base import native
from kmem.base.store import Store

HAS_COMPILER = building.find_compiler() is not None

if HAS_COMPILER:
    native.allocator()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
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


@pytest.fixture(autouse=True)
def _nothing_from_other_runs(tmp_path, monkeypatch):
    def folder(store):
        return tmp_path / "kmem" / store.name

    monkeypatch.setattr(Store, "folder", folder)


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
            "XDG_CACHE_HOME": str(cache),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def run(self, code: str, **environment: str) -> tuple[int, str, str]:
        """Returns the exit status, standard output and standard error."""
        # Ends the process if it takes too long: only one that hangs does,
        # however busy the machine is.
        process = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return process.returncode, process.stdout, process.stderr


@pytest.fixture
def fresh_python(tmp_path):
    """Fresh processes in which the native library is not built."""
    return Python(tmp_path / "cache")


@pytest.fixture(scope="session")
def python():
    """Fresh processes in which the native library is built, if it can be."""
    return Python(cache.folder().parent)
