"""DTR on recorded steps: exact costs, budgets that are kept, and errors."""

import re

import pytest
from trace_cases import STEP
from trace_cases import call
from trace_cases import constant
from trace_cases import release
from trace_cases import training_step
from trace_cases import write

from kmem.base import bindings
from kmem.base import building
from kmem.dtr.simulator import HEURISTICS
from kmem.dtr.simulator import BudgetFailed
from kmem.dtr.simulator import simulate
from kmem.dtr.trace import read_program

pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture
def program(tmp_path):
    return read_program(write(tmp_path / "step.log", training_step(40)))


def test_without_a_budget_nothing_runs_twice(program):
    found = simulate(program)
    assert found.slowdown == 1
    assert found.seconds == program.seconds == pytest.approx(79e-7)
    assert found.peak_bytes == 420
    assert found.num_evictions == found.num_recomputations == 0


def test_a_view_and_a_change_in_place_cost_what_they_hold(tmp_path):
    found = simulate(read_program(write(tmp_path / "step.log", STEP)))
    assert found.seconds == 18
    # `w`, what `relu_` reads, which `h2` still holds, and what it makes.
    assert found.peak_bytes == 180


def test_a_tensor_is_made_again_for_what_it_costs(tmp_path):
    lines = [
        *constant("x", 10),
        *call("a", ["x"], {"a": (40, -1)}, 100),
        *call("b", ["a"], {"b": (40, -1)}, 300),
        *call("c", ["b"], {"c": (40, -1)}, 300),
        *release("b"),
        *call("d", ["a", "c"], {"d": (10, -1)}, 300),
    ]
    program = read_program(write(tmp_path / "step.log", lines))
    found = simulate(program, 100)
    assert found.slowdown == pytest.approx(1.1)
    assert (found.num_evictions, found.num_recomputations) == (1, 1)
    assert found.peak_bytes == 100


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("sqrt_sampling", [False, True])
def test_every_heuristic_keeps_the_budget(program, heuristic, sqrt_sampling):
    found = simulate(
        program, 120, heuristic, sqrt_sampling=sqrt_sampling, slowdown_limit=99
    )
    assert found.peak_bytes <= 120
    assert found.slowdown > 1
    assert found.num_accesses > 0
    assert found == simulate(
        program, 120, heuristic, sqrt_sampling=sqrt_sampling, slowdown_limit=99
    )


def test_what_is_drawn_depends_on_the_seed(program):
    found = {
        simulate(program, 150, "random", seed=seed, slowdown_limit=99)
        for seed in range(5)
    }
    assert len(found) > 1


def test_less_memory_costs_more_time(program):
    shares = (0.9, 0.5, 0.2)
    costs = [simulate(program, int(420 * s)).slowdown for s in shares]
    assert costs == sorted(costs)
    assert costs[0] < 1.1 and costs[-1] < 2.5


def test_a_budget_that_cannot_be_kept_names_one_that_could(program):
    with pytest.raises(
        BudgetFailed, match=r"must be at least 40 bytes: .* Received: 39"
    ) as caught:
        simulate(program, 39)
    assert not caught.value.thrashed
    simulate(program, 40, slowdown_limit=99)


def test_recomputation_without_end_is_ended(program):
    with pytest.raises(
        BudgetFailed, match="must end: .*ancestors.*--best"
    ) as caught:
        simulate(program, 40, slowdown_limit=2)
    assert caught.value.thrashed


def test_a_heuristic_must_be_one_that_there_is(program):
    with pytest.raises(
        ValueError, match="`heuristic` must be one of auto, dtr_eq, .*'best'"
    ):
        simulate(program, 100, "best")


@pytest.mark.parametrize("name", ["Options", "Statistics"])
def test_structures_are_those_of_the_core(name):
    header = building.sources_folder() / "dtr" / "runtime.h"
    body = re.search(
        rf"^struct {name} {{$(.*?)^}};$",
        header.read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )[1]
    theirs = re.findall(r"^  (u?int64_t|bool) (\w+) =", body, re.MULTILINE)
    ours = getattr(bindings, name)._fields_
    assert [field for _, field in theirs] == [field for field, _ in ours]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_number_that_does_not_fit_is_refused(tmp_path, seed):
    program = read_program(write(tmp_path / "step.log", STEP))
    with pytest.raises(ValueError, match=rf"`seed` must fit.*seed={seed}"):
        simulate(program, seed=seed)
    with pytest.raises(ValueError, match="`threshold_bytes` must fit"):
        simulate(program, 2**64 + 5)


def test_in_a_pool_of_the_budget_a_program_stays_within_it(program):
    # Every tensor, of ten bytes, takes a grain of the pool.
    found = simulate(program, 10**6, in_pool=True)
    assert found.num_recomputations == 0
    assert found.peak_bytes == 256 * simulate(program).peak_bytes // 10
    found = simulate(program, 20 * 256, in_pool=True)
    assert found.num_recomputations > 0
    assert found.peak_bytes <= 20 * 256
    assert simulate(program, 20 * 256, in_pool=True) == found
