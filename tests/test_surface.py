"""What `import kmem` gives, and what it costs."""

import ast
import dataclasses
import importlib.resources
import inspect
import pathlib
import subprocess
import sys
import types
import typing
from typing import Union

import keras
import numpy as np
import pytest

import kmem
from kmem.model import FitArguments
from kmem.options import MemoryArguments

# Of the specification, and what has become public besides.
NAMES = """
    DTR Estimate Genetic GradientAccumulation LargestBatch MemoryOptions
    MicroBatches MixedPrecision Model Plan Remat ShardedStrategy Sharding
    Sweep callbacks distributed dtr estimate largest_batch losses memory
    multilevel optimizers plan planning profile remat report sweep wrap
""".split()


def test_the_public_names_are_shown_and_nothing_else():
    assert dir(kmem) == NAMES
    assert kmem.__all__ == NAMES


def test_all_of_them_can_be_imported_at_once():
    names = {}
    exec("from kmem import *", names)
    assert names.keys() - {"__builtins__"} == set(NAMES)
    assert names["Model"] is kmem.Model
    assert names["memory"].peak is kmem.memory.peak


def test_editors_are_told_what_is_imported_later():
    tree = ast.parse(pathlib.Path(kmem.__file__).read_text(encoding="utf-8"))
    for_editors = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.name: node.module
        for node in for_editors.body
        for alias in node.names
    }
    assert told == kmem._MODULE_OF


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kmem.nothing  # noqa: B018


def test_an_editor_completes_the_arguments_of_fit():
    known = typing.get_type_hints(FitArguments)
    of_keras = set(inspect.signature(keras.Model.fit).parameters) - {"self"}
    options = {field.name for field in dataclasses.fields(kmem.MemoryOptions)}

    assert known.keys() == of_keras | options
    assert typing.get_type_hints(MemoryArguments).keys() == options
    for function in (kmem.Model.fit, kmem.callbacks.MemoryOptions.__init__):
        arguments = inspect.signature(function).parameters.values()
        (named,) = [a for a in arguments if a.kind is a.VAR_KEYWORD]
        assert "Unpack" in str(named.annotation)


# Of the specification: what each memory argument of `fit` may be, besides
# `None`, which is off.
FORMS = {
    "memory_budget": (8 * 10**9, "8GB", 0.5),
    "microbatches": (4, kmem.MicroBatches(4)),
    "gradient_accumulation_steps": (4, kmem.GradientAccumulation(4)),
    "mixed_precision": (
        *("bfloat16", "float16"),
        kmem.MixedPrecision("bfloat16"),
    ),
    "remat": ("auto", "2GB", 0.3, kmem.Remat(), "plan.json"),
    "dtr": (True, "5GB", kmem.DTR("5GB")),
    "sharding": (
        *("full", "gradients", "optimizer"),
        kmem.Sharding("full", cpu_offload=True),
    ),
    "chunked_loss": (True,),
    "chunked_attention": (True,),
}


def admits(hint, value) -> bool:
    """Whether a value is of a type, as an editor sees it."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is Union:
        return any(admits(each, value) for each in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    return isinstance(value, typing.get_origin(hint) or hint)


@pytest.mark.parametrize("name", FORMS)
def test_each_memory_argument_takes_what_the_specification_says(name):
    hint = typing.get_type_hints(MemoryArguments)[name]

    assert not admits(hint, object())
    for value in (*FORMS[name], None):
        assert admits(hint, value), value
        if value != "plan.json":  # A file that is not there.
            options = kmem.MemoryOptions(**{name: value})
            assert (getattr(options, name) is None) == (value is None)


def test_a_plan_is_a_memory_argument_as_well():
    hint = typing.get_type_hints(MemoryArguments)["remat"]

    assert kmem.Plan in typing.get_args(hint)


# Of Keras: nobody has to give them by name.
BY_POSITION = """
    x y batch_size epochs verbose callbacks validation_split validation_data
    shuffle class_weight sample_weight initial_epoch steps_per_epoch
    validation_steps validation_batch_size validation_freq
""".split()


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("make", [kmem.Model, keras.Model])
def test_fit_takes_keras_s_own_arguments_by_position(make, options):
    of_keras = list(inspect.signature(keras.Model.fit).parameters)
    assert of_keras[1:] == BY_POSITION
    inputs = keras.Input((4,))
    model = kmem.wrap(make(inputs, keras.layers.Dense(1)(inputs)))
    model.compile("sgd", "mse")
    x, weights = np.ones((12, 4)), np.ones(12)
    ends = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(batch)
    )

    history = model.fit(
        *(x, x[:, :1], 4, 3, 0, [callback], 0.0, (x, x[:, :1])),
        *(False, None, weights, 1, None, 1, 6, 1),
        **options,
    )

    # Two of the three epochs, with three batches each.
    assert history.epoch == [1, 2]
    assert ends == [0, 1, 2, 0, 1, 2]
    assert "val_loss" in history.history


def test_its_types_are_for_users_as_well():
    assert (importlib.resources.files("kmem") / "py.typed").is_file()


def test_modules_are_imported_when_they_are_used(python):
    status, output, errors = python.run("""
        import sys
        import kmem
        print([m for m in ("kmem.model", "kmem.memory") if m in sys.modules])
        kmem.Model
        print([m for m in ("kmem.model", "kmem.memory") if m in sys.modules])
    """)
    assert status == 0, errors
    assert output == "[]\n['kmem.model', 'kmem.memory']\n"


HELPS = """
import contextlib
import io
import sys
sys.argv = ["kmem"]
from kmem.commands import cli

helps = [[name, "--help"] for name in ("info", "build", *cli._MODULES)]
for argv in (["--help"], ["--version"], *helps):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            cli.main(argv)
        except SystemExit as stop:
            assert stop.code == 0
    assert "kmem" in shown.getvalue()
print({"tensorflow", "keras", "numpy"} & sys.modules.keys())
"""


def test_help_and_version_need_no_framework():
    process = subprocess.run(
        [sys.executable, "-c", HELPS], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert (process.stdout, process.stderr) == ("set()\n", "")
