"""Makes a plan for a model's training step, for `fit` and for `kmem.plan`.

The step is profiled once for models of one structure; the plan is then found,
run and corrected (correction.py).
"""

import dataclasses
import gc
from typing import Any
from typing import Literal

import keras
import numpy as np

from kmem import memory
from kmem.base.checks import one_of
from kmem.budget import dry_run
from kmem.budget import tuning
from kmem.budget.correction import Corrector
from kmem.budget.correction import Learned
from kmem.fit.mechanisms import as_in_a_step
from kmem.fit.session import Session
from kmem.fit.undoing import Changes
from kmem.graph import control
from kmem.graph import host
from kmem.keras_graph import applying
from kmem.keras_graph import profiling
from kmem.keras_graph.costs import BYTES_PER_SECOND
from kmem.keras_graph.costs import Costs
from kmem.keras_graph.recording import Recording
from kmem.options import MemoryOptions
from kmem.options import Remat
from kmem.planning.choosing import Chooser
from kmem.planning.flat import Genetic
from kmem.planning.network import MEASURED
from kmem.planning.network import Network
from kmem.planning.network import Segment
from kmem.planning.plan import Plan
from kmem.sharding import agreeing
from kmem.sharding.engine import Engine
from kmem.step import batches
from kmem.step import capture
from kmem.step import updates

_learned: dict[tuple, Learned] = {}
_networks: dict[tuple, Network] = {}


def plan(
    model: keras.Model,
    batch: Any,
    budget: int | float | str = "auto",
    *,
    solver: Literal["optimal", "sqrt"] | Genetic = "optimal",
    costs: Literal["measured", "flops"] = "measured",
    cpu_offload: bool | int | str = False,
    verbose: int = 0,
) -> Plan:
    """Plans what a model's training step recomputes.

    The model and its state stay as they are. A step is run on random data to
    see what it needs, if the model is compiled.

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
        cpu_offload: As `kmem.Remat` has it.
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
    one_of(costs, "costs", profiling.COSTS)
    profiling.check_built(model)
    remat = Remat(budget=budget, solver=solver, cpu_offload=cpu_offload)
    options = MemoryOptions(remat=remat)
    specs = batches.specs_of(batch, examples=True)
    plan, *_ = make_plan(model, specs, options, costs, verbose)
    return plan


def session_for(
    model: keras.Model,
    options: MemoryOptions,
    batch: Any,
    spec: Any = None,
    reserved_bytes: int = 0,
    verbose: int = 0,
    reused: bool = False,
) -> Session:
    """What trains by the plan that `options.remat` asks for: the one given,
    one of an earlier `fit` that still fits, or one made now.

    Args:
        model: The model, which is built if need be.
        options: The options, with `remat`.
        batch: What all replicas get in a step, as `tf.TensorSpec`s, or `None`
            if that is not known.
        spec: What the graph of `fit` knows of them, if not all.
        reserved_bytes: What the device holds besides, and does not yet.
        verbose: 1 shows progress.
        reused: Whether what is traced for the plan may be used.

    Raises:
        ValueError: If the plan is for other batches, if none fits in the
            budget, or if the shapes of the batches are not known.
    """
    mode = profiling.mode(model, options)
    if mode == "xla":
        control.order_for_plans()
    if batch is not None:
        replicas = model.distribute_strategy.num_replicas_in_sync
        batch = batches.part_of(batch, replicas)
        build(model, batch)
    remat = options.remat or Remat()
    given = remat.plan
    if given is not None:
        plan = given if isinstance(given, Plan) else Plan.load(given)
        _check_batch(plan, options, batch)
        if plan.host_bytes and mode != "graph":
            raise ValueError(host.NO_GRAPH)
        return Session.of(model, options, plan)
    if batch is None:
        raise ValueError(
            "`remat` must be a `kmem.Plan` if the shapes of the batches are "
            "not known: make one with `kmem.plan(model, batch)`. "
            f"Received: remat={remat.budget!r}"
        )
    asked = options, batches.to_json(batch), reserved_bytes
    plan = _kept(model, options, batch, asked)
    if plan is not None:
        session = Session.of(model, options, plan)
    else:
        plan, in_use, made = make_plan(
            *(model, batch, options, "measured", verbose, reserved_bytes),
            *("remat", spec),
        )
        if made is not None and not reused:
            made.trace_again()
        session = Session.of(model, options, plan, made)
        session.planned = asked, plan, in_use
    if verbose:
        print(plan.summary())
    return session


def _kept(
    model: Any, options: MemoryOptions, batch: Any, asked: tuple
) -> Plan | None:
    """The plan by which the model trained before, if it was not compiled
    again since, and stays within the budget with what is in memory now."""
    in_use = in_use_bytes(model, batch, options)
    in_use = agreeing.highest(agreeing.processes(options), in_use)
    for session in Session.earlier(model):
        earlier, plan, before = session.planned or (None, None, 0)
        if plan is None or earlier != asked:
            continue
        resident = plan.resident_bytes + in_use - before
        plan = dataclasses.replace(plan, resident_bytes=resident)
        budget = plan.budget_bytes
        if budget is None or plan.predicted_peak_bytes <= budget:
            return plan
    return None


def make_plan(
    model: keras.Model,
    batch: Any,
    options: MemoryOptions,
    costs: Costs,
    verbose: int,
    reserved_bytes: int = 0,
    argument: str = "budget",
    spec: Any = None,
) -> tuple[Plan, int, Session | None]:
    """Plans a step under the options, of which `remat` tells the budget.

    What is learned of a model serves all models of the same structure.

    Returns:
        The plan, the bytes that were in memory, and what ran the plan if that
        was just now.
    """
    remat = options.remat or Remat()
    mode = profiling.mode(model, options)
    # The same plan has another peak in another of XLA's orders.
    in_order = mode == "xla" and control.order_for_plans()
    group = agreeing.processes(options)
    microbatch = _microbatch(batch, options)
    is_counted = memory.is_counted()
    if not is_counted:
        # Without a dry run, nothing is run at all.
        costs = "flops"
    # The same for all budgets.
    rest = dataclasses.replace(options, remat=None)
    with as_in_a_step(model, options):
        recording = profiling.record_batch(model, microbatch)
        key = (
            *(applying.structure(recording), batches.to_json(batch), rest),
            *(remat.solver, remat.cpu_offload, costs, mode, in_order),
            *(dry_run.beside_layers(model), group.size),
            not updates.are_early(model, rest),
            (is_counted, spec and batches.num_rows(spec) is None),
        )
    if model.compiled:
        # Its variables are in memory in every step.
        Changes(model, model.optimizer).build(batch)
    gc.collect()
    in_use = agreeing.highest(group, in_use_bytes(model, batch, options))
    learned = _learned.pop(key, None)
    if learned is None:
        network = network_of(model, recording, options, costs, verbose)
        chooser = Chooser(network, remat.solver)
        learned = Learned(chooser, in_tiles=Learned(chooser.in_tiles))
    _learned[key] = learned
    while len(_learned) > tuning.MAX_KEPT:
        _learned.pop(next(iter(_learned)))
    # What ran the last plan, by what that recomputes.
    ran: dict[tuple[Segment, ...], Session] = {}

    def run(plan: Plan) -> dry_run.Measurement | None:
        # First the one before goes: it would take memory.
        ran.clear()
        session = Session(model, options, plan, recording=recording)
        ran[plan.segments] = session
        measurement = dry_run.of_session(session, batch, spec)
        return measurement and measurement.agreed(group)

    corrector = Corrector(
        *(learned, microbatch, mode, in_use),
        run if dry_run.is_possible(model) else None,
    )
    plan = corrector.plan(remat.budget, reserved_bytes, argument)
    return plan, in_use, ran.get(plan.segments)


def measured(
    recording: Recording, costs: Costs, mode: str, verbose: int = 0
) -> Network:
    """What was recorded, with the costs of each call. They serve all models
    of the same structure."""
    key = applying.structure(recording), costs, mode
    if key not in _networks:
        profile = profiling.measure(recording, costs, verbose, mode == "xla")
        _networks[key] = profile.network
    while len(_networks) > tuning.MAX_KEPT:
        _networks.pop(next(iter(_networks)))
    return _networks[key]


def network_of(
    model: keras.Model,
    recording: Recording,
    options: MemoryOptions,
    costs: Costs,
    verbose: int,
) -> Network:
    """The network of steps under some options, as process 0 has measured it."""
    mode = profiling.mode(model, options)
    rest = dataclasses.replace(options, remat=None)
    with as_in_a_step(model, options):
        network = measured(recording, costs, mode, verbose)
    if options.remat and options.remat.cpu_offload:
        link = options.remat.cpu_offload
        seconds = _host_seconds(network, link, costs, mode)
        network = dataclasses.replace(network, host_seconds=seconds)
    network = _measured_by_first(agreeing.processes(options), network)
    if options.num_parts > 1 or options.num_batches > 1:
        return adding_up(model, network, options, options.num_parts > 1)
    if not updates.are_early(model, rest):
        return network
    most = updates.early_bytes(model.trainable_variables)
    late = frozenset(
        index
        for index, stage in enumerate(network.stages)
        if stage.gradient_bytes > most
    )
    return dataclasses.replace(network, keeps_gradients=False, late=late)


def adding_up(
    model: keras.Model, network: Network, options: MemoryOptions, is_split: bool
) -> Network:
    """That of a micro-batch, or of a batch of a group, beside the sums of
    gradients. In a graph each is added as soon as it is there, and in XLA, but
    for batches of several replicas, which are added outside."""
    mode = profiling.mode(model, options)
    replicas = model.distribute_strategy.num_replicas_in_sync
    keeps = mode == "eager" or (mode == "xla" and replicas > 1 and not is_split)
    num_sums = (options.num_batches > 1) + is_split
    sums = num_sums * batches.num_bytes(model.trainable_variables)
    gradients = {"keeps_gradients": keeps, "adds_gradients": True}
    return dataclasses.replace(network, resident_bytes=sums, **gradients)


def _measured_by_first(group: Engine, network: Network) -> Network:
    """A network with the measurements of process 0."""
    own = [[getattr(s, name) for name in MEASURED] for s in network.stages]
    own.append([network.host_seconds or 0.0] * len(MEASURED))
    *first, last = agreeing.of_first(group, np.array(own, "float64"))
    stages = []
    for stage, row in zip(network.stages, first, strict=True):
        numbers = {
            name: type(getattr(stage, name))(number)
            for name, number in zip(MEASURED, row, strict=True)
        }
        stages.append(dataclasses.replace(stage, **numbers))
    if network.host_seconds is not None:
        network = dataclasses.replace(network, host_seconds=float(last[0]))
    return dataclasses.replace(network, stages=tuple(stages))


def _host_seconds(network: Network, link: Any, costs: Costs, mode: str):
    """The time of a byte to host memory and back, over a link as `Remat` has
    it; measured with as many as the largest value has."""
    if mode != "graph":
        raise ValueError(host.NO_GRAPH)
    if link is True and costs == "measured":
        return host.seconds_per_byte(max(network.value_bytes))
    return 2 / (BYTES_PER_SECOND if link is True else link)


def in_use_bytes(model: keras.Model, batch, options: MemoryOptions) -> int:
    """What is in memory before a step; predicted where it is not counted."""
    if memory.is_counted():
        return memory.current()
    held = batches.num_bytes(model.variables)
    if model.compiled:
        held += batches.num_bytes(model.optimizer.variables)
    if options.num_parts > 1:
        held += batches.num_bytes(batch)  # The drawing has a part of it.
    return held


def build(model: keras.Model, batch) -> None:
    """Makes a model's variables, as Keras does in its first step."""
    if capture.has_variables(model):
        return
    if capture.has_own_step(model):
        # It may call other models, and this one never.
        Changes(model, model.optimizer).trace(batch)
        return
    x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
    # Others, such as ragged ones, are refused where sizes are needed.
    if not all(leaf.shape.is_fully_defined() for leaf in batches.leaves(x)):
        return
    data = batches.random_data(batches.part_of(x, batches.num_rows(x) or 1))
    with model.distribute_strategy.scope(), capture.DiscardedState():
        model(data)


def _microbatch(batch, options: MemoryOptions) -> Any:
    """What of a batch a process computes at a time, at most."""
    own = batches.part_of(batch, agreeing.processes(options).size)
    return batches.part_of(own, options.num_parts)


def _check_batch(plan: Plan, options: MemoryOptions, batch) -> None:
    if batch is None:
        return
    microbatch = _microbatch(batch, options)
    if batches.to_json(microbatch) != plan.batch:
        planned = batches.describe(batches.from_json(plan.batch))
        raise ValueError(
            "`remat` must be a plan for the batches that are trained on: make "
            "it again with `kmem.plan`. Received: a plan for batches of "
            f"{planned}, for batches of {batches.describe(microbatch)}"
        )
