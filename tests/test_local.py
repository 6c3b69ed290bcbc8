"""Local search changes schedules, and never what they compute."""

import planning_graphs
import pytest

from kmem.planning.bounds import peak_lower_bound
from kmem.planning.simulate import simulate
from kmem.planning.solvers.local import LocalSearch


def halfway(graph):
    peak = simulate(graph, graph.program).peak_bytes
    return (peak + peak_lower_bound(graph)) // 2


@pytest.mark.parametrize("seed", range(20))
def test_it_counts_as_the_simulator_does(seed):
    graph = planning_graphs.random_graph(seed, num_operations=12)
    search = LocalSearch(graph, halfway(graph))
    again = [i for i in range(6) if graph.operations[i].recomputable]
    steps = [*graph.program, *again]
    usage = [graph.constant_bytes + u for u in search.usage(steps)]
    assert usage == list(simulate(graph, tuple(steps)).step_bytes)


def test_repaired_schedules_run_within_the_budget():
    num_found = 0
    for seed in range(40):
        graph = planning_graphs.random_graph(seed, num_operations=12)
        budget_bytes = halfway(graph)
        search = LocalSearch(graph, budget_bytes, seed)
        steps = search.repair(list(graph.program), 4 * graph.seconds)
        if steps is None:
            continue
        num_found += 1
        before = simulate(graph, tuple(steps))
        after = simulate(graph, tuple(search.tighten(steps)))
        assert before.peak_bytes <= budget_bytes
        assert after.peak_bytes <= budget_bytes
        assert after.seconds <= before.seconds
    assert num_found > 10


def test_a_repeat_for_which_there_is_room_goes():
    graph = planning_graphs.unit_chain(8)
    search = LocalSearch(graph, budget_bytes=20)
    steps = [*range(9), 0, 1, 2, *range(9, 17)]
    assert search.tighten(steps) == list(graph.program)


def test_a_removed_step_takes_what_ran_only_for_it_along():
    graph = planning_graphs.unit_chain(8)
    search = LocalSearch(graph, budget_bytes=20)
    # The second run of 0 is for the second of 1, the third for the end.
    steps = [*range(9), *range(9, 14), 0, 1, 14, 15, 0, 16]
    kept = [*range(9), *range(9, 16), 0, 16]
    assert search.without(steps, {15}) == kept


def test_ruin_leaves_a_schedule_that_runs():
    graph = planning_graphs.unit_chain(16)
    search = LocalSearch(graph, budget_bytes=6)
    steps = search.repair(list(graph.program), 10 * graph.seconds)
    assert steps is not None
    for _ in range(20):
        ruined = search.ruin(steps)
        simulation = simulate(graph, tuple(ruined))
        assert 33 <= simulation.seconds < len(steps)
