import planning_cases
import pytest

from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.choosing import MAX_SLOWDOWN
from kmem.planning.choosing import Chooser
from kmem.planning.flat import Genetic

GENETIC = Genetic(thresh_nr_try=2, genetic_nr_iter=2, num_worker=1)


def network():
    return planning_cases.chain([10] * 17, [10] * 16, [1.0] * 16, [2.0] * 16)


@pytest.mark.parametrize("solver", ["optimal", "sqrt", GENETIC])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_every_solver_keeps_a_budget(solver, share):
    chooser = Chooser(network(), solver)
    budget = int(share * chooser.everything.peak_bytes)

    point = chooser.within(budget)

    assert point.peak_bytes <= budget
    cost = planning_cases.cost(chooser.network, point.segments)
    assert cost == (point.peak_bytes, point.seconds)


@pytest.mark.parametrize("solver", ["optimal", "sqrt", GENETIC])
def test_nothing_is_recomputed_without_need(solver):
    chooser = Chooser(network(), solver)

    assert chooser.within(chooser.everything.peak_bytes).segments == ()


@pytest.mark.parametrize("solver", ["sqrt", GENETIC])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_no_solver_is_faster_than_the_optimal_one(solver, share):
    other = Chooser(network(), solver)
    budget = int(share * other.everything.peak_bytes)

    optimal = Chooser(network()).within(budget)

    assert optimal.seconds <= other.within(budget).seconds


def test_auto_is_the_smallest_peak_that_is_not_too_slow():
    chooser = Chooser(network())
    most = MAX_SLOWDOWN * chooser.everything.seconds

    point = chooser.auto()

    assert point.seconds <= most
    with pytest.raises(InfeasibleBudget) as error:
        chooser.within(1)
    # Within any smaller budget the fastest plan is too slow.
    for budget in range(error.value.smallest_bytes, point.peak_bytes):
        assert chooser.within(budget).seconds > most


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_no_plan_is_faster_than_the_bound(share):
    chooser = Chooser(network())
    budget = int(share * chooser.everything.peak_bytes)

    bound = chooser.lower_bound_seconds(budget)

    assert 0 < bound <= chooser.within(budget).seconds
