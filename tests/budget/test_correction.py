"""Plans stay within their budget where steps need other than what is drawn."""

import pytest
import tensorflow as tf
from planning_cases import chain
from planning_cases import frontier

from kmem.budget.correction import Corrector
from kmem.budget.correction import Learned
from kmem.budget.dry_run import Measurement
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.choosing import Chooser

LENGTH, BUDGET, IN_USE = 40, 24_000, 500
SIZES = [1000] * (LENGTH + 1)
NETWORK = chain(SIZES, SIZES[1:], [1.0] * LENGTH)


def corrector(needs, mode="graph", others=0):
    """One whose steps need what a function of their drawn peak says."""
    runs = []

    def run(plan):
        runs.append(plan)
        peak = needs(plan.predicted_peak_bytes - plan.resident_bytes)
        return peak and Measurement(peak + others, 1.0)

    chooser = Chooser(NETWORK)
    spec = tf.TensorSpec((4, 3))
    made = Corrector(Learned(chooser), spec, mode, IN_USE + others, run)
    return made, runs


def least_seconds(needs):
    """Of the plans that stay within the budget."""
    points = frontier(NETWORK, 200)
    return min(p.seconds for p in points if needs(p.peak_bytes) <= BUDGET)


@pytest.mark.parametrize(
    "needs",
    [
        lambda drawn: drawn + IN_USE,
        lambda drawn: drawn + IN_USE + 4000,
        lambda drawn: 1.25 * drawn + IN_USE,
        # Much more, from some plan on.
        lambda drawn: drawn + (6000 if drawn > 17_000 else IN_USE),
        lambda drawn: drawn + (9000 if drawn > 20_000 else IN_USE),
        lambda drawn: None if drawn > 19_000 else drawn + IN_USE,
    ],
    ids=["as drawn", "more", "a share", "jump", "high jump", "out of memory"],
)
@pytest.mark.parametrize("others", [0, 10_000_000])
def test_a_plan_uses_what_its_budget_allows(needs, others):
    """However much else is in memory."""
    made, runs = corrector(needs, others=others)

    plan = made.plan(BUDGET + others, 0)

    drawn = plan.predicted_peak_bytes - plan.resident_bytes
    assert plan.predicted_peak_bytes - others == needs(drawn) <= BUDGET
    seconds = plan.predicted_seconds
    assert seconds <= 1.05 * least_seconds(lambda d: needs(d) or BUDGET + 1)
    assert len(runs) <= 6


def test_a_plan_that_runs_out_of_memory_is_not_taken_however_little_is_drawn():
    made, _ = corrector(lambda drawn: None)

    with pytest.raises(InfeasibleBudget):
        made.plan(BUDGET, 0)


def test_recomputation_that_saves_nothing_in_xla_is_left_out():
    floor = 30_000
    made, runs = corrector(lambda drawn: max(drawn, floor) + IN_USE, mode="xla")
    chooser = Chooser(NETWORK)

    plan = made.plan("auto", 0)

    assert plan.predicted_peak_bytes == floor + IN_USE
    assert plan.predicted_seconds < 0.95 * chooser.auto().seconds
    assert plan.predicted_seconds < 1.05 * chooser.within(floor).seconds
    assert len(runs) <= 4


def test_as_much_is_recomputed_in_xla_as_saves_memory():
    made, _ = corrector(lambda drawn: drawn + IN_USE, mode="xla")

    plan = made.plan("auto", 0)

    assert plan.segments == Chooser(NETWORK).auto().segments


def test_a_plan_that_stayed_within_a_budget_is_not_run_again():
    made, runs = corrector(lambda drawn: drawn + IN_USE)
    first = made.plan(BUDGET, 0)
    count = len(runs)

    second = made.plan(BUDGET + 100, 100)

    assert second.segments == first.segments
    assert len(runs) == count


def test_an_error_names_the_least_that_was_seen():
    made, _ = corrector(lambda drawn: drawn + BUDGET)

    with pytest.raises(InfeasibleBudget) as error:
        made.plan(BUDGET, 0)

    smallest = Chooser(NETWORK).smallest.peak_bytes
    assert smallest + BUDGET <= error.value.smallest_bytes
    assert error.value.smallest_bytes <= 1.03 * (smallest + BUDGET)
