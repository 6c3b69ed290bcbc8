"""Small networks for the tests of planners, and every plan of each."""

import dataclasses
import functools

from kmem.planning import flat
from kmem.planning.choosing import ChainSolver
from kmem.planning.graph import simulate
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.network import Stage


def frontier(network: Network, num_budgets: int = 30) -> list:
    """Plans with rising peaks and falling times."""
    solver = ChainSolver(network)
    full, _ = cost(network, ())
    smallest = solver.smallest.peak_bytes
    points: dict[int, flat.Point] = {}
    for number in range(num_budgets):
        share = number / (num_budgets - 1)
        point = solver.within(smallest + int(share * (full - smallest)))
        points[point.peak_bytes] = point
    return list(points.values())


def chain(values, saved, forward, backward=None) -> Network:
    """A chain as rotor has it.

    Stage `i` makes a value of `values[i + 1]` bytes, keeps `saved[i]` with it
    and reads both and its input in its backward pass.
    """
    backward = backward or forward
    return Network(
        stages=tuple(
            Stage(
                name=f"stage {i}",
                inputs=(i,),
                outputs=(i + 1,),
                kept=(i, i + 1),
                gradients=(i,),
                residual_bytes=saved[i] - values[i + 1],
                forward_seconds=forward[i],
                backward_seconds=backward[i],
            )
            for i in range(len(forward))
        ),
        value_bytes=tuple(values),
        inputs=frozenset({0}),
    )


def random_chain(random, num_stages) -> Network:
    """A chain with everything that `chain` leaves out."""
    return Network(
        stages=tuple(
            _random_stage(random, i, (i,), (i + 1,), (i,))
            for i in range(num_stages)
        ),
        value_bytes=tuple(random.randint(1, 9) for _ in range(num_stages + 1)),
        inputs=frozenset({0}),
    )


def repeated(block, count) -> Network:
    """A chain of equal blocks, given one."""
    length, stages = len(block.stages), []
    for first in range(0, count * length, length):
        for stage in block.stages:
            moved = {
                name: tuple(value + first for value in getattr(stage, name))
                for name in ("inputs", "outputs", "kept", "gradients")
            }
            stages.append(dataclasses.replace(stage, **moved))
    sizes = block.value_bytes[:1] + count * block.value_bytes[1:]
    return Network(tuple(stages), sizes, frozenset({0}))


def residual(count) -> Network:
    """Blocks whose result is added to what enters them. The addition keeps
    nothing; the activation before keeps what it gives."""
    sizes: list[int] = [8]
    stages: list[Stage] = []

    def stage(inputs, kept, size) -> int:
        sizes.append(size)
        made = len(sizes) - 1
        kept = tuple(made if value is None else value for value in kept)
        name = f"stage {len(stages)}"
        stages.append(
            Stage(
                *(name, inputs, (made,), kept, inputs),
                forward_seconds=1,
                backward_seconds=1,
            )
        )
        return made

    last = 0
    for _ in range(count):
        narrow = stage((last,), (last,), 2)
        narrow = stage((narrow,), (None,), 2)
        wide = stage((narrow,), (narrow,), 8)
        wide = stage((wide,), (wide,), 8)
        last = stage((stage((wide, last), (), 8),), (None,), 8)
    return Network(tuple(stages), tuple(sizes), frozenset({0}))


def random_network(random, num_stages) -> Network:
    """A chain with skips, in which half of the stages read their input."""
    sizes, stages, made = [5], [], [0]
    for index in range(num_stages):
        inputs = (made[-1],)
        if random.random() < 0.4:
            inputs = tuple(dict.fromkeys((*inputs, random.choice(made))))
        sizes.append(random.randint(1, 9))
        made.append(len(sizes) - 1)
        kept = inputs if random.random() < 0.5 else ()
        stages.append(_random_stage(random, index, inputs, (made[-1],), kept))
    return Network(tuple(stages), tuple(sizes), frozenset({0}))


def _random_stage(random, index, inputs, outputs, kept) -> Stage:
    return Stage(
        name=f"stage {index}",
        inputs=inputs,
        outputs=outputs,
        kept=kept + (outputs if random.random() < 0.5 or not kept else ()),
        gradients=inputs,
        residual_bytes=random.choice([0, random.randint(1, 9)]),
        gradient_bytes=random.choice([0, random.randint(1, 5)]),
        forward_seconds=random.randint(1, 9),
        backward_seconds=random.randint(1, 9),
        forward_workspace_bytes=random.choice([0, random.randint(1, 9)]),
        backward_workspace_bytes=random.choice([0, random.randint(1, 9)]),
        recomputable=random.random() < 0.95,
    )


def cost(network, segments) -> tuple[int, float]:
    """The simulated peak and time of a plan."""
    result = simulate(network.graph, network.schedule(segments))
    return result.peak_bytes, result.seconds


def best_of_all(network) -> list[tuple[int, float]]:
    """Peaks, rising, and the times of the fastest of all plans within each."""
    allowed = network.allowed(range(len(network.stages) + 1)).tolist()
    plans = _plans(0, len(network.stages))
    plans = [each for each in plans if _is_allowed(allowed, each)]
    if network.host_seconds is not None:
        plans = [each for plan in plans for each in _on_host(network, plan)]
    costs = sorted(cost(network, segments) for segments in plans)
    best: list[tuple[int, float]] = []
    for peak_bytes, seconds in costs:
        if not best or seconds < best[-1][1]:
            best.append((peak_bytes, seconds))
    return best


def is_allowed(network, segments) -> bool:
    """Whether a network allows all segments, and those within them."""
    allowed = network.allowed(range(len(network.stages) + 1))
    return _is_allowed(allowed.tolist(), segments)


def _is_allowed(allowed, segments) -> bool:
    return all(
        allowed[s.start][s.stop] and _is_allowed(allowed, s.inner)
        for s in segments
    )


def _on_host(network, segments) -> list[tuple[Segment, ...]]:
    """The same plan, with any of its segments on the host."""
    if not segments:
        return [()]
    first, *rest = segments
    firsts = [
        dataclasses.replace(first, inner=inner, on_host=on_host)
        for inner in _on_host(network, first.inner)
        for on_host in {False, network.may_wait(first.start, first.stop)}
    ]
    others = _on_host(network, rest)
    return [(one, *each) for one in firsts for each in others]


@functools.cache
def _plans(start, stop, whole=True) -> tuple[tuple[Segment, ...], ...]:
    """All tuples of nested segments; `whole` if one may be all of it."""
    if start == stop:
        return ((),)
    plans = list(_plans(start + 1, stop))
    for middle in range(start + 1, stop + whole):
        for inner in _plans(start, middle, False):
            segment = Segment(start, middle, inner)
            plans += [(segment, *rest) for rest in _plans(middle, stop)]
    return tuple(plans)
