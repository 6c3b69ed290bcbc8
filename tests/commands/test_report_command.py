"""`kmem report`, called in this process."""

import pytest

from kmem.commands import cli


@pytest.mark.usefixtures("native_library")
def test_it_draws_what_is_chosen_for_a_budget(saved_model, tmp_path, capsys):
    page = tmp_path / "page.html"
    command = ["report", saved_model, "--batch", "4096", "--budget", "1TB"]
    assert cli.main([*command, "--output", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"drawn: {page}\n")
    assert "fits in" in page.read_text()
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert "page_step.png" in pictures
