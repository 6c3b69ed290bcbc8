"""Which rows the tiles of a segment read, and what running it so costs.

A segment's result is cut into tiles of equal rows. Interval arithmetic says
which rows of what enters the segment each of them needs, stage by stage from
the end. These begin at a multiple of all strides together, and as many rows
before the end of the image: so each stage meets its rows, and its padding, as
it would in the whole image, and no tensor is cut but the result.

To the other modules a segment in tiles is a stage of its own: it keeps what
enters it, and needs a tile's activations as workspace.
"""

import dataclasses
from collections.abc import Callable

from kmem.planning.graph import simulate
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.network import Stage
from kmem.planning.network import Tile


def ends(network: Network, start: int, stop: int) -> tuple[int, int] | None:
    """The one value that stages `start` to `stop - 1` read of those before
    them and the one that they leave, if they may run in tiles."""
    stages = network.stages[start:stop]
    if any(s.window is None or not s.recomputable for s in stages):
        return None
    made = {value for stage in stages for value in stage.outputs}
    read = {value for stage in stages for value in stage.inputs}
    later = {v for s in network.stages[stop:] for v in (*s.inputs, *s.kept)}
    entering, leaving = read - made, made & later
    if len(entering) != 1 or leaving != {*stages[-1].outputs}:
        return None
    return entering.pop(), leaving.pop()


def tiles_of(
    network: Network, start: int, stop: int, count: int
) -> tuple[Tile, ...]:
    """So many tiles for stages `start` to `stop - 1`, which may run so; fewer
    if there are fewer rows."""
    entering, leaving = ends(network, start, stop) or (-1, -1)
    stages = network.stages[start:stop]
    windows = [stage.window for stage in stages if stage.window]
    strides = {entering: 1}
    rows = {entering: windows[0].given}
    for stage, window in zip(stages, windows, strict=True):
        (stride,) = {strides[value] for value in stage.inputs}
        (value,) = stage.outputs or stage.inputs
        strides[value], rows[value] = stride * window.stride, window.made
    stride, given, made = strides[leaving], rows[entering], rows[leaving]
    height = -(-made // count)
    spans = []
    for first in range(0, made, height):
        last = min(first + height, made)
        needed = {leaving: (first, last)}
        for stage, window in zip(stages[::-1], windows[::-1], strict=True):
            (value,) = stage.outputs or stage.inputs
            begin, end = needed.get(value, (0, 1))
            begin = begin * window.stride - window.before
            end = (end - 1) * window.stride - window.before + window.size
            begin = min(max(begin, 0), window.given - 1)
            end = min(max(end, begin + 1), window.given)
            for each in stage.inputs:
                low, high = needed.get(each, (begin, end))
                needed[each] = min(begin, low), max(end, high)
        begin, end = needed[entering] if first else (0, needed[entering][1])
        spans.append((begin // stride * stride, end, first, last))
    # All rows are read by somebody, who gives them a gradient.
    following = [span[0] for span in spans[1:]] + [given]
    return tuple(
        Tile(
            begin,
            given - (given - max(end, after)) // stride * stride,
            first - begin // stride,
            last - begin // stride,
        )
        for (begin, end, first, last), after in zip(
            spans, following, strict=True
        )
    )


def are_of(network: Network, segment: Segment) -> bool:
    """Whether a segment is in tiles as a network allows it."""
    start, stop, tiles = segment.start, segment.stop, segment.tiles
    if segment.inner or segment.on_host or not ends(network, start, stop):
        return False
    return tiles == tiles_of(network, start, stop, len(tiles))


def contracted(
    network: Network, segments: tuple[Segment, ...]
) -> tuple[Network, tuple[Segment, ...]]:
    """The network with a stage for each segment in tiles, and the others."""
    in_tiles = _in_tiles(segments)
    if not in_tiles:
        return network, segments
    stages: list[Stage] = []
    place, places = 0, []
    following = iter([*in_tiles, None])
    each = next(following)
    for index, stage in enumerate(network.stages):
        places.append(place)
        if each and index >= each.start:
            if index + 1 < each.stop:
                continue
            stage, each = _as_stage(network, each), next(following)
        stages.append(stage)
        place += 1
    places.append(place)
    inside = {p for s in in_tiles for p in range(s.start + 1, s.stop)}
    shared = [
        tuple(dict.fromkeys(places[i] for i in s)) for s in network.shared
    ]
    smaller = dataclasses.replace(
        network,
        stages=tuple(stages),
        lines=tuple(
            tuple(places[p] for p in line if p not in inside)
            for line in network.lines
        ),
        shared=tuple(each for each in shared if len(each) > 1),
        late=frozenset(places[index] for index in network.late),
    )
    return smaller, _placed(segments, places.__getitem__, with_tiles=False)


def expanded(
    segments: tuple[Segment, ...], in_tiles: Segment
) -> tuple[Segment, ...]:
    """Segments of a network that one in tiles was a stage of, with that one."""
    begin, end = in_tiles.start, in_tiles.stop
    found, is_within = [], False

    def shifted(place: int) -> int:
        return place + (end - begin - 1) * (place > begin)

    for each in segments:
        (moved,) = _placed([each], shifted)
        if (moved.start, moved.stop) == (begin, end):
            # It keeps no more as a segment than by itself.
            continue
        if moved.start <= begin < moved.stop:
            is_within = True
            inner = expanded(each.inner, in_tiles)
            moved = dataclasses.replace(moved, inner=inner)
        found.append(moved)
    if not is_within:
        found.append(in_tiles)
    return tuple(sorted(found, key=lambda each: each.start))


def _in_tiles(segments: tuple[Segment, ...]) -> list[Segment]:
    found = []
    for each in segments:
        found += [each] if each.tiles else _in_tiles(each.inner)
    return found


def _placed(
    segments, place: Callable[[int], int], with_tiles: bool = True
) -> tuple[Segment, ...]:
    """Segments at other places, with or without those in tiles."""
    return tuple(
        dataclasses.replace(
            each,
            start=place(each.start),
            stop=place(each.stop),
            inner=_placed(each.inner, place, with_tiles),
        )
        for each in segments
        if with_tiles or not each.tiles
    )


def _as_stage(network: Network, segment: Segment) -> Stage:
    """A segment in tiles as one stage, with what it needs and takes."""
    entering, leaving = ends(network, segment.start, segment.stop) or (-1, -1)
    stages = network.stages[segment.start : segment.stop]
    rows = [tile.stop - tile.start for tile in segment.tiles]
    given = segment.tiles[-1].stop
    # What is computed, beside what would be in the whole image.
    share = sum(rows) / given
    part = dataclasses.replace(
        network,
        stages=stages,
        inputs=frozenset({entering}),
        lines=(),
        shared=(),
        late=frozenset(),
        resident_bytes=0,
        keeps_gradients=True,
        host_seconds=None,
    ).scaled(max(rows) / given)
    graph = part.graph
    forward = dataclasses.replace(
        graph,
        operations=graph.operations[: len(stages)],
        results=frozenset({leaving}),
    )
    forward_bytes = simulate(forward, forward.program).peak_bytes
    backward_bytes = simulate(graph, graph.program).peak_bytes
    backward_bytes += part.value_bytes[leaving]
    # All tiles' results, and gradients of what they read, are joined at last.
    made, joined = network.value_bytes[leaving], 0
    gradients = tuple({v for s in stages for v in s.gradients} & {entering})
    if gradients:
        joined = network.value_bytes[entering]
    count = len(rows)
    forward_seconds = sum(stage.forward_seconds for stage in stages)
    backward_seconds = sum(stage.backward_seconds for stage in stages)
    return Stage(
        name=f"{stages[0].name} ... {stages[-1].name}",
        inputs=(entering,),
        outputs=(leaving,),
        kept=(entering,),
        gradients=gradients,
        shares=(1,) * len(gradients),
        gradient_bytes=sum(stage.gradient_bytes for stage in stages),
        forward_seconds=share * forward_seconds,
        backward_seconds=share * (forward_seconds + backward_seconds),
        forward_workspace_bytes=max(forward_bytes - made // count, made),
        backward_workspace_bytes=max(
            backward_bytes - joined // count, int(share * joined)
        ),
    )
