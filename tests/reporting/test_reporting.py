"""`kmem.report`: what it says of a step, and that its page stands alone."""

import dataclasses
import html
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from black_and_white import assert_readable_in_black_and_white
from headless import browser
from headless import dump

import kmem
from kmem.budget.report import Choice
from kmem.budget.report import MemoryReport
from kmem.options import MemoryOptions
from kmem.planning import picture
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.network import Stage
from kmem.planning.plan import Plan
from kmem.reporting import pictures
from kmem.step import batches

MB = 1_000_000
# Six layers: each makes 10 MB and keeps it, needs 2 MB of workspace in its
# backward pass, has 1 MB of parameters, and takes 1 ms and 2 ms.
NETWORK = Network(
    stages=tuple(
        Stage(
            name=f"layer_{index}",
            inputs=(index,),
            outputs=(index + 1,),
            kept=(index + 1,),
            gradients=(index,) if index else (),
            gradient_bytes=MB,
            forward_seconds=1e-3,
            backward_seconds=2e-3,
            backward_workspace_bytes=2 * MB,
        )
        for index in range(6)
    ),
    value_bytes=(10 * MB,) * 7,
    inputs=frozenset({0}),
)
PLAN = Plan(
    network=NETWORK,
    segments=(Segment(0, 3),),
    batch="[]",
    mode="graph",
    solver="optimal",
    budget_bytes=70 * MB,
    resident_bytes=20 * MB,
    lower_bound_seconds=0.018,
)
PLAIN = Choice(MemoryOptions(), 110 * MB, 0.020)
PLANNED = Choice(
    MemoryOptions(remat="auto"),
    PLAN.predicted_peak_bytes,
    0.023,
    75 * MB,
    PLAN,
)
PARTS = Choice(MemoryOptions(microbatches=2), 68 * MB, 0.030)
BOTH = Choice(
    MemoryOptions(microbatches=4, remat="auto"), 73 * MB, 0.040, plan=PLAN
)
REPORT = MemoryReport(
    budget_bytes=100 * MB,
    plain=PLAIN,
    chosen=PLANNED,
    alternatives=(PARTS, BOTH),
    parameter_bytes=6 * MB,
    optimizer_bytes=12 * MB,
    in_use_bytes=19 * MB,
    batch=batches.to_json(batches.specs_of(np.zeros((8, 2), "float32"))),
    events=("step 7: out of memory, planned anew for < 90 MB",),
)
GRAPHS = {choice.options: NETWORK.graph for choice in (PLAIN, PARTS)}


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.name = "small"
    made.memory_report = REPORT
    return made


def test_a_notebook_shows_a_report():
    shown = REPORT._repr_html_()
    assert shown.startswith("<pre>memory_budget 100.00 MB: ")
    assert "out of memory, planned anew for &lt; 90 MB</pre>" in shown


def test_the_bytes_at_a_peak_are_those_of_its_operations():
    _, kinds = pictures.step_of(REPORT, PLAIN, GRAPHS)
    at = int(np.argmax(sum(kinds.values())))
    # When the backward pass of the last layer but one runs: five values, the
    # gradients of two, and those of two layers' parameters.
    assert {kind: int(each[at]) for kind, each in kinds.items()} == {
        "parameters": 6 * MB,
        "optimizer": 12 * MB,
        "batch and others": 18 * MB,
        "gradients": 2 * MB,
        "activations": 70 * MB,
        "workspace": 2 * MB,
    }


@pytest.mark.parametrize("choice, count", [(PLAIN, 1), (PLANNED, 1), (BOTH, 4)])
def test_a_step_has_the_peak_and_the_time_that_were_predicted(choice, count):
    seconds, kinds = pictures.step_of(REPORT, choice, GRAPHS)
    total = sum(kinds.values())
    assert total.max() == choice.predicted_peak_bytes
    assert set(kinds["parameters"]) == {6 * MB}
    assert kinds["workspace"][np.argmax(total)] > 0
    assert min(each.min() for each in kinds.values()) >= 0
    assert seconds[-1] == pytest.approx(choice.predicted_seconds)
    schedule = PLAN.schedule if choice.plan else NETWORK.graph.program
    assert len(total) == count * len(schedule)


def test_the_front_is_what_no_other_choice_beats():
    rng = np.random.default_rng(0)
    choices = [
        Choice(MemoryOptions(), int(peak), float(seconds))
        for peak, seconds in rng.integers(1, 30, (40, 2))
    ]

    def beats(one, other):
        return (
            one.predicted_peak_bytes <= other.predicted_peak_bytes
            and one.predicted_seconds <= other.predicted_seconds
            and one != other
        )

    best = {c for c in choices if not any(beats(d, c) for d in choices)}
    front = pictures.fastest_for_their_peak(choices)
    assert set(front) == best and len(front) == len(best)


def test_the_page_stands_alone_with_its_pictures_beside_it(model, tmp_path):
    kmem.report(model, tmp_path / "report.html")
    names = {path.name for path in tmp_path.iterdir()}
    kinds = ("choices", "plan", "step")
    assert names == {"report.html", *(f"report_{kind}.png" for kind in kinds)}

    page = (tmp_path / "report.html").read_text()
    assert "<title>kmem: small</title>" in page
    assert "//" not in re.sub('src="[^"]+"', "", page)
    images = re.findall('src="([^"]+)"', page)
    assert len(images) == 3
    assert all(image.startswith("data:image/png;base64,") for image in images)


def test_the_page_tells_what_was_chosen_and_what_happened(model, tmp_path):
    kmem.report(model, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    peak = kmem.base.sizes.format_size(PLANNED.predicted_peak_bytes)
    assert f"takes {peak} instead of 110.00 MB" in page
    assert "within a budget of 100.00 MB, for 1.15x the time" in page
    assert "The peak that was measured: 75.00 MB." in page
    assert '<td class="over">110.00 MB</td>' in page
    assert html.escape(REPORT.events[0]) in page
    assert "layer_0 ... layer_2" in page


def test_a_model_that_fits_as_it_is_has_a_page_too(model, tmp_path):
    model.memory_report = dataclasses.replace(
        REPORT, chosen=PLAIN, alternatives=(), events=()
    )
    kmem.report(model, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "takes 110.00 MB, and fits in 100.00 MB as it is" in page
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_the_step_is_drawn_before_and_after():
    figure = pictures.draw_step(REPORT, GRAPHS)
    assert len(figure.legends) == 1
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "plain: 110.00 MB at the peak",
        "remat: 86.00 MB at the peak",
    ]
    words = [text.get_text() for text in figure.axes[1].texts]
    assert "optimizer: 12.00 MB" in words


def test_each_choice_has_a_number():
    report = dataclasses.replace(REPORT, alternatives=(PARTS, BOTH))
    axes, names = pictures.draw_choices(report).axes
    places = {text.get_text(): text.xy for text in axes.texts}
    assert places["2"] == (68, pytest.approx(1.5))
    lines = names.texts[0].get_text().splitlines()
    assert lines[1:] == [
        "1 remat",
        "2 microbatches=2",
        "3 microbatches=4, remat",
        "4 plain",
    ]


@pytest.mark.parametrize("chosen", [PLAIN, PLANNED], ids=["plain", "planned"])
def test_a_report_can_be_read_without_its_colors(chosen):
    report = dataclasses.replace(REPORT, chosen=chosen)
    assert_readable_in_black_and_white(pictures.draw_step(report, GRAPHS))
    assert_readable_in_black_and_white(pictures.draw_choices(report))
    assert_readable_in_black_and_white(picture.figure(PLAN))


def test_a_choice_without_a_plan_has_a_step_too(model, tmp_path):
    model.memory_report = dataclasses.replace(
        REPORT, chosen=PARTS, alternatives=()
    )
    kmem.report(model, tmp_path / "report.html")
    names = {path.name for path in tmp_path.glob("*.png")}
    kinds = ("choices", "step")
    assert names == {f"report_{kind}.png" for kind in kinds}


def test_tensorboard_has_the_pictures(model, tmp_path):
    log_dir = tmp_path / "logs"
    kmem.report(model, tmp_path / "report.html", log_dir=log_dir)
    (path,) = log_dir.iterdir()
    images = {}
    for record in tf.data.TFRecordDataset(str(path)):
        event = tf.compat.v1.Event.FromString(record.numpy())
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "images"
            images[value.tag] = tf.make_ndarray(value.tensor)
    kinds = ("choices", "plan", "step")
    assert set(images) == {f"memory/{kind}" for kind in kinds}
    for kind in kinds:
        width, height, png = images[f"memory/{kind}"]
        shape = tf.io.decode_png(png).shape
        assert (int(height), int(width)) == tuple(shape[:2])
        assert png == (tmp_path / f"report_{kind}.png").read_bytes()


def test_a_model_without_a_report_is_refused(tmp_path):
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"trained with `fit\(memory_budget="):
        kmem.report(made, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="needs chromium")
def test_a_browser_shows_the_page(model, tmp_path):
    page = tmp_path / "report.html"
    kmem.report(model, page)
    # A heading that a script writes if all pictures have been decoded.
    probe = (
        "<script>onload = () => {document.title = [...document.images].every("
        "i => i.naturalWidth > 500) ? 'all shown' : 'missing'}</script>"
    )
    page.write_text(page.read_text() + probe)
    assert "<title>all shown</title>" in dump(page, tmp_path)
