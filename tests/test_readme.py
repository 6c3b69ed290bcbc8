"""README's numbers and picture are those of a table in benchmarks/."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = (ROOT / "benchmarks" / "headline.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_picture_is_drawn_from_the_table():
    path = ROOT / "benchmarks" / "headline_picture.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    headline_picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(headline_picture)
    picture = (ROOT / "docs" / "headline.svg").read_text(encoding="utf-8")
    assert headline_picture.draw(TABLE) == picture


def test_the_rows_of_the_headline_are_those_of_the_table():
    rows = re.findall(
        r"^\| (\w+) \| [^|]*\| (\d+)[^|]*\| (\d+) \| ([\d.]+) ",
        README,
        re.MULTILINE,
    )
    assert len(rows) == 8
    measured = [
        (model, batch, f"{float(peak):.0f}", time)
        for model, batch, peak, time in re.findall(
            r"^\| (\w+) \| [^|]*\| [\d.]+ \| (\d+) \| ([\d.]+) \| ([\d.]+) ",
            TABLE,
            re.MULTILINE,
        )
    ]
    assert set(rows) <= set(measured)
