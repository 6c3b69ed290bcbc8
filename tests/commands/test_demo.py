"""`kmem demo`, as a user runs it; its parts where they can go wrong."""

import importlib.util
import math
import re

import pytest

from kmem.commands import cli
from kmem.commands import demo


# CI runs the demonstration itself, which checks its own story.
@pytest.mark.exhaustive
def test_the_demo_tells_its_story(python, native_library, tmp_path):
    path = tmp_path / "picture.png"
    status, output, errors = python.run(
        f"""
        import sys
        from kmem.commands import cli
        sys.exit(cli.main(["demo", "--output", {str(path)!r}]))
        """
    )
    assert status == 0, output + errors
    exact = [demo.BUDGET, demo.PLANNED, demo.EVICTING, demo.MICRO]
    rows = {
        label: re.search(f"^{re.escape(label)}  +(.*)$", output, re.M)
        for label in (demo.UNLIMITED, demo.PLAIN, *exact)
    }
    assert rows[demo.PLAIN][1].split() == "out of memory - - -".split()
    losses = []
    for label in (demo.UNLIMITED, *exact):
        peak, _, _, loss, _ = rows[label][1].split()
        losses.append(float(loss))
        assert (float(peak) < 72) == (label != demo.UNLIMITED)
    assert max(losses) - min(losses) < 1e-4
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def results(**changed):
    """What a demonstration gives, but for some of its runs."""
    good = {
        "UNLIMITED": demo.Result(loss=0.5, peak_bytes=90_000_000),
        "PLAIN": demo.Result(error="OOM"),
        "BUDGET": demo.Result(loss=0.5, peak_bytes=60_000_000),
        "MICRO": demo.Result(loss=0.5, peak_bytes=20_000_000),
    }
    return {getattr(demo, k): v for k, v in (good | changed).items()}


def test_every_run_has_a_bar_that_says_what_it_took(tmp_path, monkeypatch):
    """In words, for whoever sees no colours."""
    from matplotlib import figure

    drawn = []
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, path, dpi: drawn.append(self)
    )
    times = [float(time) for time in range(2 * demo.STEPS_PER_EPOCH)]
    runs = results()
    for result in runs.values():
        result.updates = [] if result.error else times
    demo._draw(runs, tmp_path / "memory.png")
    (axes,) = drawn[0].axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == list(runs)
    assert [text.get_text() for text in axes.texts] == [
        "90 MB",
        "out of memory",
        "60 MB, 1.0x the time, the same numbers",
        "20 MB, 1.0x the time, the same numbers",
    ]


def test_a_story_that_holds_has_no_problems():
    assert demo._problems(results()) == []


@pytest.mark.parametrize(
    "changed, problem",
    [
        ({"PLAIN": demo.Result(loss=0.5)}, "plain Keras fits"),
        ({"MICRO": demo.Result(error="OOM")}, "does not fit"),
        (
            {"BUDGET": demo.Result(loss=0.5, peak_bytes=72_000_001)},
            "does not fit",
        ),
        ({"MICRO": demo.Result(loss=0.50001)}, "the loss is off by 2.0e-05"),
        ({"MICRO": demo.Result(loss=math.nan)}, "the loss is off by nan"),
    ],
)
def test_a_story_that_does_not_hold_says_where(changed, problem):
    (line,) = demo._problems(results(**changed))
    assert line.startswith("kmem demo: ")
    assert problem in line


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == (
        "kmem demo: it needs scikit-learn and matplotlib: "
        'pip install "kmem[demo]"\n'
    )


def test_a_folder_that_does_not_exist_is_refused_at_once(tmp_path, capsys):
    path = tmp_path / "nowhere" / "memory.png"
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--output", str(path)])
    assert caught.value.code == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "must be a file in a folder that exists" in errors


def test_the_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", "--help"])
    assert caught.value.code == 0
    assert "Example: kmem demo --output memory.png" in capsys.readouterr().out
