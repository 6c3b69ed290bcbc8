"""Segments in tiles: which rows they read, and what they cost."""

import dataclasses

import numpy as np
import pytest

from kmem.planning import tiles
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.choosing import Chooser
from kmem.planning.choosing import InTiles
from kmem.planning.flat import evaluate
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.network import Stage
from kmem.planning.network import Window
from kmem.planning.plan import Plan

VALUE_BYTES = 64_000


def window(rows, size, stride, padding):
    """That of a layer as Keras pads it; the padding, with it."""
    before = after = 0
    if padding == "same":
        total = max((-(-rows // stride) - 1) * stride + size - rows, 0)
        before, after = total // 2, total - total // 2
    made = (rows + before + after - size) // stride + 1
    return Window(rows, made, size, stride, before)


def line(windows):
    """A network of layers, each of which keeps what it makes."""
    sizes = [VALUE_BYTES * w.given // windows[0].given for w in windows]
    sizes.append(VALUE_BYTES * windows[-1].made // windows[0].given)
    stages = [
        Stage(
            f"layer_{i}",
            (i,),
            (i + 1,),
            kept=(i, i + 1),
            gradients=(i,) if i else (),
            shares=(1,) if i else (),
            gradient_bytes=64,
            forward_seconds=1.0,
            backward_seconds=2.0,
            window=each,
        )
        for i, each in enumerate(windows)
    ]
    last = len(stages)
    stages.append(
        Stage(
            *("loss", (last,), (last + 1,)),
            kept=(last,),
            gradients=(last,),
            backward_seconds=0.1,
            recomputable=False,
        )
    )
    return Network((*stages,), (*sizes, 4), frozenset({0}))


def sources(rows, size, stride, padding):
    """Runs a layer on rows that are sets of numbers, as Keras would."""
    shape = window(len(rows), size, stride, padding)
    outside = [frozenset({"padding"})] * size
    begin = len(outside) - shape.before
    padded = [*outside, *rows, *outside]
    starts = (begin + i * stride for i in range(shape.made))
    return [frozenset().union(*padded[s : s + size]) for s in starts]


@pytest.mark.parametrize("seed", range(12))
def test_tiles_read_what_the_whole_image_does(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(60, 90))
    layers, windows = [], []
    for _ in range(4):
        layers.append(
            (
                int(rng.integers(1, 6)),
                int(rng.integers(1, 4)),
                str(rng.choice(["same", "valid"])),
            )
        )
        given = windows[-1].made if windows else rows
        if given < 6:
            layers[-1] = (1, 1, "same")
        windows.append(window(given, *layers[-1]))
    network = line(windows)

    def run(image):
        for layer in layers:
            image = sources(image, *layer)
        return image

    image = [frozenset({row}) for row in range(rows)]
    want = run(image)
    for count in (1, 2, 3, 7, rows):
        cut = tiles.tiles_of(network, 0, len(layers), count)
        got = [
            row
            for tile in cut
            for row in run(image[tile.start : tile.stop])[
                tile.first : tile.last
            ]
        ]
        assert got == want
        read = {r for tile in cut for r in range(tile.start, tile.stop)}
        assert read == {*range(rows)}


NETWORK = line([window(64, 3, 1, "same")] * 8)
SHRINKING = line(
    [
        *[window(64, 3, 1, "same")] * 3,
        window(64, 2, 2, "valid"),
        *[window(32, 3, 1, "same")] * 2,
    ]
)


def in_tiles(start, stop, count, network=NETWORK):
    cut = tiles.tiles_of(network, start, stop, count)
    return Segment(start, stop, tiles=cut)


def test_a_segment_in_tiles_takes_a_tile_of_its_activations():
    peaks = [
        evaluate(NETWORK, segments).peak_bytes / VALUE_BYTES
        for segments in ((), (Segment(0, 8),), (in_tiles(0, 8, 8),))
    ]
    plain, again, tiled = peaks
    assert plain == pytest.approx(11, abs=0.1)
    assert again == pytest.approx(11, abs=0.1)
    # Of 64 rows a tile has 8, and 8 at both ends: it keeps 9 values of these,
    # and makes two gradients. The batch stays, and the result's gradient.
    assert tiled == pytest.approx(2 + 11 * 24 / 64, abs=0.1)


def test_rows_that_tiles_share_take_time():
    seconds = evaluate(NETWORK, (in_tiles(0, 8, 2),)).seconds
    # Each of two tiles has 32 rows of its own and 8 of the other.
    assert seconds == pytest.approx(0.1 + 8 * (1 + 3) * 80 / 64)


def test_a_plan_says_what_is_in_tiles_and_is_saved_with_it(tmp_path):
    plan = Plan(
        network=NETWORK,
        segments=(Segment(0, 6, (in_tiles(2, 5, 4),)), in_tiles(6, 8, 2)),
        batch="[]",
        mode="graph",
        solver="optimal",
        budget_bytes=None,
        resident_bytes=0,
        lower_bound_seconds=1.0,
    )
    assert "layer_2 ... layer_4, in 4 tiles" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    tile = dataclasses.replace(plan.segments[1].tiles[0], first=1)
    for wrong in (
        dataclasses.replace(in_tiles(0, 4, 2), inner=(Segment(0, 2),)),
        dataclasses.replace(in_tiles(6, 8, 2), tiles=(tile,)),
        Segment(6, 9, tiles=(tile,)),
    ):
        with pytest.raises(
            ValueError, match="in tiles only as the network|all"
        ):
            dataclasses.replace(plan, segments=(wrong,))


@pytest.mark.parametrize("solver", ["optimal", "sqrt"])
def test_tiles_keep_budgets_that_nothing_else_keeps(solver):
    plain = Chooser(SHRINKING, solver)
    tiled = InTiles(plain)
    least = plain.smallest.peak_bytes
    assert tiled.smallest.peak_bytes < 0.8 * least
    budget = int(0.8 * least)
    with pytest.raises(InfeasibleBudget):
        plain.within(budget)
    found = tiled.within(budget)
    assert found.peak_bytes <= budget
    assert found == evaluate(SHRINKING, found.segments)
    assert found.seconds <= tiled.smallest.seconds
    assert tiled.lower_bound_bytes <= tiled.smallest.peak_bytes


def test_without_layers_that_may_there_are_no_tiles():
    stages = [dataclasses.replace(s, window=None) for s in NETWORK.stages]
    network = dataclasses.replace(NETWORK, stages=tuple(stages))
    tiled = InTiles(Chooser(network))
    assert not tiled.is_possible
    assert tiled.smallest == tiled.plain.smallest


@pytest.mark.parametrize("places", [(0, 2, 5), (1, 4, 6)])
def test_segments_beside_and_around_tiles_keep_their_places(places):
    begin, middle, end = places
    tiled = in_tiles(begin, middle, 2), in_tiles(middle, end, 4)
    network, rest = tiles.contracted(NETWORK, tiled)
    assert not rest
    assert len(network.stages) == len(NETWORK.stages) - (end - begin - 2)
    segments = (Segment(0, begin + 2), Segment(begin + 2, begin + 4))
    whole = segments
    for each in tiled:
        whole = tiles.expanded(whole, each)
    assert tiles.contracted(NETWORK, whole) == (network, segments)
    assert evaluate(network, segments).peak_bytes == (
        evaluate(NETWORK, whole).peak_bytes
    )
