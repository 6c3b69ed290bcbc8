"""How steps are taken within a budget, once that is chosen."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmem.budget.report import MemoryReport
from kmem.fit import undoing
from kmem.fit.session import Session


@dataclasses.dataclass
class Bucket:
    """How steps are taken with batches of some shapes, or smaller ones."""

    batch: Any
    session: Session
    report: MemoryReport
    # Between the steps.
    expected_in_use_bytes: int
    # Whether nothing that needs less is known.
    is_least: bool = False
    num_steps: int = 0
    reader: undoing.Reader | None = None
    # Whether steps write summaries, as the search's do not.
    writes: bool = False

    def step(self, spec: Any) -> Callable:
        """Takes a step with a batch, of which `fit` knows this."""
        if not self.writes and tf.summary.should_record_summaries():
            self.writes = True
            self.session.trace_again()
        return self.session.on_batch(spec)

    def read_state(self) -> undoing.Reader:
        """Reads what a step changes; the first one may make variables."""
        self.reader = self.session.changes.reader(self.reader)
        return self.reader
