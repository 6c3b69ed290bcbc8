"""Plans what a level recomputes, and lets its model follow the plan.

Of the models that a loss calls, the one that keeps most is planned, by the
drawing of a single forward and backward pass of it. The recomputation is
differentiable, so that second derivatives are of the same plan. What this
module does not do: rehearse the level's step, as `fit` does for one model; a
budget is kept by the drawing, and what the level needs besides comes on top.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from kmem import memory
from kmem.keras_graph import applying
from kmem.keras_graph import matching
from kmem.keras_graph import profiling
from kmem.options import Remat
from kmem.planning.choosing import Chooser
from kmem.planning.errors import InfeasibleBudget
from kmem.planning.plan import Plan
from kmem.planning.solvers.flat import Point

Calls = list[tuple[keras.Model, Any]]
Context = contextlib.AbstractContextManager[None]


def context(
    calls: Calls,
    remat: Remat,
    mixed: Callable[[keras.Model], Context],
    compiled: bool,
) -> Callable[[], Context]:
    """The context in which a model follows its plan.

    Args:
        calls: The models that a loss calls, and what they are given, as
            `tf.TensorSpec`s.
        remat: What is asked for.
        mixed: The context in which a model computes as the level does.
        compiled: Whether XLA compiles the step.

    Raises:
        ValueError: If no plan fits in the budget, or the plan is for none of
            the models.
    """
    recordings = []
    for model, inputs in calls:
        with mixed(model):
            recordings.append(profiling.record_batch(model, (inputs,)))
    if remat.plan is not None:
        given = remat.plan
        plan = given if isinstance(given, Plan) else Plan.load(given)
        model, recording = _owner(plan, calls, recordings)
        segments = plan.segments
    else:
        choosers = []
        for (model, _), recording in zip(calls, recordings, strict=True):
            with mixed(model):
                profile = profiling.measure(recording, True, compiled=compiled)
            choosers.append(Chooser(profile.network, remat.solver))
        peaks = [chooser.everything.peak_bytes for chooser in choosers]
        largest = peaks.index(max(peaks))
        model, _ = calls[largest]
        recording = recordings[largest]
        segments = _point(choosers[largest], remat).segments

    def applied():
        return applying.applied(model, recording.frame, segments)

    return applied


def _point(chooser: Chooser, remat: Remat) -> Point:
    budget = remat.budget
    if budget == "auto":
        return chooser.auto()
    resident = memory.current()
    unplanned = chooser.everything.peak_bytes + resident
    if isinstance(budget, float):
        budget = int(budget * unplanned)
    try:
        return chooser.within(int(budget) - resident)
    except InfeasibleBudget as error:
        smallest = chooser.smallest.peak_bytes + resident
        raise InfeasibleBudget(int(budget), smallest, resident) from error


def _owner(plan: Plan, calls: Calls, recordings: list):
    """The model that a plan is for."""
    errors = []
    for (model, _), recording in zip(calls, recordings, strict=True):
        try:
            matching.check(plan.network, recording)
            return model, recording
        except ValueError as error:
            errors.append(error)
    raise errors[0]
