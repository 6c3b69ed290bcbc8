"""The command line, called in this process."""

import argparse
import sys
import types

import pytest
import tensorflow as tf

from kmem.base import building
from kmem.base import cache
from kmem.base import versions
from kmem.commands import cli


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
    monkeypatch.setattr(building, "find_library", lambda: None)
    monkeypatch.setattr(building, "build", lambda force: tmp_path / str(force))
    assert cli.main(["build", "--force"]) == 0
    assert capsys.readouterr().out == f"built: {tmp_path}/True\n"


def test_what_is_kept_on_disk_can_be_cleared(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["cache", "clear"]) == 0
    cache.make_private(cache.folder())
    for name in ("old.so", "lock"):
        (cache.folder() / name).write_bytes(bytes(2000))
    capsys.readouterr()

    assert cli.main(["cache"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert cli.main(["cache", "clear"]) == 0
    cleared = capsys.readouterr().out.splitlines()

    assert shown[0] == str(cache.folder())
    assert [line.split()[-1] for line in shown[1:]] == ["lock", "old.so"]
    assert cleared[0] == f"removed 1 files of {cache.folder()}"
    # Another process may wait for it.
    assert [path.name for path in cache.files()] == ["lock"]


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


COMMANDS = ("info", "build", "cache", *cli._MODULES)


@pytest.mark.parametrize(
    "argv",
    [["nothing"], *([name, "--nothing"] for name in COMMANDS)],
    ids=" ".join,
)
def test_bad_use_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "usage: kmem" in errors


@pytest.mark.parametrize("argv", [[], *([name] for name in COMMANDS)])
def test_help_has_an_example(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*argv, "--help"])
    assert caught.value.code == 0
    name = " ".join(["kmem", *argv])
    assert f"Example: {name}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command, message",
    [
        ("plan {here}/no.keras --batch 8", "model: must be a file that exists"),
        ("plan {file} --batch none", "--batch: must be a positive integer"),
        ("plan {file}", "the following arguments are required: --batch"),
        ("plan {file} --batch 8 --budget 2XB", "--budget: must be a size"),
        ("plan {file} --batch 8 --budget 1.5", "--budget: must be a size"),
        ("plan {file} --batch 8 --solver no", "--solver: invalid choice"),
        ("plan {file} --batch 8 --output {here}/no/a.json", "in a folder that"),
        ("plan {file} --batch 8 --output {here}/plan", "must end in .json"),
        (
            "plan {file} --batch 8 --plot {here}/plan",
            "must end in .png or .svg",
        ),
        ("sweep {here} --batch 8", "model: must be a file that exists"),
        ("sweep {file} --batch 8 --plot {here}", "must be a file in a folder"),
        ("sweep {file} --batch 8 --thresholds 0", "--thresholds: must be a"),
        ("report {file} --batch 8", "arguments are required: --budget"),
        ("simulate {here}/no.log", "trace: must be a file that exists"),
        ("simulate {file} --heuristic no", "--heuristic: invalid choice"),
        ("simulate {file} --seed -1", "--seed: must be an integer from 0"),
        ("simulate {file} --seed 18446744073709551616", "--seed: must be an"),
        ("simulate {file} --seed 0.5", "--seed: must be an integer from 0"),
        ("sweep {file} --batch 8 --steps 0", "--steps: must be a positive"),
        ("demo --output {here}/no/a.png", "must be a file in a folder that"),
        ("launch {here}/no.py", "script: must be a file that exists"),
        ("launch", "the following arguments are required: script"),
    ],
)
def test_a_wrong_argument_is_named(command, message, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as caught:
        cli.main(command.format(here=tmp_path, file=file).split())
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.startswith(f"usage: kmem {command.split()[0]}")


def test_an_error_of_tensorflow_is_one_message(monkeypatch, capsys):
    def build(force):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    monkeypatch.setattr(building, "build", build)
    assert cli.main(["build"]) == 1
    assert capsys.readouterr().err == "kmem build: OOM\n"


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kmem {versions.__version__}\n"


def test_a_command_may_live_in_a_module_of_its_own(monkeypatch):
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int)
        parser.set_defaults(run=lambda args: args.size)

    module = types.ModuleType("kmem.commands.an_example")
    module.add_an_example = add
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli._MODULES, "an-example", "Example.")
    assert cli.main(["an-example", "--size", "7"]) == 7
