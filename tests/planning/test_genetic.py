import random

import planning_cases as cases
import pytest

from kmem.planning import choosing
from kmem.planning import flat
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.flat import Genetic


def _peak(network, **options) -> int:
    plan = flat.search(network, Genetic(**options)).segments
    assert cases.is_allowed(network, plan)
    assert not any(segment.inner for segment in plan)
    return cases.cost(network, plan)[0]


def test_thresholds_alone_find_the_square_root_of_equal_stages():
    network = cases.chain([1] * 65, [1] * 64, [1] * 64)
    assert _peak(network) <= 2 * 8 + 3


@pytest.mark.parametrize("seed", range(5))
def test_the_genetic_search_only_improves(seed):
    network = cases.random_network(random.Random(seed), 25)
    assert _peak(network, genetic_nr_iter=10) <= _peak(network)


def test_the_genetic_search_finds_what_thresholds_miss():
    network = cases.random_network(random.Random(1), 25)
    assert _peak(network, genetic_nr_iter=10) < _peak(network)


def test_the_search_repeats():
    network = cases.random_network(random.Random(0), 25)
    options = Genetic(genetic_nr_iter=5)
    plans = {flat.search(network, options).segments for _ in range(2)}
    assert len(plans) == 1


def test_speed_is_given_back_up_to_the_lower_bound():
    network = cases.chain([10**6] * 65, [10**6] * 64, [1] * 64)
    costs = [
        cases.cost(
            network, flat.search(network, Genetic(lb_memory_mb=n)).segments
        )
        for n in (0, 30, 50, 100)
    ]
    for n, (peak_bytes, _) in zip((30, 50), costs[1:], strict=False):
        assert peak_bytes <= n * 10**6
    seconds = [seconds for _, seconds in costs]
    assert seconds == sorted(set(seconds), reverse=True)
    assert seconds[-1] == 128


def test_a_budget_is_kept_and_used():
    network = cases.chain([1] * 65, [1] * 64, [1] * 64)
    smallest = cases.cost(network, flat.search(network).segments)
    plan = flat.search(network, budget_bytes=40).segments
    assert cases.cost(network, plan)[0] <= 40
    assert cases.cost(network, plan)[1] < smallest[1]
    with pytest.raises(
        InfeasibleBudget, match=f"at least {smallest[0]} bytes,"
    ):
        flat.search(network, budget_bytes=smallest[0] - 1)


@pytest.mark.parametrize("seed", range(5))
def test_never_beats_the_optimal_plans_of_a_chain(seed):
    network = cases.random_chain(random.Random(seed), 20)
    plan = flat.search(network, Genetic(genetic_nr_iter=5)).segments
    peak_bytes, seconds = cases.cost(network, plan)
    best = choosing.ChainSolver(network).within(peak_bytes)
    assert best.seconds <= seconds
