"""Dry runs of small models, which take no more time than they must."""

import pytest

from kmem.budget import tuning


@pytest.fixture(autouse=True)
def _dry_runs_are_short(monkeypatch):
    monkeypatch.setattr(tuning, "PAUSE_SECONDS", 0.005)
