"""Rehearsals of a model's steps, of which none is run twice.

A search (searching.py) rehearses a dozen steps. A program that is started
again would rehearse them all again, and a search for less memory most of them.
Where bytes cannot be counted, no step is run: a plan that recomputes nothing
tells what is predicted of it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import keras

from kmem import memory
from kmem.base import cache
from kmem.base.store import Store
from kmem.budget import planner
from kmem.budget import turns
from kmem.budget.dry_run import Rehearsal
from kmem.budget.dry_run import rehearse_on_batch
from kmem.budget.excerpts import Excerpt
from kmem.fit.session import Session
from kmem.keras_graph import matching
from kmem.keras_graph import profiling
from kmem.options import Remat
from kmem.sharding import agreeing
from kmem.step import batches
from kmem.step import capture


def _save(found: Rehearsal, path: pathlib.Path) -> None:
    cache.write_whole(path, json.dumps([found.peak_bytes, found.seconds]))


def _load(path: pathlib.Path) -> Rehearsal:
    peak_bytes, seconds = json.loads(path.read_bytes())
    return Rehearsal(int(peak_bytes), float(seconds))


def _save_ratio(found: float, path: pathlib.Path) -> None:
    cache.write_whole(path, json.dumps(found))


def _load_ratio(path: pathlib.Path) -> float:
    return float(json.loads(path.read_bytes()))


# The fastest plan within more than any step needs.
_KEEPS_EVERYTHING = Remat(budget=2**62)
_store = Store("rehearsals", _save, _load)
_ratios = Store("comparisons", _save_ratio, _load_ratio)


class Rehearsals:
    """Those of one model.

    Args:
        model: The model, compiled and with its variables.
        batch: What it trains on, as `tf.TensorSpec`s.
    """

    def __init__(self, model: keras.Model, batch: Any):
        self._model = model
        self._is_counted = memory.is_counted()
        self._key = _key(model, batch)
        # Once: right after a step its inputs may still be there.
        self._in_use = memory.current() if self._is_counted else 0

    def run(
        self, step: Excerpt, at_most_seconds: float
    ) -> tuple[Rehearsal | None, Session | None]:
        """Rehearses a step, unless that was done before.

        Args:
            step: The step.
            at_most_seconds: As in `rehearse_on_batch`.

        Returns:
            What was seen, in the process that needs most, or `None` if it ran
            out of memory; and what ran it, if it ran now.
        """
        if not self._is_counted:
            return self._predicted(step), None
        group = agreeing.processes(step.options)
        key = self._step(step)
        found, session = self._find(key), None
        is_missing = agreeing.highest(group, int(found is None))
        if found is None or is_missing:
            session = self._session(step)
            found = rehearse_on_batch(session, step.batch, at_most_seconds)
            if found is None:
                # What took the memory may be gone the next time.
                return None, session
            if self._key:
                _store.keep(key, self._in_use, found)
        agreed = Rehearsal(
            agreeing.highest(group, found.peak_bytes),
            agreeing.slowest(group, found.seconds),
        )
        return agreed, session

    def compare(
        self,
        steps: Sequence[Excerpt],
        sessions: Sequence[Session | None],
    ) -> float | None:
        """How many times as long a step takes as another one.

        Args:
            steps: Two steps of this process alone.
            sessions: What ran them, if they ran now.

        Returns:
            The ratio, or `None` if they ran out of memory or cannot run.
        """
        if not self._is_counted:
            return None
        key = tuple(map(self._step, steps))
        for _, ratio in _ratios.find(key) if self._key else ():
            return ratio
        ran = [
            session or self._session(step)
            for session, step in zip(sessions, steps, strict=True)
        ]
        ratio = turns.compare(ran, [step.batch for step in steps])
        if ratio is not None and self._key:
            _ratios.keep(key, self._in_use, ratio)
        return ratio

    def _session(self, step: Excerpt) -> Session:
        return Session(self._model, step.options, step.plan)

    def _predicted(self, step: Excerpt) -> Rehearsal:
        """What the drawing of a step tells."""
        options, plan = step.options, step.plan
        if plan is None:
            planned = dataclasses.replace(options, remat=_KEEPS_EVERYTHING)
            plan = planner.make_plan(
                self._model, step.batch, planned, "flops", 0
            )
        seconds = options.num_parts * plan.predicted_seconds
        return Rehearsal(plan.highest_peak_bytes, seconds)

    def _step(self, step: Excerpt) -> tuple:
        """What a step is known by."""
        options, plan = step.options, step.plan
        return (
            *(self._key, batches.to_json(step.batch), plan and plan.segments),
            *(options.microbatches, options.mixed_precision),
            *(options.sharding, agreeing.processes(options).size),
        )

    def _find(self, key: tuple) -> Rehearsal | None:
        for before, found in _store.find(key) if self._key else ():
            # What else is in memory now is part of the peak.
            peak = found.peak_bytes + self._in_use - before
            return Rehearsal(peak, found.seconds)
        return None


def _key(model, batch) -> tuple:
    """What the steps of a model are known by; nothing if only it knows."""
    if not capture.has_default_step(model):
        return ()
    try:
        recording = profiling.record_batch(model, batch)
    except Exception:
        # One that cannot be recorded can be rehearsed all the same.
        return ()
    config = model.optimizer.get_config()
    for name in ("name", "learning_rate"):
        config.pop(name, None)
    return (
        matching.structure(recording),
        [(v.shape, v.dtype, v.trainable) for v in model.variables],
        type(model.optimizer).__name__,
        sorted(config.items()),
        *(profiling.mode(model), model.steps_per_execution),
    )
