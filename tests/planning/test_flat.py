import random

import planning_cases as cases
import pytest

from kmem.planning import choosing
from kmem.planning import flat
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.network import Segment


def test_equal_stages_make_equal_segments_and_the_last_is_kept():
    network = cases.chain([1] * 17, [1] * 16, [1] * 16)
    plan = flat.sqrt(network, num_segments=4).segments
    assert plan == (Segment(0, 4), Segment(4, 8), Segment(8, 12))
    # 16 forward, 12 of them again, 16 backward. The inputs of three segments
    # and of the step, four values kept, two gradients.
    assert cases.cost(network, plan) == (1 + 2 + 4 + 2, 44)


def test_cuts_where_little_crosses():
    values = [1] + [9, 9, 9, 2, 9, 9, 9, 9]
    network = cases.chain(values, values[1:], [1] * 8)
    assert flat.sqrt(network, num_segments=2).segments == (Segment(0, 4),)


@pytest.mark.parametrize("count", [16, 64, 256])
def test_memory_grows_with_the_square_root(count):
    network = cases.chain([1] * (count + 1), [1] * count, [1] * count)
    peak_bytes, seconds = cases.cost(network, flat.sqrt(network).segments)
    assert peak_bytes <= 2 * count**0.5 + 3
    assert seconds <= 3 * count


def test_a_budget_takes_the_fastest_that_fits():
    network = cases.chain([1] * 65, [1] * 64, [1] * 64)
    smallest = cases.cost(network, flat.sqrt(network).segments)
    for budget_bytes in range(smallest[0], 70):
        plan = flat.sqrt(network, budget_bytes=budget_bytes).segments
        peak_bytes, seconds = cases.cost(network, plan)
        assert peak_bytes <= budget_bytes
        assert seconds <= smallest[1]
    assert plan == ()


def test_says_which_budget_would_do():
    network = cases.chain([1] * 65, [1] * 64, [1] * 64)
    smallest = cases.cost(network, flat.sqrt(network).segments)[0]
    with pytest.raises(InfeasibleBudget, match=f"at least {smallest} bytes,"):
        flat.sqrt(network, budget_bytes=smallest - 1)


@pytest.mark.parametrize("seed", range(5))
def test_never_beats_the_optimal_plans_of_a_chain(seed):
    network = cases.random_chain(random.Random(seed), 20)
    plan = flat.sqrt(network).segments
    assert cases.is_allowed(network, plan)
    peak_bytes, seconds = cases.cost(network, plan)
    best = choosing.ChainSolver(network).within(peak_bytes)
    assert best.seconds <= seconds
