"""Makes a plan for a model's training step: profile, solve, rehearse.

The solver plans for a drawing of the step. What a device really needs, with
what TensorFlow fuses, reorders and allocates besides, is measured: the step
is rehearsed with the plan, and if its peak is not as predicted, the
difference counts as resident and the budget is planned for again. So a plan's
predicted peak is one that was measured, where that was possible.
"""

import dataclasses
import gc
from collections.abc import MutableMapping
from typing import Any
from typing import Literal

import keras
import tensorflow as tf

from kmem import batches
from kmem import memory
from kmem import plan_cache
from kmem import xla
from kmem.accumulation import build_optimizer
from kmem.capture import all_layers
from kmem.keras_graph import matching
from kmem.keras_graph import profiling
from kmem.keras_graph.recording import num_bytes
from kmem.options import Genetic
from kmem.options import MemoryOptions
from kmem.options import Remat
from kmem.planning.bounds import peak_lower_bound
from kmem.planning.choosing import Chooser
from kmem.planning.errors import InfeasibleBudget
from kmem.planning.plan import Plan
from kmem.planning.solvers.flat import Point
from kmem.rehearsal import rehearse
from kmem.session import Session
from kmem.session import option_precision

# How often a plan is corrected, and from what on that is worth it.
_MAX_REHEARSALS = 6
_SLACK = 0.05
# Steps do not all have the same peak: their operations' order differs.
_MARGIN = 0.01
_OUT_OF_MEMORY_STEP = 0.1
_BATCHES_READY = 3
_MAX_LEARNED = 8


@dataclasses.dataclass
class _Learned:
    """What is known of models of one structure.

    Attributes:
        chooser: Their plans.
        extra_bytes: What their steps need beyond what the drawing tells.
        rehearsed: The plans that were run, with the same for each.
    """

    chooser: Chooser
    extra_bytes: int = 0
    rehearsed: dict[Point, int] = dataclasses.field(default_factory=dict)


_learned: dict[tuple, _Learned] = {}


def plan(
    model: keras.Model,
    batch: Any,
    budget: int | float | str = "auto",
    *,
    solver: str | Genetic = "optimal",
    costs: Literal["measured", "flops"] = "measured",
    verbose: int = 0,
) -> Plan:
    """Plans what a model's training step recomputes.

    The model and its state stay as they are. A step is run on made-up numbers
    to see what it needs, if the model is compiled.

    Args:
        model: A built `keras.Model`.
        batch: One batch, as `train_step` gets it: `x`, `(x, y)` or
            `(x, y, sample_weight)`, of arrays, tensors or `tf.TensorSpec`s.
        budget: The device's peak during a step, with everything in it: bytes,
            a size such as `"2GB"`, a share of the unplanned peak in (0, 1],
            or `"auto"`, the smallest predicted peak whose predicted slowdown
            is at most 1.3x.
        solver: `"optimal"`, `"sqrt"` or `kmem.Genetic(...)`.
        costs: `"measured"`, or `"flops"` for times that are computed, so that
            plans are repeatable.
        verbose: 1 shows progress.

    Returns:
        A `kmem.Plan`, for `fit(remat=...)`.

    Raises:
        ValueError: If the budget is not of one of its forms, if no plan fits
            in it (the message names the smallest that would do), or if the
            model is not built.

    Example:

    ```python
    import keras
    import numpy as np

    import kmem

    layers = [keras.layers.Dense(64, "relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile("sgd", "mse")
    x = np.zeros((4096, 64), "float32")
    plan = kmem.plan(model, (x, x), budget="auto")
    print(plan.summary())
    ```
    """
    options = MemoryOptions(remat=Remat(budget=budget, solver=solver))
    specs = batches.specs_of(batch)
    return make_plan(model, specs, options, costs, verbose)


def planned_for_fit(
    model: keras.Model,
    options: MemoryOptions,
    arguments: MutableMapping[str, Any],
) -> MemoryOptions:
    """`with_plan`, for what `fit` is given."""
    batch = batches.fit_batch(arguments)
    reserved = 0 if batch is None else _pipeline_bytes(arguments, batch)
    verbose = 0 if arguments.get("verbose", "auto") in (0, 2) else 1
    return with_plan(model, options, batch, reserved, verbose)


def with_plan(
    model: keras.Model,
    options: MemoryOptions,
    batch: Any,
    reserved_bytes: int = 0,
    verbose: int = 0,
) -> MemoryOptions:
    """Options in which `remat` is a plan: the one given, or one made now.

    Args:
        model: The model, which is built if need be.
        options: The options, with `remat`.
        batch: What all replicas get in a step, as `tf.TensorSpec`s, or `None`
            if that is not known.
        reserved_bytes: What the device holds besides, and does not yet.
        verbose: 1 shows progress.

    Raises:
        ValueError: If the plan is for other batches, if none fits in the
            budget, or if the shapes of the batches are not known.
    """
    if profiling.mode(model) == "xla":
        xla.prefer_little_memory()
    if batch is not None:
        replicas = model.distribute_strategy.num_replicas_in_sync
        batch = batches.part_of(batch, replicas)
        _build(model, batch)
    given = options.remat.plan
    if given is not None:
        made = given if isinstance(given, Plan) else Plan.load(given)
        _check_batch(made, options, batch)
    elif batch is None:
        raise ValueError(
            "`remat` must be a `kmem.Plan` if the shapes of the batches "
            "cannot be told: make one with `kmem.plan(model, batch)`. "
            f"Received: remat={options.remat.budget!r}"
        )
    else:
        made = make_plan(
            model, batch, options, "measured", verbose, reserved_bytes
        )
        if verbose:
            print(made.summary())
    return dataclasses.replace(options, remat=Remat(plan=made))


def make_plan(
    model: keras.Model,
    batch: Any,
    options: MemoryOptions,
    costs: str,
    verbose: int,
    reserved_bytes: int = 0,
) -> Plan:
    """Plans a step under the options, of which `remat` tells the budget.

    What is learned of a model serves all models of the same structure.
    """
    compiled = profiling.mode(model) == "xla"
    if compiled:
        xla.prefer_little_memory()
    count = options.microbatches.count if options.microbatches else 1
    part = batches.part_of(batch, count)
    # The same for all budgets.
    rest = dataclasses.replace(options, remat=None)
    with option_precision(model, options):
        recording = profiling.record_batch(model, part)
        key = (
            *(matching.structure(recording), batches.to_json(batch), rest),
            *(options.remat.solver, costs, profiling.mode(model)),
            type(getattr(model, "optimizer", None)),
        )
    if model.compiled:
        # Its variables are in memory in every step.
        build_optimizer(model.optimizer, model.trainable_variables)
    gc.collect()
    in_use = memory.current()
    asked = *key, options.remat.budget, reserved_bytes
    made = plan_cache.find(asked, in_use)
    if made is not None:
        return made
    learned = _learned.pop(key, None)
    if learned is None:
        measured = costs == "measured"
        with option_precision(model, options):
            profile = profiling.measure(recording, measured, verbose, compiled)
        learned = _Learned(Chooser(profile.network, options.remat.solver))
    _learned[key] = learned
    while len(_learned) > _MAX_LEARNED:
        _learned.pop(next(iter(_learned)))
    planner = _Planner(model, batch, part, options, learned, in_use)
    made = planner.plan(options.remat.budget, reserved_bytes)
    plan_cache.keep(asked, in_use, made)
    return made


class _Planner:
    """Plans one step, and corrects the plan by rehearsals."""

    def __init__(
        self, model, batch, part, options, learned: _Learned, in_use: int
    ):
        self._model = model
        self._batch = batch
        self._part = part
        self._options = options
        self._learned = learned
        self._chooser = learned.chooser
        replicas = model.distribute_strategy.num_replicas_in_sync
        self._rehearses = model.compiled and replicas == 1
        # What else is in memory is part of the peak.
        self._in_use = in_use

    def plan(self, budget: int | float | str, reserved: int) -> Plan:
        resident = self._in_use + self._learned.extra_bytes
        if budget == "auto":
            return self._measured(self._chooser.auto(), None, resident)
        if isinstance(budget, float):
            everything = self._measured(
                self._chooser.everything, None, resident
            )
            unplanned = everything.predicted_peak_bytes
            budget = int(budget * (unplanned + reserved))
            resident = everything.resident_bytes
        return self._within(int(budget) - reserved, resident, reserved)

    def _within(self, budget: int, resident: int, reserved: int) -> Plan:
        """The fastest plan that keeps the budget when it is rehearsed."""
        target = int((1 - _MARGIN) * budget)
        best = self._known_within(target, budget)
        if best and target - best.predicted_peak_bytes <= _SLACK * budget:
            return best
        tried: set[tuple] = set()
        for attempt in range(_MAX_REHEARSALS):
            last = attempt == _MAX_REHEARSALS - 1
            point = self._point(target - resident, smallest=last)
            if point.segments in tried and best is not None:
                break
            if point.segments in tried:
                point = self._chooser.smallest
            if point.segments in tried:
                break
            tried.add(point.segments)
            found = self._measured(point, budget, resident)
            excess = found.predicted_peak_bytes - target
            if excess <= 0:
                if best is None or found.slowdown < best.slowdown:
                    best = found
                if not found.segments or -excess <= _SLACK * budget:
                    break
            elif best is not None:
                break
            # The more attempts have failed, the more is left free.
            resident = found.resident_bytes + attempt * max(excess, 0)
        if best is None:
            raise self._infeasible(budget, reserved)
        return best

    def _point(self, budget_bytes: int, smallest: bool) -> Point:
        if not smallest:
            try:
                return self._chooser.within(budget_bytes)
            except InfeasibleBudget:
                # By the drawing; only a rehearsal can tell.
                pass
        return self._chooser.smallest

    def _known_within(self, target: int, budget: int) -> Plan | None:
        """The fastest of the plans that were rehearsed before."""
        fit = [
            point
            for point, extra in self._learned.rehearsed.items()
            if point.peak_bytes + extra + self._in_use <= target
        ]
        if not fit:
            return None
        point = min(fit, key=lambda point: point.seconds)
        return self._measured(point, budget, self._in_use)

    def _infeasible(self, budget: int, reserved: int) -> InfeasibleBudget:
        drawn = self._chooser.smallest.peak_bytes
        rehearsed = self._learned.rehearsed.items()
        seen = [point.peak_bytes + extra for point, extra in rehearsed]
        smallest = min(seen, default=drawn)
        bound = min(peak_lower_bound(self._chooser.network.graph), drawn)
        bound = min(bound + self._learned.extra_bytes, smallest)
        return InfeasibleBudget(
            budget + reserved,
            int((smallest + self._in_use) / (1 - _MARGIN)) + 1 + reserved,
            bound + self._in_use + reserved,
        )

    def _measured(self, point: Point, budget, resident) -> Plan:
        """A plan, with the peak that it was seen to have if it can be run."""
        made = self._made(point, budget, resident)
        if not self._rehearses:
            return made
        extra = self._learned.rehearsed.get(point)
        if extra is None:
            options = dataclasses.replace(self._options, remat=Remat(plan=made))
            peak = rehearse(Session(self._model, options), self._batch)
            if peak is None:
                peak = made.predicted_peak_bytes
                peak += int(_OUT_OF_MEMORY_STEP * point.peak_bytes)
            extra = peak - point.peak_bytes - self._in_use
            self._learned.rehearsed[point] = extra
        self._learned.extra_bytes = extra
        return self._made(point, budget, self._in_use + extra)

    def _made(self, point: Point, budget, resident) -> Plan:
        model, solver = self._model, self._options.remat.solver
        within = point.peak_bytes if budget is None else budget - resident
        return Plan(
            network=self._chooser.network,
            segments=point.segments,
            batch=batches.to_json(self._part),
            mode=profiling.mode(model),
            solver=solver if isinstance(solver, str) else "genetic",
            budget_bytes=budget,
            resident_bytes=resident,
            lower_bound_seconds=self._chooser.lower_bound_seconds(within),
        )


def _pipeline_bytes(arguments: MutableMapping[str, Any], batch) -> int:
    """What the input pipeline holds on the device, if that is the CPU.

    Keras copies arrays whole, and has a few batches ready.
    """
    if tf.config.list_logical_devices("GPU"):
        return 0
    arrays = [arguments.get(name) for name in ("x", "y", "sample_weight")]
    copied = sum(
        getattr(leaf, "nbytes", 0) for leaf in keras.tree.flatten(arrays)
    )
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    ready = sum(map(num_bytes, leaves))
    return copied + _BATCHES_READY * ready


def _build(model: keras.Model, batch) -> None:
    """Makes a model's variables, as Keras does in its first step."""
    if all(layer.built for layer in all_layers(model)):
        return
    x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
    model(batches.made_up(batches.part_of(x, batches.num_rows(x) or 1)))


def _check_batch(made: Plan, options: MemoryOptions, batch) -> None:
    if batch is None:
        return
    count = options.microbatches.count if options.microbatches else 1
    part = batches.part_of(batch, count)
    if batches.to_json(part) != made.batch:
        planned = batches.describe(batches.from_json(made.batch))
        raise ValueError(
            "`remat` must be a plan for the batches that are trained on: make "
            "it again with `kmem.plan`. Received: a plan for batches of "
            f"{planned}, for batches of {batches.describe(part)}"
        )
