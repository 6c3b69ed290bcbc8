"""The command line, called in this process."""

import argparse
import sys
import types

import pytest

from kmem import cache
from kmem import cli
from kmem import native
from kmem import versions


def test_info_shows_what_a_bug_report_needs(capsys):
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert rows["kmem"] == versions.__version__
    assert set(rows) >= {"TensorFlow", "Keras", "NumPy", "Python", "devices"}
    assert rows["cache"] == f"folder    {cache.folder()}"
    assert "CPU:0" in rows["devices"]


def test_info_tells_of_a_library_that_is_not_built(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    assert "not built (run `kmem build`)" in output
    assert "none found" in output


def test_build_names_the_library(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "find_library", lambda: None)
    monkeypatch.setattr(native, "build", lambda force: tmp_path / str(force))
    assert cli.main(["build", "--force"]) == 0
    assert capsys.readouterr().out == f"built: {tmp_path}/True\n"


def test_an_error_is_one_message_and_no_traceback(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cli.main(["build"]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("kmem build: kmem needs a C++ compiler")
    assert "Traceback" not in errors


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "usage: kmem" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["nothing"], ["info", "--nothing"]])
def test_bad_use_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2


@pytest.mark.parametrize("argv", [["--help"], ["info", "--help"]])
def test_help_has_an_example(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    assert "Example: kmem info" in capsys.readouterr().out


def test_a_command_may_live_in_a_module_of_its_own(monkeypatch):
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int)

    module = types.ModuleType("kmem_example")
    module.add_arguments = add_arguments
    module.run = lambda args: args.size
    monkeypatch.setitem(sys.modules, "kmem_example", module)
    monkeypatch.setitem(cli._MODULES, "example", ("kmem_example", "Example."))
    assert cli.main(["example", "--size", "7"]) == 7
