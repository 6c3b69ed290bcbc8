"""A page and pictures of what `fit(memory_budget=...)` chose, and from what.

The page is one file of HTML, with the pictures in it, so that it can be sent
and kept, and opens without a network; they lie beside it as well, for a talk
or a paper.
"""

import base64
import datetime
import html
import importlib.resources
import io
import os
import pathlib
import string
import struct

import keras
import tensorflow as tf

from kmem.base.sizes import format_size
from kmem.base.versions import __version__
from kmem.budget.report import Choice
from kmem.budget.report import MemoryReport
from kmem.budget.report import describe
from kmem.fit.mechanisms import as_in_a_step
from kmem.keras_graph import profiling
from kmem.planning import picture
from kmem.reporting import pictures
from kmem.step import batches

_MAX_ROWS = 30


def report(
    model: keras.Model,
    path: str | os.PathLike,
    log_dir: str | os.PathLike | None = None,
) -> None:
    """Draws what a model's training needed, and what other options need.

    The page shows what memory is used for over a step before and after, all
    options that were tried with their times and peaks, and the plan. It
    needs no network, and each of its pictures lies beside it as a PNG.

    Args:
        model: A model that was trained with `fit(memory_budget=...)`, which
            leaves its `model.memory_report`.
        path: Where to write the page, such as `"report.html"`. The pictures
            are `report_step.png` and the like.
        log_dir: A folder of TensorBoard's, to have the pictures there as well.

    Raises:
        ValueError: If the model has no report.
        ImportError: If matplotlib is missing.
        OSError: If the files cannot be written.

    Example:

    ```python
    import keras
    import numpy as np

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.zeros((64, 8)), np.zeros((64, 1))
    kmem.wrap(model).fit(x, y, memory_budget="1GB", verbose=0)
    kmem.report(model, "report.html")
    ```
    """
    memory_report = getattr(model, "memory_report", None)
    if not isinstance(memory_report, MemoryReport):
        raise ValueError(
            "`model` must have been trained with `fit(memory_budget=...)`, "
            "which leaves what is drawn here in `model.memory_report`. "
            f"Received: model={model.name}, memory_report={memory_report!r}"
        )
    path = pathlib.Path(path)
    drawn = _draw(memory_report, _profiled(model, memory_report))
    for name, (_, png) in drawn.items():
        path.with_name(f"{path.stem}_{name}.png").write_bytes(png)
    text = _page(memory_report, model.name, dict(drawn.values()))
    path.write_text(text, encoding="utf-8")
    if log_dir is not None:
        _write_images(drawn, log_dir)


def _profiled(model, memory_report: MemoryReport) -> pictures.Graphs:
    """The steps of the plain and the chosen options, unless a plan tells."""
    batch = batches.from_json(memory_report.batch)
    graphs = {}
    for choice in (memory_report.plain, memory_report.chosen):
        options = choice.options
        if choice.plan is not None:
            continue
        part = batches.part_of(batch, options.num_parts)
        with as_in_a_step(model, options):
            profile = profiling.profile(model, part, costs="flops")
        graphs[options] = profile.network.graph
    return graphs


def _draw(
    memory_report: MemoryReport, graphs: pictures.Graphs
) -> dict[str, tuple[str, bytes]]:
    """Each picture's name, with its title and itself as PNG."""
    step = pictures.draw_step(memory_report, graphs)
    figures = {
        "step": ("Memory over the step", step),
        "choices": ("What was tried", pictures.draw_choices(memory_report)),
    }
    plan = memory_report.chosen.plan
    if plan is not None:
        figures["plan"] = "The plan", picture.figure(plan)
    drawn = {}
    for name, (title, figure) in figures.items():
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
        drawn[name] = title, file.getvalue()
    return drawn


def _write_images(drawn, log_dir: str | os.PathLike) -> None:
    """Writes what `_draw` gives as images of step 0, without TensorBoard."""
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "images"
    writer = tf.summary.create_file_writer(str(log_dir))
    with writer.as_default(step=0):
        for name, (_, png) in drawn.items():
            # A PNG's header is of 24 bytes; the last 8 are its size.
            width, height = struct.unpack(">2I", png[16:24])
            image = [str(width).encode(), str(height).encode(), png]
            tf.summary.write(f"memory/{name}", image, metadata=metadata)
    writer.close()


def _page(report: MemoryReport, name: str, images: dict[str, bytes]) -> str:
    """The page of a model, with pictures, as PNG, by their titles."""
    template = importlib.resources.files("kmem.reporting") / "page.html"
    sections = [
        *(_image(title, png) for title, png in images.items()),
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
