import dataclasses
import functools
import math
import random

import planning_cases as cases
import pytest

from kmem.planning import bounds
from kmem.planning import choosing
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.line import Line
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.network import Stage
from kmem.planning.table import Table


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_chains_are_the_best_of_all_for_every_budget(seed):
    network = cases.random_chain(random.Random(seed), 5)
    solver = choosing.ChainSolver(network)
    best = cases.best_of_all(network)
    assert solver.smallest.peak_bytes == best[0][0]
    for peak_bytes, seconds in best:
        assert solver.within(peak_bytes).seconds == seconds


@pytest.mark.parametrize("host_seconds", [0.0, 0.25, 1.0, 16.0])
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_chains_with_a_host_are_the_best_of_all(seed, host_seconds):
    network = cases.random_chain(random.Random(seed), 4)
    network = dataclasses.replace(network, host_seconds=host_seconds)
    solver = choosing.ChainSolver(network)
    best = cases.best_of_all(network)
    assert solver.smallest.peak_bytes == best[0][0]
    for peak_bytes, seconds in best:
        point = solver.within(peak_bytes)
        assert point.seconds == seconds
        graph = network.graph
        assert bounds.peak_lower_bound(graph) <= point.peak_bytes
        assert bounds.seconds_lower_bound(graph, peak_bytes) <= seconds


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_a_segment_does_not_run_again_from_stays_on_the_device(count):
    network = cases.residual(count)
    hosted = dataclasses.replace(network, host_seconds=1 / 16)
    without = choosing.ChainSolver(network).smallest
    smallest = choosing.ChainSolver(hosted).smallest
    assert smallest.peak_bytes <= without.peak_bytes
    assert smallest.seconds < without.seconds


@pytest.mark.parametrize("seed", range(8))
def test_what_waits_on_the_host_is_not_on_the_device(seed):
    network = cases.random_network(random.Random(seed), 5)
    hosted = dataclasses.replace(network, host_seconds=0.0)
    for point in cases.frontier(hosted, 10):
        assert (point.peak_bytes, point.seconds) == cases.cost(
            hosted, point.segments
        )
    smallest = choosing.ChainSolver(network).smallest.peak_bytes
    assert choosing.ChainSolver(hosted).smallest.peak_bytes <= smallest


@pytest.mark.parametrize(("length", "count"), [(1, 5), (2, 2)])
def test_plans_of_repeated_blocks_are_the_best_of_all(length, count):
    block = cases.random_chain(random.Random(1), length)
    network = cases.repeated(block, count)
    solver = choosing.ChainSolver(network)
    best = cases.best_of_all(network)
    assert solver.smallest.peak_bytes == best[0][0]
    for peak_bytes, seconds in best:
        assert solver.within(peak_bytes).seconds == seconds


def test_repeated_blocks_are_solved_once():
    block = cases.random_chain(random.Random(0), 3)
    num_rows = []
    for count in (5, 10, 20):
        network = cases.repeated(block, count)
        num_stages = len(network.stages)
        line = Line(network, list(range(1, num_stages)))
        allowed = network.allowed(range(num_stages + 1))
        table = Table(line, allowed, line.full_bytes, line.full_bytes)
        num_rows.append(table.num_rows)
    # For each length: one of three blocks to begin with, the line's first
    # stage, which reads another value, or its end.
    assert num_rows[2] <= 5 * num_stages
    assert num_rows[2] - num_rows[1] == 2 * (num_rows[1] - num_rows[0])


@pytest.mark.parametrize("seed", range(8))
def test_plans_fit_where_values_skip_stages(seed):
    network = cases.random_network(random.Random(seed), 5)
    solver = choosing.ChainSolver(network)
    for peak_bytes, seconds in cases.best_of_all(network):
        if peak_bytes < solver.smallest.peak_bytes:
            continue
        point = solver.within(peak_bytes)
        assert cases.cost(network, point.segments) == (
            point.peak_bytes,
            point.seconds,
        )
        assert cases.is_allowed(network, point.segments)
        assert point.peak_bytes <= peak_bytes
        assert point.seconds >= seconds


def test_plans_are_nearly_the_best_where_values_skip_stages():
    # The recurrence counts some values for longer than they live. Bounds of
    # its loss, over all budgets of some networks of few cheap stages.
    found = best = missed = total = 0
    for seed in range(12):
        network = cases.random_network(random.Random(seed), 5)
        solver = choosing.ChainSolver(network)
        for peak_bytes, seconds in cases.best_of_all(network):
            total += 1
            if peak_bytes < solver.smallest.peak_bytes:
                missed += 1
                continue
            found += solver.within(peak_bytes).seconds
            best += seconds
    assert found <= 1.06 * best
    assert missed <= 0.15 * total


def _rotor(values, saved, forward, slots: int) -> float:
    """The extra time by the paper's recurrence, for one amount of memory."""

    # Nobody hands the last stage a gradient.
    gradients = [*values[:-1], 0]

    @functools.cache
    def best(first, last, memory):
        gradient = gradients[last + 1]
        keep = saved[first] + max(
            gradient, gradients[first] + gradients[first + 1]
        )
        result = math.inf
        if memory >= keep:
            result = 0
            if first < last:
                result = best(first + 1, last, memory - saved[first])
        # Its forward pass keeps nothing, but makes all the same.
        made = [values[k] + saved[k] for k in range(first + 1, last)]
        if memory < gradient + max([saved[first], *made]):
            return result
        for stop in range(first + 1, last + 1):
            again = sum(forward[first:stop])
            following = best(stop, last, memory - values[stop])
            inner = best(first, stop - 1, memory)
            result = min(result, again + following + inner)
        return result

    return best(0, len(forward) - 1, slots)


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_rotors_recurrence(seed):
    draw = random.Random(seed)
    values = [draw.randint(1, 9) for _ in range(13)]
    saved = [value + draw.randint(0, 9) for value in values[1:]]
    forward = [draw.randint(1, 9) for _ in range(12)]
    network = cases.chain(values, saved, forward)
    solver = choosing.ChainSolver(network)
    full, fastest = cases.cost(network, ())
    for budget_bytes in range(solver.smallest.peak_bytes, full + 1):
        found = solver.within(budget_bytes).seconds
        slots = budget_bytes - network.graph.constant_bytes
        assert found == fastest + _rotor(values, saved, forward, slots)


@pytest.mark.parametrize(
    ("share", "extra_forwards"), [(0.9, 4), (0.7, 11), (0.5, 18), (0.3, 25)]
)
def test_uniform_chain_costs_what_rotors_program_says(share, extra_forwards):
    # rotor's own program on 32 equal stages: 1.042, 1.115, 1.188 and 1.260
    # of 96 units.
    network = cases.chain([1] * 33, [2] * 32, [1] * 32, [2] * 32)
    constant_bytes = network.graph.constant_bytes
    full = cases.cost(network, ())[0] - constant_bytes
    budget_bytes = constant_bytes + int(share * full)
    point = choosing.ChainSolver(network).within(budget_bytes)
    assert cases.cost(network, point.segments)[1] == 96 + extra_forwards


def test_memory_of_uniform_chains_grows_with_the_square_root():
    # Within twice the time, or one more forward pass for each stage.
    peaks = []
    for count in (16, 64):
        network = cases.chain([1] * (count + 1), [1] * count, [1] * count)
        points = [
            p for p in cases.frontier(network, 100) if p.seconds <= 3 * count
        ]
        peaks.append(points[0].peak_bytes - network.graph.constant_bytes)
    assert peaks[1] <= 2 * peaks[0]


def _blocks(count) -> Network:
    """Normalisation, activation, convolution, as the framework keeps them."""
    stages = []
    for index in range(count):
        value = 3 * index
        stages += [
            _stage("norm", value, kept=(value,)),
            _stage("relu", value + 1, kept=(value + 2,)),
            _stage("conv", value + 2, kept=(value + 2,), seconds=10.0),
        ]
    return Network(tuple(stages), (10,) * (3 * count + 1), frozenset({0}))


def _stage(name, value, kept, seconds=1.0) -> Stage:
    return Stage(
        name,
        inputs=(value,),
        outputs=(value + 1,),
        kept=kept,
        gradients=(value,),
        forward_seconds=seconds,
    )


def test_keeps_the_outputs_of_convolutions_and_runs_the_cheap_again():
    network = _blocks(4)
    point = choosing.ChainSolver(network).within(70)
    again = [i for s in point.segments for i in network.again(s)[0]]
    assert point.segments == (Segment(0, 3), Segment(3, 6), Segment(6, 9))
    assert point.seconds == 48 + 3 * 2
    assert {network.stages[i].name for i in again} == {"norm", "relu"}


def test_stages_that_run_once_are_in_no_segment():
    network = cases.chain([4] * 9, [8] * 8, [1] * 8)
    stages = list(network.stages)
    stages[3] = Stage(**{**vars(stages[3]), "recomputable": False})
    network = Network(tuple(stages), network.value_bytes, network.inputs)
    for point in cases.frontier(network):
        assert not any(s.start <= 3 < s.stop for s in point.segments)


def test_segments_begin_and_end_on_one_line():
    network = cases.chain([4] * 9, [8] * 8, [1] * 8)
    network = Network(
        network.stages, network.value_bytes, network.inputs, ((0, 4), (1, 3))
    )
    points = cases.frontier(network)
    assert len(points) > 1
    assert all(cases.is_allowed(network, p.segments) for p in points)


def test_more_budget_never_takes_more_time():
    draw = random.Random(0)
    network = cases.random_network(draw, 30)
    solver = choosing.ChainSolver(network)
    full = cases.cost(network, ())[0]
    budgets = range(solver.smallest.peak_bytes, full + 1)
    seconds = [solver.within(budget).seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)


def test_frontier_trades_time_for_memory():
    network = cases.random_network(random.Random(1), 30)
    points = cases.frontier(network, 20)
    assert 5 < len(points) <= 20
    assert points[-1].segments == ()
    for less, more in zip(points, points[1:], strict=False):
        assert less.peak_bytes < more.peak_bytes
        assert less.seconds > more.seconds


def test_smallest_peak_within_a_time():
    network = cases.chain([1] * 33, [2] * 32, [1] * 32, [2] * 32)
    solver = choosing.ChainSolver(network)
    point = solver.smallest_within(1.3 * 96)
    assert point.seconds <= 1.3 * 96
    assert solver.within(point.peak_bytes - 1).seconds > 1.3 * 96


def test_sizes_that_do_not_fit_in_slots_stay_within_the_budget():
    draw = random.Random(0)
    values = [draw.randint(10**6, 10**8) for _ in range(41)]
    saved = [v + draw.randint(0, 10**8) for v in values[1:]]
    network = cases.chain(values, saved, [draw.random() for _ in range(40)])
    full, fastest = cases.cost(network, ())
    solver = choosing.ChainSolver(network)
    for share, most in ((0.7, 1.12), (0.5, 1.25), (0.3, 1.4)):
        point = solver.within(int(share * full))
        peak_bytes, seconds = cases.cost(network, point.segments)
        assert peak_bytes <= share * full
        assert seconds <= most * fastest


def test_says_which_budget_would_do():
    network = cases.chain([1] * 9, [2] * 8, [1] * 8)
    solver = choosing.ChainSolver(network)
    smallest = solver.smallest.peak_bytes
    with pytest.raises(
        InfeasibleBudget,
        match=f"at least {smallest} bytes,.*budget_bytes={smallest - 1}",
    ) as error:
        solver.within(smallest - 1)
    assert error.value.smallest_bytes == smallest
    assert solver.within(smallest).segments


def test_nothing_is_run_again_if_everything_fits():
    network = cases.chain([1] * 9, [2] * 8, [1] * 8)
    full = cases.cost(network, ())[0]
    assert choosing.ChainSolver(network).within(full).segments == ()
