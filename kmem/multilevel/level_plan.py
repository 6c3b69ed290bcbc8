"""What a level recomputes, and the dry runs that measure what it needs.

Of the models that a loss calls, the one that keeps most is planned, by the
drawing of a single forward and backward pass of it. A second derivative keeps
several times as much, in about the same proportions: the first dry run tells
how much, and the plan is corrected by more of them as in `fit`
(kmem/budget/correction.py). What counts is the device's peak in a step in
which only this level computes: derivatives of its own loss, for its update and
for the updates of others that pass through it. All the rest of the step is as
in `fit`: variables, optimizers, batches, and the gradients on their way. What
this module does not do: see what levels that compute at the same time need
together; each waits for the variables that the one before updates.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Literal

import keras

from kmem import memory
from kmem.base.patching import Context
from kmem.base.patching import member
from kmem.base.patching import together
from kmem.base.sizes import format_size
from kmem.budget import dry_run
from kmem.budget import planner
from kmem.budget.correction import Corrector
from kmem.budget.correction import Learned
from kmem.fit import pipeline
from kmem.fit import undoing
from kmem.keras_graph import applying
from kmem.keras_graph import profiling
from kmem.keras_graph.recording import record
from kmem.options import Remat
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.choosing import Chooser
from kmem.planning.flat import Point
from kmem.planning.network import Segment
from kmem.planning.plan import Plan
from kmem.step import batches


class LevelPlan:
    """A level's plan: chosen when it is first followed, if not before.

    Args:
        calls: The models that its loss calls, and what they are given, as
            `tf.TensorSpec`s.
        mixed: The context in which a model computes as the level does.

    Raises:
        ValueError: If there are no calls, or the plan that is asked for is
            for none of the models.
    """

    def __init__(
        self,
        level_name: str,
        calls: list[tuple[keras.Model, Any]],
        remat: Remat,
        mixed: Callable[[keras.Model], Context],
        mode: Literal["eager", "graph", "xla"],
    ):
        self._level_name = level_name
        self._remat = remat
        self._mode: Literal["eager", "graph", "xla"] = mode
        if remat.cpu_offload:
            raise ValueError(
                "`remat` of a level must be without `cpu_offload`: a gradient "
                "that is differentiated keeps what it starts from. Received: "
                f"level '{level_name}' with {remat!r}"
            )
        if not calls:
            raise ValueError(
                "The loss of a level with `remat` must call a model of the "
                f"level. Received: the loss of level '{level_name}' calls none"
            )
        costs = "measured" if memory.is_counted() else "flops"
        recordings, choosers = [], []
        for model, inputs in calls:
            with mixed(model):
                specs = profiling.checked_specs(model, (inputs,))
                recordings.append(record(model, specs, in_step=False))
                if remat.plan is None:
                    network = planner.measured(recordings[-1], costs, mode)
                    choosers.append(Chooser(network, remat.solver))
        self._segments: tuple[Segment, ...] | None = None
        if remat.plan is not None:
            given = remat.plan
            plan = given if isinstance(given, Plan) else Plan.load(given)
            number = _owner(plan, recordings)
            self._segments = plan.segments
        else:
            peaks = [chooser.everything.peak_bytes for chooser in choosers]
            number = peaks.index(max(peaks))
            self._chooser = choosers[number]
        self._model, self._inputs = calls[number]
        self._frame = recordings[number].frame

    @property
    def has_budget(self) -> bool:
        """Whether it has to stay within a budget, which takes dry runs."""
        return self._remat.plan is None and self._remat.budget != "auto"

    def applied(self) -> Context:
        """Within, the model follows the plan."""
        if self._segments is None:
            self.choose()
        return applying.applied(self._model, self._frame, self._segments or ())

    def choose(
        self,
        measure: Callable[[], dry_run.Measurement | None] | None = None,
        reserved: int = 0,
    ) -> None:
        """Chooses what is recomputed, as `find` does; a `ValueError` for the
        user if no plan stays within the budget."""
        try:
            self.find(measure, reserved)
        except InfeasibleBudget as error:
            raise ValueError(
                f"`remat` of the level '{self._level_name}' must be a budget "
                "that its passes can stay within, with everything else that is "
                "in memory. The smallest that is known to be enough is "
                f"{error.smallest_bytes} bytes "
                f"({format_size(error.smallest_bytes)}); `microbatches` make "
                f"it smaller. Received: remat={self._remat.budget!r}"
            ) from error

    def find(
        self,
        measure: Callable[[], dry_run.Measurement | None] | None,
        reserved: int,
    ) -> None:
        """Finds a plan within the budget, and follows it from now on.

        Args:
            measure: Runs what follows the plan, and tells what it took, or
                `None` if that ran out of memory. Without it, the drawing of a
                single forward and backward pass has to do.
            reserved: Bytes of the budget that are not to be used.

        Raises:
            InfeasibleBudget: If no plan stays within the budget.
        """
        is_measured = self.has_budget and memory.is_counted()
        in_use = memory.current() if is_measured else 0

        def follow(plan: Plan | Point) -> dry_run.Measurement | None:
            self._segments = plan.segments
            return measure() if measure else None

        learned, run = Learned(self._chooser), None
        if measure is not None:
            learned, run = _as_measured(self._chooser, follow, in_use), follow
        corrector = Corrector(learned, self._inputs, self._mode, in_use, run)
        plan = corrector.plan(self._remat.budget, reserved)
        self._segments = plan.segments


def plan_within_budgets(program: Any) -> None:
    """Plans all levels of a `Program` that have a budget; its state is given
    back. A `ValueError` if a level has no plan within its budget."""
    reserved = reserved_bytes(program.element)
    if not memory.is_counted():
        reserved += batches.num_bytes([_state(program), program.element])
    for level in program.levels:
        if level.plan is not None and level.plan.has_budget:
            run = functools.partial(measure, program, [level])
            level.plan.choose(run if memory.is_counted() else None, reserved)


def reserved_bytes(element) -> int:
    """One batch that is ready, and one in the making."""
    return pipeline.ready_bytes(element, 2)


def measure(program: Any, levels: list) -> dry_run.Measurement | None:
    """Runs steps in which only some levels compute, and leaves no trace; `None`
    if they ran out of memory."""
    undone = undoing.unchanged(_state(program), program.metrics)
    training = _alone(program, levels)
    return dry_run.dry_run(program, program.element, undone, training)


@contextlib.contextmanager
def _alone(program, levels: list) -> Iterator[None]:
    """Within, the program trains some of its levels."""
    others = [x for x in program.levels if x not in levels]
    trained = member(program, "train_function", None)
    with trained, together(x.idle() for x in others):
        program.make_train_function()
        yield


def _state(program) -> list:
    """What a step may change."""
    structure = program.structure
    variables = [
        *(v for metric in program.metrics for v in metric.variables),
        *(v for level in program.levels for v in level.model.variables),
        *(v for level in program.levels for v in level.state),
        *(v for guess in structure.guesses.values() for v in guess),
        *(v for each in structure.optimizers for v in each.variables),
    ]
    return list({id(variable): variable for variable in variables}.values())


def _as_measured(chooser: Chooser, follow: Callable, in_use: int) -> Learned:
    """The drawing, as much larger as one dry run is: later ones are few."""
    for point in (chooser.everything, chooser.smallest):
        step = follow(point)
        if step is not None:
            break
    else:
        return Learned(chooser)
    factor = (step.peak_bytes - in_use) / point.peak_bytes
    enlarged = chooser.network.scaled(factor)
    learned = Learned(Chooser(enlarged, chooser.solver))
    if point is chooser.everything:
        drawn = learned.chooser.everything
        extra_bytes = step.peak_bytes - drawn.peak_bytes - in_use
        learned.measured[drawn] = extra_bytes
    return learned


def _owner(plan: Plan, recordings: list) -> int:
    """Which of the recorded models a plan is for."""
    errors = []
    for number, recording in enumerate(recordings):
        try:
            applying.check(plan.network, recording)
            return number
        except ValueError as error:
            errors.append(error)
    raise errors[0]
