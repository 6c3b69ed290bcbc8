"""`kmem plan`, called in this process."""

import kmem
from kmem.commands import cli


def test_it_prints_saves_and_draws_a_plan(saved_model, tmp_path, capsys):
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    command = ["plan", saved_model, "--batch", "2048", "--costs", "flops"]
    outputs = ["--output", str(plan), "--plot", str(picture)]
    assert cli.main([*command, *outputs]) == 0
    output = capsys.readouterr().out
    assert kmem.Plan.load(plan).summary() in output
    assert f"saved: {plan}" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_budget_that_cannot_be_kept_names_one_that_can(saved_model, capsys):
    command = ["plan", saved_model, "--batch", "2048", "--costs", "flops"]
    assert cli.main([*command, "--budget", "1KB"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("kmem plan: `budget` must be")
    assert "the smallest peak that is known" in errors
