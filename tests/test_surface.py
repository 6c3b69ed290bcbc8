"""What `import kmem` gives, and what it costs."""

import ast
import dataclasses
import importlib.resources
import inspect
import pathlib
import typing

import keras
import pytest

import kmem
from kmem.model import FitArguments
from kmem.options import MemoryArguments

# Of the specification, and what has become public besides.
NAMES = """
    DTR Genetic GradientAccumulation MemoryOptions MicroBatches MixedPrecision
    Model Plan Remat ShardedStrategy Sharding Sweep callbacks distributed dtr
    memory multilevel plan planning profile remat report sweep wrap
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


def test_help_and_version_need_no_framework(python):
    status, output, errors = python.run("""
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
    """)
    assert (status, output, errors) == (0, "set()\n", "")
