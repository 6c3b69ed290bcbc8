"""Plans what a level recomputes, and lets its model follow the plan.

Of the models that a loss calls, the one that keeps most is planned. The
drawing is that of a single forward and backward pass of it. A second
derivative keeps several times as much, in about the same proportions: how
much is measured with nothing recomputed, and the drawing is made larger by
that. What this module does not do: run a level's passes, which whoever plans
brings along (rehearsing.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from typing import Literal

import keras

from kmem import memory
from kmem.base.sizes import format_size
from kmem.budget.correction import Corrector
from kmem.budget.correction import Learned
from kmem.budget.dry_run import Measurement
from kmem.keras_graph import applying
from kmem.keras_graph import matching
from kmem.keras_graph import profiling
from kmem.keras_graph.recording import Recording
from kmem.options import Remat
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.choosing import Chooser
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.plan import Plan

Calls = list[tuple[keras.Model, Any]]
Context = contextlib.AbstractContextManager[None]

# Losses of several levels call one model; measuring it takes its time.
_drawings: dict[tuple, Network] = {}
_MAX_DRAWINGS = 8


class Planned:
    """A level's plan: chosen when it is first followed, if not before.

    Args:
        level_name: The level's name.
        calls: The models that its loss calls, and what they are given, as
            `tf.TensorSpec`s.
        remat: What is asked for.
        mixed: The context in which a model computes as the level does.
        mode: How steps run.

    Raises:
        ValueError: If the plan that is asked for is for none of the models.
    """

    def __init__(
        self,
        level_name: str,
        calls: Calls,
        remat: Remat,
        mixed: Callable[[keras.Model], Context],
        mode: Literal["eager", "graph", "xla"],
    ):
        self._level_name = level_name
        self._remat = remat
        self._mode: Literal["eager", "graph", "xla"] = mode
        recordings = []
        for model, inputs in calls:
            with mixed(model):
                recordings.append(profiling.record_batch(model, (inputs,)))
        self._segments: tuple[Segment, ...] | None = None
        if remat.plan is not None:
            given = remat.plan
            plan = given if isinstance(given, Plan) else Plan.load(given)
            number = _owner(plan, recordings)
            self._segments = plan.segments
        else:
            choosers = []
            for (model, _), recording in zip(calls, recordings, strict=True):
                with mixed(model):
                    network = _drawing(recording, mode)
                choosers.append(Chooser(network, remat.solver))
            peaks = [chooser.everything.peak_bytes for chooser in choosers]
            number = peaks.index(max(peaks))
            self._chooser = choosers[number]
        self._model, self._inputs = calls[number]
        self._frame = recordings[number].frame

    @property
    def has_budget(self) -> bool:
        """Whether it has to keep a budget, which takes rehearsals."""
        return self._remat.plan is None and self._remat.budget != "auto"

    def applied(self) -> Context:
        """Within, the model follows the plan."""
        if self._segments is None:
            self.choose()
        return applying.applied(self._model, self._frame, self._segments or ())

    def choose(
        self,
        rehearse: Callable[[], Measurement | None] | None = None,
        reserved: int = 0,
    ) -> None:
        """Chooses what is recomputed, where that is not given.

        Args:
            rehearse: Runs what follows the plan, and tells what it took, or
                `None` if that ran out of memory. Without it, the
                drawing of a single forward and backward pass has to do.
            reserved: Bytes of the budget that are not to be used.

        Raises:
            ValueError: If no plan keeps the budget.
        """
        in_use = memory.current() if self.has_budget else 0
        learned, run = Learned(self._chooser), None
        if rehearse is not None:

            def follow(segments: tuple[Segment, ...]) -> Measurement | None:
                self._segments = segments
                return rehearse()

            def run_plan(plan: Plan) -> Measurement | None:
                return follow(plan.segments)

            learned, run = self._as_measured(follow, in_use), run_plan
        corrector = Corrector(learned, self._inputs, self._mode, in_use, run)
        try:
            plan = corrector.plan(self._remat.budget, reserved)
        except InfeasibleBudget as error:
            raise ValueError(
                f"`remat` of the level '{self._level_name}' must be a budget "
                "that its passes can keep, with everything else that is in "
                "memory. The smallest that is known to be enough is "
                f"{error.smallest_bytes} bytes "
                f"({format_size(error.smallest_bytes)}); `microbatches` make "
                f"it smaller. Received: remat={self._remat.budget!r}"
            ) from error
        self._segments = plan.segments

    def _as_measured(self, follow: Callable, in_use: int) -> Learned:
        """The drawing, as much larger as the passes are."""
        chooser = self._chooser
        for point in (chooser.everything, chooser.smallest):
            seen = follow(point.segments)
            if seen is not None:
                factor = (seen.peak_bytes - in_use) / point.peak_bytes
                break
        else:
            return Learned(chooser)
        network = _enlarged(chooser.network, factor)
        learned = Learned(Chooser(network, chooser.solver))
        if point is chooser.everything:
            drawn = learned.chooser.everything
            extra_bytes = seen.peak_bytes - drawn.peak_bytes - in_use
            learned.measured[drawn] = extra_bytes, seen.spread_bytes
        return learned


def _drawing(recording: Recording, mode: str) -> Network:
    """What one forward and backward pass of a model needs."""
    key = matching.structure(recording), mode
    if key not in _drawings:
        _drawings[key] = profiling.measure(
            recording, measured=True, compiled=mode == "xla"
        ).network
    while len(_drawings) > _MAX_DRAWINGS:
        _drawings.pop(next(iter(_drawings)))
    return _drawings[key]


def _enlarged(network: Network, factor: float) -> Network:
    """The network, if all that it keeps and needs were larger."""
    stages = [
        dataclasses.replace(
            stage,
            **{
                name: int(factor * getattr(stage, name))
                for name in (
                    *("residual_bytes", "gradient_bytes"),
                    "forward_workspace_bytes",
                    "backward_workspace_bytes",
                )
            },
        )
        for stage in network.stages
    ]
    sizes = tuple(int(factor * size) for size in network.value_bytes)
    return dataclasses.replace(network, stages=tuple(stages), value_bytes=sizes)


def _owner(plan: Plan, recordings: list) -> int:
    """Which of the recorded models a plan is for."""
    errors = []
    for number, recording in enumerate(recordings):
        try:
            matching.check(plan.network, recording)
            return number
        except ValueError as error:
            errors.append(error)
    raise errors[0]
