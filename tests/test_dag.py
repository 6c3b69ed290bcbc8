"""The general solver: optimal where that is known, within budget always."""

import os
import pathlib
import subprocess
import sys

import planning_graphs
import pytest

from kmem.planning.bounds import peak_lower_bound
from kmem.planning.errors import InfeasibleBudget
from kmem.planning.simulate import simulate
from kmem.planning.solvers import cpsat
from kmem.planning.solvers import greedy
from kmem.planning.solvers.dag import solve

needs_ortools = pytest.mark.skipif(
    not cpsat.is_available(), reason="needs OR-tools"
)


@needs_ortools
@pytest.mark.parametrize(
    ("num_forward", "budget_bytes", "seconds"),
    [
        (8, 8, 19),
        (8, 5, 22),
        (8, 4, 26),
        (16, 8, 43),
        (16, 6, 47),
        (64, 19, 176),
    ],
)
def test_the_optima_of_checkmates_unit_chain(
    num_forward, budget_bytes, seconds
):
    graph = planning_graphs.unit_chain(num_forward)
    solution = solve(graph, budget_bytes, seconds_limit=30)
    assert solution.seconds == seconds
    assert solution.peak_bytes <= budget_bytes
    assert solution.is_optimal


@needs_ortools
def test_the_optimum_of_checkmates_vgg19():
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
    solution = solve(graph, 51_380_224, seconds_limit=2)
    assert solution.seconds == pytest.approx(58.983, abs=0.001)


@needs_ortools
@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_are_solved_as_well_as_by_brute_force(seed):
    graph = planning_graphs.random_graph(seed)
    peak = simulate(graph, graph.program).peak_bytes
    for budget_bytes in (peak - 1, (peak + peak_lower_bound(graph)) // 2):
        best = planning_graphs.best_seconds(graph, budget_bytes)
        if best is None:
            with pytest.raises(InfeasibleBudget):
                solve(graph, budget_bytes, seconds_limit=0.2)
            continue
        solution = solve(graph, budget_bytes, seconds_limit=5)
        simulation = simulate(graph, solution.schedule)
        assert simulation.peak_bytes == solution.peak_bytes <= budget_bytes
        assert simulation.seconds == solution.seconds == best
        assert solution.lower_bound_seconds <= best


def test_without_ortools_there_is_a_plan_all_the_same(monkeypatch):
    monkeypatch.setattr(cpsat, "is_available", lambda: False)
    graph = planning_graphs.unit_chain(16)
    solution = solve(graph, 6, seconds_limit=0.5)
    assert simulate(graph, solution.schedule).peak_bytes <= 6
    assert 47 <= solution.seconds <= 60
    assert solution.lower_bound_seconds <= 47
    assert not solution.is_optimal


def test_a_budget_that_needs_no_plan_has_none():
    graph = planning_graphs.unit_chain(8)
    solution = solve(graph, 10)
    assert solution.schedule == graph.program
    assert solution.is_optimal
    assert solution.gap == 0


def test_an_infeasible_budget_says_what_is_known():
    graph = planning_graphs.unit_chain(8)
    with pytest.raises(InfeasibleBudget, match="Received: budget") as caught:
        solve(graph, 2, seconds_limit=0.5)
    assert caught.value.lower_bound_bytes == 3
    assert caught.value.smallest_bytes in (3, 4)


def test_progress_hears_of_better_schedules_only():
    heard = []
    graph = planning_graphs.unit_chain(16)
    solution = solve(
        graph,
        6,
        seconds_limit=0.5,
        progress=lambda passed, seconds: heard.append(seconds),
    )
    assert heard == sorted(set(heard), reverse=True)
    assert heard[-1] == solution.seconds


@pytest.mark.parametrize("name", greedy.HEURISTICS)
def test_heuristics_keep_the_budget_or_give_up(name):
    heuristic = greedy.HEURISTICS[name]
    num_found = 0
    for seed in range(20):
        graph = planning_graphs.random_graph(seed, num_operations=12)
        peak = simulate(graph, graph.program).peak_bytes
        budget_bytes = (peak + peak_lower_bound(graph)) // 2
        schedule = greedy.run_within(graph, budget_bytes, heuristic)
        if schedule is not None:
            num_found += 1
            assert simulate(graph, schedule).peak_bytes <= budget_bytes
    assert num_found > 5


@needs_ortools
def test_ortools_stays_out_of_the_process_that_asks():
    # With TensorFlow in the same process it can crash.
    solution = solve(planning_graphs.unit_chain(8), 4)
    assert solution.is_optimal
    assert "ortools" not in sys.modules


@pytest.mark.parametrize("used", ["Series", "DataFrame"])
def test_an_ortools_that_wants_more_of_pandas_gets_it(tmp_path, used):
    (tmp_path / "pandas.py").write_text("DataFrame = Series = 'the real one'")
    package = tmp_path / "ortools" / "sat" / "python"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "cp_model.py").write_text(f"import pandas as p; x = p.{used}")
    code = (
        "from cpsat_process import import_quickly\n"
        "print(import_quickly().x == 'the real one')"
    )
    solvers = str(pathlib.Path(cpsat.__file__).parent)
    python = [sys.executable, "-c", code]
    paths = {"PYTHONPATH": os.pathsep.join((str(tmp_path), solvers))}
    done = subprocess.run(python, env=paths, capture_output=True, text=True)
    assert done.stdout.split() == [str(used == "DataFrame")], done.stderr
