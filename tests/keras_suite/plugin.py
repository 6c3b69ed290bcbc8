"""A pytest plugin: each `fit` of Keras's own tests trains through kmem.

`KMEM_SUITE_OPTIONS` names a set of `options.SETS`, `KMEM_SUITE_RESULTS` the
file that gets a line for each test. `KMEM_SUITE_ONLY` is a file that names
tests. With `KMEM_SUITE_EVERY`, as "16", the options may be several sets,
"none,dtr": of each 16 tests the first runs under the first set, the next one
under the next set, and the rest is left out.
"""

import functools
import inspect
import json
import os
import pathlib
import sys
import time
import types

import pytest
from keras_suite import kinds
from keras_suite import options
from keras_suite import traces

import kmem

# What Keras's repository has beside its tests, and what they import without
# a use on TensorFlow.
_STUBS = ("jax", "conftest")

# Of the test that runs: its set of options, its outcome, how it trained, what
# that raised.
_test: dict = {}
# By test: its set of options.
_sets: dict[str, str] = {}


def _stub_modules() -> None:
    import keras

    for name in _STUBS:
        sys.modules.setdefault(name, types.ModuleType(name))

    def skip_if_backend(backend, reason):
        same = keras.backend.backend() == backend
        return pytest.mark.skipif(same, reason=reason)

    sys.modules["conftest"].skip_if_backend = skip_if_backend


def pytest_configure(config):
    config.addinivalue_line("markers", "requires_trainable_backend: on all")
    _stub_modules()
    _make_trainers_models()
    _route()


def _make_trainers_models() -> None:
    """The models of Keras's `trainer_test` are a layer and a `Trainer`; with
    this one they are a `keras.Model` as well, made as they were."""
    import keras
    from keras.src import models
    from keras.src.backend.tensorflow import trainer

    plain = trainer.TensorFlowTrainer

    class TrainerModel(models.Model):
        def __init__(self, **kwargs):
            # As the base of a layer, or as the `Trainer` beside it.
            init = super().__init__ if kwargs else lambda: plain.__init__(self)
            init(**kwargs)

        def __init_subclass__(cls):
            super().__init_subclass__()
            # The layer's own `build` and `call` come before a model's.
            others = [x for x in cls.__bases__ if x is not TrainerModel]
            if TrainerModel in cls.__bases__:
                layers = [x for x in others if x is not keras.layers.Layer]
                cls.__bases__ = (*layers, TrainerModel)

    trainer.TensorFlowTrainer = TrainerModel


def _route() -> None:
    """Has `keras.Model.fit` train under the options of the test that runs;
    with `None`, as it is."""
    import keras

    plain = keras.Model.fit

    @functools.wraps(plain)
    def fit(model, *args, **kwargs):
        _test["kinds"].append(kinds.kind(model, args, kwargs))
        memory_options = options.SETS[_test["options"]]
        # Keras's own, for whatever trains within.
        del keras.Model.fit
        try:
            if memory_options is None:
                return plain(model, *args, **kwargs)
            return _fit_under(memory_options, model, args, kwargs)
        finally:
            keras.Model.fit = fit

    keras.Model.fit = fit


_OF_A_WRAPPED_MODEL = (
    "fit",
    "train_on_batch",
    "evaluate",
    "predict",
    "memory_options",
    "memory_report",
)


def _fit_under(memory_options, model, args, kwargs):
    _unwrap(model)
    kmem.wrap(model)
    before = traces.Traces(model)
    try:
        return model.fit(*args, **kwargs, **memory_options)
    except BaseException as error:
        _test["raised"].append(f"{type(error).__name__}: {error}")
        raise
    finally:
        try:
            before.check()
        finally:
            _unwrap(model)


def _unwrap(model) -> None:
    # A wrapped model's `fit` comes before the one that counts and checks.
    for name in _OF_A_WRAPPED_MODEL:
        vars(model).pop(name, None)


def pytest_collection_modifyitems(config, items):
    """Leaves those out that do not train, and those that are not asked for."""
    chosen = [item for item in items if _trains(item)]
    only = os.environ.get("KMEM_SUITE_ONLY")
    if only is not None:
        names = set(pathlib.Path(only).read_text().splitlines())
        chosen = [item for item in chosen if _name(item.nodeid) in names]
    sets = os.environ["KMEM_SUITE_OPTIONS"].split(",")
    every = int(os.environ.get("KMEM_SUITE_EVERY", 1))
    for number, name in enumerate(sets):
        _sets.update((item.nodeid, name) for item in chosen[number::every])
    chosen = [item for item in chosen if item.nodeid in _sets]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = chosen


def _trains(item) -> bool:
    return ".fit(" in inspect.getsource(item.function)


def pytest_runtest_logstart(nodeid):
    _test.clear()
    _test.update(test=_name(nodeid), options=_sets[nodeid])
    _test.update(outcome="passed", kinds=[], raised=[], begun=time.time())


def pytest_runtest_logreport(report):
    if report.outcome != "passed":
        _test["outcome"] = report.outcome
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _test["message"] = str(crash.message if crash else "")[:2000]
    if report.when == "teardown":
        _test["seconds"] = round(time.time() - _test.pop("begun"), 2)
        _write(_test)


def _write(result: dict) -> None:
    """Adds a line, so that a run that is ended has those of its tests."""
    with open(os.environ["KMEM_SUITE_RESULTS"], "a") as file:
        file.write(json.dumps(result) + "\n")


def _name(nodeid: str) -> str:
    """`trainers/trainer_test.py::TestTrainer::test_fit`, wherever it lies."""
    return nodeid.rsplit("keras/src/", 1)[-1]
