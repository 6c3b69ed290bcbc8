"""A report as one page of HTML, with nothing that lies elsewhere.

The pictures are within the page, so that it can be sent and kept, and opens
without a network; they lie beside it as well, for a talk or a paper.
"""

import base64
import datetime
import html
import importlib.resources
import string

import keras
import tensorflow as tf

from kmem.base.sizes import format_size
from kmem.base.versions import __version__
from kmem.budget.report import Choice
from kmem.budget.report import MemoryReport
from kmem.budget.report import describe

_MAX_ROWS = 30


def write(report: MemoryReport, name: str, pictures: dict[str, bytes]) -> str:
    """The page of a model, with pictures, as PNG, by their titles."""
    template = importlib.resources.files("kmem.reporting") / "page.html"
    sections = [
        *(_image(title, png) for title, png in pictures.items()),
        _section("Choices, the best first", _table(report)),
    ]
    plan = report.chosen.plan
    if plan is not None:
        summary = html.escape(plan.summary())
        sections.append(_section("The plan", f"<pre>{summary}</pre>"))
    if report.events:
        lines = "".join(f"<li>{html.escape(e)}</li>" for e in report.events)
        sections.append(_section("While it trained", f"<ol>{lines}</ol>"))
    page = string.Template(template.read_text(encoding="utf-8"))
    return page.substitute(
        model=html.escape(name),
        headline=html.escape(_headline(report, name)),
        options=html.escape(describe(report.chosen.options)),
        measured=html.escape(_measured(report)),
        sections="\n".join(sections),
        versions=f"kmem {__version__}, tensorflow {tf.__version__}, "
        f"keras {keras.__version__}, {datetime.date.today().isoformat()}",
    )


def _headline(report: MemoryReport, name: str) -> str:
    peak = format_size(report.chosen.predicted_peak_bytes)
    before = format_size(report.plain.predicted_peak_bytes)
    budget = format_size(report.budget_bytes)
    if report.is_plain:
        return f"A step of {name} takes {peak}, and fits in {budget} as it is"
    return (
        f"A step of {name} takes {peak} instead of {before}, within a budget "
        f"of {budget}, for {report.slowdown(report.chosen):.2f}x the time"
    )


def _measured(report: MemoryReport) -> str:
    measured = report.chosen.measured_peak_bytes
    if measured is None:
        return "Peaks and times are predictions."
    return (
        f"The peak that was measured: {format_size(measured)}. The other "
        "peaks and times are predictions."
    )


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>\n{content}</section>"


def _image(title: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    alt = html.escape(title)
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


def _table(report: MemoryReport) -> str:
    choices = report.choices
    shown = choices[:_MAX_ROWS]
    if report.plain not in shown:
        shown[-1] = report.plain
    rows = [_row(report, choice, choices.index(choice) + 1) for choice in shown]
    left_out = len(choices) - len(shown)
    note = f"<p>{left_out} more are not shown.</p>" if left_out else ""
    return (
        "<table><thead><tr><th></th><th>options</th><th>peak</th><th>measured</th>"
        "<th>step, ms</th><th>time</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{note}"
    )


def _row(report: MemoryReport, choice: Choice, number: int) -> str:
    measured = choice.measured_peak_bytes
    peak = choice.predicted_peak_bytes
    over = ' class="over"' if peak > report.budget_bytes else ""
    kind = ' class="chosen"' if choice == report.chosen else ""
    return (
        f"<tr{kind}><td>{number}</td><td>{html.escape(describe(choice.options))}</td>"
        f"<td{over}>{format_size(peak)}</td>"
        f"<td>{'' if measured is None else format_size(measured)}</td>"
        f"<td>{choice.predicted_seconds * 1e3:.1f}</td>"
        f"<td>{report.slowdown(choice):.2f}x</td></tr>"
    )
