"""No schedule beats the bounds."""

import math

import planning_graphs
import pytest

from kmem.planning.bounds import peak_lower_bound
from kmem.planning.bounds import seconds_lower_bound
from kmem.planning.graph import Graph
from kmem.planning.graph import Operation
from kmem.planning.graph import simulate


def graph_of(*operations, sizes, **others):
    return Graph(
        operations=tuple(
            Operation(f"op{i}", inputs, outputs, seconds, **more)
            for i, (inputs, outputs, seconds, more) in enumerate(operations)
        ),
        tensor_bytes=sizes,
        **others,
    )


# Three tensors wait while a large one is made, then one operation reads them.
WAITING = graph_of(
    ((), (0,), 1.0, {}),
    ((), (1,), 2.0, {}),
    ((), (2,), 6.0, {}),
    ((), (3,), 1.0, {"workspace_bytes": 50}),
    ((0, 1, 2), (4,), 1.0, {}),
    sizes=(10, 10, 10, 0, 5),
)


def test_the_peak_is_at_least_what_one_operation_needs():
    assert peak_lower_bound(WAITING) == 50


def test_what_cannot_be_made_again_counts_for_the_peak():
    graph = graph_of(
        ((), (0,), 1.0, {"recomputable": False}),
        ((), (1,), 1.0, {"workspace_bytes": 50}),
        ((0, 1), (), 1.0, {}),
        sizes=(10, 1),
        resident_bytes=1000,
    )
    assert peak_lower_bound(graph) == 1061


def test_all_results_are_there_at_the_end():
    graph = graph_of(
        ((), (0,), 1.0, {}),
        ((), (1,), 1.0, {}),
        sizes=(10, 20),
        results=frozenset({0, 1}),
    )
    assert peak_lower_bound(graph) == 30


@pytest.mark.parametrize(
    ("budget_bytes", "seconds"),
    [(80, 0), (75, 0.5), (70, 1), (65, 2), (60, 3), (55, 6), (50, 9)],
)
def test_the_cheapest_bytes_are_made_again_first(budget_bytes, seconds):
    bound = seconds_lower_bound(WAITING, budget_bytes)
    assert bound == pytest.approx(11 + seconds)


def test_an_operation_that_made_two_tensors_runs_again_once():
    graph = graph_of(
        ((), (0, 1), 4.0, {}),
        ((), (2,), 1.0, {"workspace_bytes": 30}),
        ((0, 1, 2), (), 1.0, {}),
        sizes=(10, 10, 1),
    )
    assert seconds_lower_bound(graph, 31) == 6 + 4
    assert seconds_lower_bound(graph, 41) == 6 + 2


def test_what_an_operation_reads_cannot_be_dropped_for_it():
    graph = graph_of(
        ((), (0,), 1.0, {}),
        ((0,), (1,), 1.0, {}),
        ((0, 1), (), 1.0, {}),
        sizes=(10, 20),
    )
    assert seconds_lower_bound(graph, 29) == math.inf
    assert seconds_lower_bound(graph, 30) == 3


def test_the_bounds_of_checkmates_vgg19_hold_for_its_plan():
    # From its artifact: 58.896 for the program, 58.983 at 51.38 MB. Its
    # program peaks at 81.72 MB: as much as all that the forward pass makes and
    # the gradients that the first pooling reads and makes. Here what is not
    # read any more is dropped, and the program peaks at 66.63 MB.
    graph = planning_graphs.vgg19()
    program = simulate(graph, graph.program)
    assert program.seconds == pytest.approx(58.896, abs=0.001)
    assert program.peak_bytes == 66_633_728
    made_bytes = sum(graph.tensor_bytes[: graph.num_forward])
    pooling_bytes = graph.tensor_bytes[1] + graph.tensor_bytes[2]
    assert made_bytes + pooling_bytes == 81_723_300
    assert peak_lower_bound(graph) == 51_380_224
    bound = seconds_lower_bound(graph, 51_380_224)
    assert program.seconds < bound <= 58.983 + 0.001


@pytest.mark.parametrize("seed", range(30))
def test_bounds_hold_for_the_best_of_all_schedules(seed):
    graph = planning_graphs.random_graph(seed)
    peak = simulate(graph, graph.program).peak_bytes
    for budget_bytes in range(peak_lower_bound(graph) - 2, peak + 1, 2):
        best = planning_graphs.best_seconds(graph, budget_bytes)
        bound = seconds_lower_bound(graph, budget_bytes)
        assert best is None or bound <= best + 1e-9
        if budget_bytes < peak_lower_bound(graph):
            assert best is None
