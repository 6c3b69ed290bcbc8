"""A page and pictures of what `fit(memory_budget=...)` chose, and from what."""

import io
import os
import pathlib
import struct

import keras
import tensorflow as tf

from kmem.budget.report import MemoryReport
from kmem.fit.mechanisms import as_in_a_step
from kmem.keras_graph import profiling
from kmem.planning import picture
from kmem.reporting import page
from kmem.reporting import pictures
from kmem.step import batches


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
    text = page.write(memory_report, model.name, dict(drawn.values()))
    path.write_text(text, encoding="utf-8")
    if log_dir is not None:
        by_name = {name: png for name, (_, png) in drawn.items()}
        _write_images(by_name, log_dir)


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


def _write_images(drawn: dict[str, bytes], log_dir: str | os.PathLike) -> None:
    """Writes PNGs as images of step 0, without the package TensorBoard."""
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "images"
    writer = tf.summary.create_file_writer(str(log_dir))
    with writer.as_default(step=0):
        for name, png in drawn.items():
            # A PNG's header is of 24 bytes; the last 8 are its size.
            width, height = struct.unpack(">2I", png[16:24])
            image = [str(width).encode(), str(height).encode(), png]
            tf.summary.write(f"memory/{name}", image, metadata=metadata)
    writer.close()
