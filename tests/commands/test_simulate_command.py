"""`kmem simulate`, called in this process."""

import pytest
from trace_cases import training_step
from trace_cases import write

from kmem.commands import cli
from kmem.dtr.simulator import HEURISTICS

pytestmark = pytest.mark.usefixtures("native_library")


@pytest.fixture
def trace(tmp_path):
    return str(write(tmp_path / "step.log.gz", training_step(40)))


def test_it_says_what_a_budget_costs(trace, capsys):
    assert cli.main(["simulate", trace, "--budget", "0.5"]) == 0
    first, second, header, row = capsys.readouterr().out.splitlines()
    assert first == "step.log.gz: 79 operators, 0.0 ms, peak 420 B"
    assert second == "budget: 210 B, 0.5 of the peak"
    assert header.split() == [
        *("heuristic", "compute", "evictions", "recomputes"),
        *("peak", "accesses"),
    ]
    name, compute, evictions, recomputes, *peak, _ = row.split()
    assert name in HEURISTICS and peak == ["210", "B"]
    assert 1 < float(compute.removesuffix("x")) < 1.6
    assert int(evictions) > 0 and int(recomputes) > 0


def test_a_pool_costs_more_than_its_bytes(trace, capsys):
    # Each of the tensors, of ten bytes, takes 256 of a pool.
    arguments = ["simulate", trace, "--pool", "--budget"]
    assert cli.main([*arguments, "5120B"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    _, _, evictions, _, *peak, _ = row.split()
    assert int(evictions) > 0 and peak == ["5.12", "KB"]
    assert cli.main([*arguments, "210B"]) == 1


def test_best_runs_all_heuristics_and_names_the_cheapest(trace, capsys):
    assert cli.main(["simulate", trace, "--budget", "210B", "--best"]) == 0
    *_, best = lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1] for line in lines[3:-1]}
    assert tuple(rows) == HEURISTICS
    name = best.removeprefix("best: ")
    costs = {k: float(v[:-1]) for k, v in rows.items() if v.endswith("x")}
    assert costs[name] == min(costs.values())


def test_a_budget_that_cannot_be_kept_fails(trace, capsys):
    assert cli.main(["simulate", trace, "--budget", "20B"]) == 1
    assert capsys.readouterr().err.startswith(
        "kmem simulate: The threshold must be at least 30 bytes"
    )
    assert cli.main(["simulate", trace, "--budget", "20B", "--best"]) == 1
    *_, last, best = capsys.readouterr().out.splitlines()
    assert last.split() == ["random", "no", "room"]
    assert best == "best: none"


@pytest.mark.parametrize("budget", ["0", "1.5", "much"])
def test_a_budget_must_be_a_size_or_a_share(trace, budget, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", trace, "--budget", budget])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "argument --budget: must be a size such as 500MB" in message
    assert message.endswith(f"Received: {budget}\n")


def test_a_file_that_is_no_trace_exits_with_2(tmp_path, capsys):
    path = tmp_path / "step.log"
    path.write_text("no trace", encoding="utf-8")
    assert cli.main(["simulate", str(path)]) == 2
    assert "step.log, line 1: no trace" in capsys.readouterr().err


def test_an_empty_trace_takes_nothing(tmp_path, capsys):
    path = write(tmp_path / "step.log", [])
    assert cli.main(["simulate", str(path)]) == 0
    assert "peak 0 B" in capsys.readouterr().out
