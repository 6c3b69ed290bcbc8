"""What `kmem.Sweep` makes of its rows, and what the simulator expects."""

import pytest
from black_and_white import assert_readable_in_black_and_white
from trace_cases import call
from trace_cases import constant
from trace_cases import release
from trace_cases import write

import kmem
from kmem.dtr import sweep
from kmem.dtr.simulator import Forecast
from kmem.dtr.sweep import Row
from kmem.dtr.sweep import Sweep
from kmem.dtr.trace import read_program


def row(megabytes, seconds, peak=None):
    return Row(
        kmem.DTR(int(megabytes * 1e6), heuristic="dtr_eq"),
        step_seconds=seconds,
        peak_bytes=int((peak or megabytes or 100) * 1e6),
        num_evictions=3,
        num_recomputations=2,
        predicted_seconds=seconds + 0.1,
        predicted_peak_bytes=megabytes * 1e6,
    )


PLAIN = Row(None, step_seconds=0.9, peak_bytes=10**8)
UNLIMITED = row(0, 1.0)
FAILED = Row(
    kmem.DTR(20_000_000, heuristic="dtr_eq"),
    predicted_seconds=float("inf"),
    predicted_peak_bytes=float("inf"),
    error="no room: at least 25.00 MB",
)


@pytest.mark.parametrize(
    "rows, megabytes",
    [
        ([row(80, 1.1), row(50, 1.3), row(40, 1.31), FAILED], 50),
        ([row(80, 1.1), row(50, 1.1, peak=51)], 80),
        ([FAILED], 0),
    ],
    ids=["time", "not kept", "none"],
)
def test_the_smallest_quick_threshold_is_recommended(rows, megabytes):
    found = Sweep((PLAIN, UNLIMITED, *rows)).recommended
    assert found == kmem.DTR(megabytes * 10**6, heuristic="dtr_eq")


@pytest.mark.parametrize(
    "rows, megabytes",
    [
        ([row(80, 2.0), row(50, 2.6), row(40, 2.7), FAILED], 50),
        ([FAILED], 0),
    ],
)
def test_times_are_those_of_the_fastest_if_none_could_not_run(rows, megabytes):
    unlimited = Row(kmem.DTR(0, heuristic="dtr_eq"), error="out of memory")
    found = Sweep((PLAIN, unlimited, *rows))
    assert found.recommended == kmem.DTR(megabytes * 10**6, heuristic="dtr_eq")
    assert "out of memory" in found.summary()


def test_a_summary_shows_predicted_beside_measured():
    found = Sweep((PLAIN, UNLIMITED, row(50, 1.2), FAILED))
    assert found.summary().splitlines() == [
        "threshold              share seconds  time       peak evictions "
        "recomputed predicted       peak",
        "Keras, eager                   0.900  0.90  100.00 MB         0 "
        "         0",
        "no threshold                   1.000  1.00  100.00 MB         3 "
        "         2      1.10        0 B",
        "50.00 MB                0.50   1.200  1.20   50.00 MB         3 "
        "         2      1.30   50.00 MB",
        "20.00 MB                0.20 no room: at least 25.00 MB"
        "                           no",
        'time: relative to "no threshold"; beside it, as the simulator '
        "predicts it.",
        'recommended: 50.00 MB, heuristic "dtr_eq": the smallest threshold '
        "with a time of at most 1.3.",
    ]


def test_the_picture_holds_the_numbers():
    pytest.importorskip("matplotlib")
    rows = [row(80, 1.1), row(50, 1.2), FAILED]
    figure = sweep._figure(Sweep((PLAIN, UNLIMITED, *rows), pool_bytes=10**8))
    assert_readable_in_black_and_white(figure)

    time, peak = (
        {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        for axes in figure.axes
    )
    assert time["measured"][1:] == [[50, 1.2], [80, 1.1]]
    predicted = time["predicted by the simulator"]
    assert predicted[1:] == [[50, pytest.approx(1.3)], [80, pytest.approx(1.2)]]
    assert time["cannot run"] == [[20, 1]]
    assert time['recommended: 50.00 MB, "dtr_eq"'] == [[50, 1.2]]
    assert peak["measured peak"] == [[50, 50], [80, 80]]
    named = [text.get_text() for text in figure.axes[0].texts]
    assert named == ["50.00 MB: 1.20x", "80.00 MB: 1.10x"]


def test_a_picture_is_drawn_of_what_mostly_fails(tmp_path):
    pytest.importorskip("matplotlib")
    plain = Row(None, error="out of memory")
    rows = plain, UNLIMITED, FAILED, row(50, 1.2)
    Sweep(rows, pool_bytes=10**8).plot(tmp_path / "sweep.svg")
    assert "svg" in (tmp_path / "sweep.svg").read_text()


@pytest.mark.parametrize(
    "rows, received", [((), "none"), ((row(50, 1.2),), "50.00 MB")]
)
def test_a_picture_of_fewer_than_two_points_is_refused(
    rows, received, tmp_path
):
    message = f"needs at least two thresholds. Received: {received}"
    with pytest.raises(ValueError, match=message):
        Sweep((PLAIN, UNLIMITED, *rows)).plot(tmp_path / "sweep.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("native_library")
def test_a_forecast_adds_what_a_trace_does_not_know(tmp_path):
    lines = [
        *constant("x", 10),
        *call("first", ["x"], {"a": (40, -1)}, 1e9),
        *call("second", ["x"], {"b": (40, -1)}, 2e9),
        *call("third", ["b"], {"c": (10, -1)}, 3e9),
        *release("b"),
        *call("fourth", ["a", "c"], {"d": (10, -1)}, 5e9),
        *release("a", "c"),
    ]
    program = read_program(write(tmp_path / "step.log", lines))
    known = Forecast([program], [300], in_use=0)
    assert known.peak_bytes == 300
    # 200 bytes are unknown: 100 is the simulated peak.
    plenty = known.of(kmem.DTR(300, evictee_minimum_size=0))
    assert (plenty.more_seconds, plenty.peak_bytes) == (0, 300)
    tight = known.of(kmem.DTR(270, evictee_minimum_size=0))
    assert (tight.more_seconds, tight.peak_bytes) == (1, 270)
    # What is small is given up where there is nothing else.
    large = known.of(kmem.DTR(270, evictee_minimum_size=41))
    assert (large.more_seconds, large.peak_bytes) == (1, 270)
    assert known.of(kmem.DTR(210)).more_seconds == float("inf")

    # Of 250 bytes that are in memory throughout, the step reads 10.
    unknown = Forecast([program, program], None, in_use=250)
    assert unknown.peak_bytes == 340
    assert unknown.of(kmem.DTR()).more_seconds == 0
    tight = unknown.of(kmem.DTR(310, evictee_minimum_size=0))
    assert (tight.more_seconds, tight.peak_bytes) == (1, 310)
