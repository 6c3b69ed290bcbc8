"""A plan is data: what it predicts, how it is saved, and its picture."""

import dataclasses
import json
import re
import typing

import numpy as np
import pytest

from kmem.planning import picture
from kmem.planning.graph import simulate
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.network import Stage
from kmem.planning.network import Window
from kmem.planning.plan import Plan

# Six layers, each of which keeps what it makes: 10 MB, in 1 s forward and 2 s
# backward. The loss reads the last one.
NUM_LAYERS = 6
VALUE_BYTES = 10_000_000
RESIDENT_BYTES = 3_000_000


def layer(index, **others):
    return Stage(
        **{
            "name": f"layer_{index}",
            "inputs": (index,),
            "outputs": (index + 1,),
            "kept": (index + 1,),
            "gradients": (index,) if index else (),
            "gradient_bytes": 1000,
            "forward_seconds": 1.0,
            "backward_seconds": 2.0,
        }
        | others
    )


NETWORK = Network(
    stages=(
        *map(layer, range(NUM_LAYERS)),
        layer(
            NUM_LAYERS,
            name="loss",
            gradient_bytes=0,
            kept=(NUM_LAYERS,),
            recomputable=False,
        ),
    ),
    value_bytes=(*[VALUE_BYTES] * (NUM_LAYERS + 1), 4),
    inputs=frozenset({0}),
    lines=(tuple(range(NUM_LAYERS + 2)), (0, 2)),
    shared=((0, 4),),
    resident_bytes=500,
)
NESTED = (Segment(0, 4, (Segment(0, 2),)),)


def make_plan(**others):
    return Plan(
        **{
            "network": NETWORK,
            "segments": NESTED,
            "batch": '[[32, 8], "float32"]',
            "mode": "graph",
            "solver": "optimal",
            "budget_bytes": 80_000_000,
            "resident_bytes": RESIDENT_BYTES,
            "lower_bound_seconds": 20.0,
        }
        | others
    )


def saved(tmp_path, **changes):
    """The path of a plan's file, with changes to what it holds."""
    path = tmp_path / "plan.json"
    make_plan().save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["version"] = changes.pop("version", content["version"])
    content["plan"] |= changes
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_predictions_are_those_of_the_simulation():
    plan = make_plan()
    graph = NETWORK.graph
    planned = simulate(graph, NETWORK.schedule(NESTED))
    plain = simulate(graph, graph.program)
    assert plan.predicted_peak_bytes == RESIDENT_BYTES + planned.peak_bytes
    assert plan.unplanned_peak_bytes == RESIDENT_BYTES + plain.peak_bytes
    assert plan.predicted_seconds == planned.seconds
    assert plan.slowdown == planned.seconds / plain.seconds
    assert plan.gap == planned.seconds / 20 - 1


def test_a_nested_plan_costs_what_can_be_counted():
    plan = make_plan()
    # Seven forward and backward passes of 1 s and 2 s, layers 0 to 3 again,
    # and then 0 and 1 a third time.
    assert plan.predicted_seconds == 21 + 4 + 2
    assert plan.simulation.num_recomputed == 6
    assert plan.slowdown == 27 / 21
    # Layer 5's backward pass, with everything kept: the batch, six values,
    # the gradients of two, and that of a parameter.
    assert plan.unplanned_peak_bytes == 93_001_500
    # Layer 1's, in the inner segment: the batch, two values that were made
    # again, the gradients of both, and those of five parameters.
    assert plan.predicted_peak_bytes == 53_005_500


def test_a_plan_without_segments_is_the_unplanned_step():
    plan = make_plan(segments=(), lower_bound_seconds=NETWORK.graph.seconds)
    assert plan.simulation == plan.unplanned
    assert plan.slowdown == 1
    assert plan.gap == 0


def test_a_network_that_takes_no_time_is_not_slowed_down():
    stages = tuple(
        dataclasses.replace(stage, forward_seconds=0.0, backward_seconds=0.0)
        for stage in NETWORK.stages
    )
    network = dataclasses.replace(NETWORK, stages=stages)
    plan = make_plan(network=network, lower_bound_seconds=0.0)
    assert plan.slowdown == 1
    assert plan.gap == 0


def test_the_summary_tells_what_is_predicted_and_recomputed():
    assert make_plan().summary().splitlines() == [
        "Rematerialization plan (optimal, graph mode)",
        "  budget          80.00 MB",
        "  predicted peak  53.01 MB, unplanned 93.00 MB",
        "  predicted time  1.286x of a step that keeps everything",
        "  lower bound     20.0000 s of 27.0000 s: the gap is 35.0%",
        "  recomputes      4 of 7 operations, in 6 runs",
        "  cannot repeat   loss",
        "  layer_0 ... layer_3",
        "    layer_0 ... layer_1",
    ]
    assert "budget          auto" in make_plan(budget_bytes=None).summary()
    shown = make_plan()._repr_html_()
    assert shown == f"<pre>{make_plan().summary()}</pre>"


def test_equal_plans_are_equal_and_can_be_keys():
    plan = make_plan()
    same = make_plan()
    # What has been computed of a plan is no part of it.
    assert same.predicted_seconds
    assert plan == same
    assert len({plan, same, make_plan(segments=())}) == 2


@pytest.mark.parametrize("budget_bytes", [None, 80_000_000])
@pytest.mark.parametrize("segments", [(), NESTED])
def test_a_plan_is_loaded_as_it_was_saved(tmp_path, segments, budget_bytes):
    plan = make_plan(
        segments=segments, budget_bytes=budget_bytes, lower_bound_seconds=0.1
    )
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(str(path))
    assert loaded == plan
    assert loaded.summary() == plan.summary()
    assert loaded.schedule == plan.schedule


def test_every_field_survives(tmp_path):
    """Whatever it will hold, with a value that is not its default."""
    others = {int: 7, float: 0.25}

    def differing(made):
        kinds = typing.get_type_hints(type(made))
        values = {
            f.name: others.get(kinds[f.name], f.default is False)
            for f in dataclasses.fields(made)
            if kinds[f.name] in (*others, bool)
        }
        return dataclasses.replace(made, **values)

    window = Window(7, 5, 3, 2, 1)
    own = {"shares": (1,), "passed": (0,), "gradients": (0,)}
    stage = differing(layer(0, **own, window=window))
    network = dataclasses.replace(
        differing(NETWORK),
        host_seconds=0.5,
        stages=(stage, *NETWORK.stages[1:]),
        late=frozenset({1}),
    )
    plan = differing(make_plan(network=network, segments=()))
    for each in (stage, network, plan):
        for field in dataclasses.fields(each):
            default = field.default
            assert (
                getattr(each, field.name) != default or field.name == "segments"
            )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def hosted_plan():
    network = dataclasses.replace(NETWORK, host_seconds=2.0**-20)
    second = Segment(2, 4, on_host=True)
    return make_plan(network=network, segments=(Segment(0, 2), second))


def test_the_batch_stays_on_the_device():
    network = dataclasses.replace(NETWORK, host_seconds=0.0)
    first = Segment(0, 2, on_host=True)
    with pytest.raises(ValueError, match="nor if they read the batch"):
        make_plan(network=network, segments=(first,))
    with pytest.raises(ValueError, match="a host that the network does not"):
        make_plan(segments=(Segment(2, 4, on_host=True),))


def test_a_plan_says_what_goes_to_the_host(tmp_path):
    plan = hosted_plan()
    assert plan.host_bytes == VALUE_BYTES
    again = make_plan(segments=(Segment(0, 2), Segment(2, 4)))
    sent_seconds = VALUE_BYTES * 2.0**-20
    assert plan.predicted_seconds == again.predicted_seconds + sent_seconds
    assert plan.predicted_peak_bytes < again.predicted_peak_bytes
    assert plan.simulation.num_recomputed == again.simulation.num_recomputed
    assert "in host memory  10.00 MB, there and back" in plan.summary()
    plan.plot(tmp_path / "plan.png")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.schedule == plan.schedule


def _mutated(content: bytes, random) -> bytes:
    """A file with something in it replaced, left out or put in."""
    pieces = [
        *(b"NaN", b"-Infinity", b"1e999", b"1" + b"0" * 30, b"-1", b"null"),
        *(b"[" * 5000, b"{", b"]", b'"', b"[]", b"{}", b"true", b"\xff\xfe"),
        *(b"9" * 5000, b"0.5", b'"x"', b"", b"\\ud800"),
    ]
    number = list(re.finditer(rb"-?\d+(\.\d+)?|null|true|false", content))
    for _ in range(random.integers(1, 3)):
        if random.random() < 0.6:
            match = number[random.integers(len(number))]
            begin, end = match.span()
        else:
            begin, end = np.sort(random.integers(0, len(content), 2))
            end = min(end, begin + random.integers(0, 20))
        piece = pieces[random.integers(len(pieces))]
        content = content[:begin] + piece + content[end:]
    return content


def test_a_file_that_was_changed_at_random_is_a_plan_or_refused(tmp_path):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    content, random = path.read_bytes(), np.random.default_rng(0)
    num_refused = 0
    for _ in range(1000):
        path.write_bytes(_mutated(content, random))
        try:
            plan = Plan.load(path)
        except ValueError as error:
            assert "A plan file must" in str(error)
            num_refused += 1
        else:
            assert plan.summary() and plan.predicted_peak_bytes >= 0
            plan.save(path)
            assert Plan.load(path) == plan
    assert num_refused > 500


def test_a_plan_replaces_an_older_one(tmp_path):
    path = tmp_path / "plan.json"
    make_plan(segments=()).save(path)
    make_plan().save(path)
    assert Plan.load(path) == make_plan()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_nothing_half_written_remains(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    make_plan().save(path)
    plan = make_plan(segments=())

    def fill_the_disk(self, text, **arguments):
        with self.open("w", **arguments) as file:
            file.write(text[:10])
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        plan.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert Plan.load(path) == make_plan()


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make_plan().save(tmp_path / "nowhere" / "plan.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="truncated or damaged.*plan.json"):
        Plan.load(path)


def test_a_plan_whose_step_needs_less_than_was_drawn_is_kept(tmp_path):
    plan = make_plan(resident_bytes=-1)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\x89PNG\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="must be JSON"):
        Plan.load(path)


@pytest.mark.parametrize("content", ["[]", "7", "{}", '{"format": "other"}'])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"`kmem\.Plan\.save` wrote"):
        Plan.load(path)


def test_a_file_of_another_version_is_refused(tmp_path):
    path = saved(tmp_path, version=99)
    with pytest.raises(ValueError, match="version 8: .* of version 99"):
        Plan.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"network": {}},
        {"network": None},
        {"segments": [[0, 4]]},
        {"segments": [[0, 400, []]]},
        {"segments": ["all"]},
        {"resident_bytes": -(10**9)},
        {"resident_bytes": "3 MB"},
        {"no_such_field": 1},
        {"budget_bytes": -1},
        {"lower_bound_seconds": -1.0},
        {"mode": "fast"},
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(tmp_path, changes):
    path = saved(tmp_path, **changes)
    with pytest.raises(ValueError, match="this one is damaged.*plan.json"):
        Plan.load(path)


def test_a_file_that_lacks_a_field_is_refused(tmp_path):
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    del content["plan"]["mode"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="damaged.*KeyError"):
        Plan.load(path)


@pytest.mark.parametrize(
    "segments",
    [
        (Segment(3, 3),),
        (Segment(-2, 2),),
        (Segment(2, 4), Segment(0, 2)),
        (Segment(0, 3), Segment(2, 4)),
        (Segment(0, 3, (Segment(2, 4),)),),
        # The loss is run by the step itself.
        (Segment(5, 7),),
    ],
)
def test_segments_that_cannot_run_are_refused(segments):
    with pytest.raises(ValueError, match="`segments` must be in order"):
        make_plan(segments=segments)


def test_segments_begin_and_end_on_a_line():
    network = dataclasses.replace(NETWORK, lines=((0, 2, 4), (1, 3)))
    make_plan(network=network, segments=(Segment(0, 2), Segment(2, 4)))
    with pytest.raises(ValueError, match="stages 0 to 3 within 0 to 7"):
        make_plan(network=network, segments=(Segment(0, 3),))


def curves(axes):
    """Name -> heights and edges of the curves that are not filled."""
    return {
        patch.get_label().partition(":")[0]: patch.get_data()
        for patch in axes.patches
        if not patch.get_fill()
    }


def test_the_picture_holds_the_simulated_numbers():
    pytest.importorskip("matplotlib")
    plan = make_plan()
    axes = picture.figure(plan).axes[0]
    for simulation, label in (
        (plan.simulation, "the plan"),
        (plan.unplanned, "everything kept"),
    ):
        drawn = curves(axes)[label]
        megabytes = np.array(simulation.step_bytes) + RESIDENT_BYTES
        np.testing.assert_allclose(drawn.values, megabytes / 1e6)
        assert drawn.edges[-1] == simulation.seconds
    _, labels = axes.get_legend_handles_labels()
    assert {
        "everything kept: 93.00 MB at the peak",
        "the plan: 53.01 MB at the peak",
        "budget: 80.00 MB",
    } <= {*labels}


def test_the_picture_shows_when_and_what_runs_again():
    pytest.importorskip("matplotlib")
    memory, strip = picture.figure(make_plan()).axes
    again = next(
        patch.get_data()
        for patch in memory.patches
        if patch.get_label() == "running again"
    )
    assert np.isfinite(again.values).sum() == 6
    bars = {
        group.get_label(): [bar.get_x() for bar in group]
        for group in strip.containers
    }
    assert bars == {
        "runs once": [4 * VALUE_BYTES, 5 * VALUE_BYTES, 6 * VALUE_BYTES],
        "runs twice": [2 * VALUE_BYTES, 3 * VALUE_BYTES],
        "runs more often": [0, VALUE_BYTES],
    }


def test_the_title_tells_the_gain():
    pytest.importorskip("matplotlib")

    def title(plan):
        return picture.figure(plan).axes[0].get_title(loc="left")

    assert title(make_plan()) == (
        "The same training step in 43% less memory, for 1.29x the time"
    )
    assert title(make_plan(segments=())) == (
        "A training step that keeps everything"
    )


def test_large_models_are_drawn_in_gigabytes():
    pytest.importorskip("matplotlib")
    plan = make_plan(resident_bytes=20 * 10**9)
    axes = picture.figure(plan).axes[0]
    assert axes.get_ylabel() == "memory in use, GB"
    assert curves(axes)["the plan"].values.max() == pytest.approx(20.0500055)


@pytest.mark.parametrize("segments", [(), NESTED])
@pytest.mark.parametrize("budget_bytes", [None, 80_000_000])
def test_a_picture_is_drawn(tmp_path, segments, budget_bytes):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    make_plan(segments=segments, budget_bytes=budget_bytes).plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_network_that_keeps_nothing_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    network = Network(
        stages=(Stage("a", (0,), (1,), forward_seconds=1.0),),
        value_bytes=(4, 4),
        inputs=frozenset({0}),
    )
    plan = make_plan(network=network, segments=())
    plan.plot(tmp_path / "plan.svg")
    assert "svg" in (tmp_path / "plan.svg").read_text()


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "kmem\[plot\]"'):
        make_plan().plot(tmp_path / "plan.png")
    assert not list(tmp_path.iterdir())
