"""What training a Keras model costs, operation by operation."""

import dataclasses
import json
from typing import Any
from typing import Literal

import keras
import tensorflow as tf

from kmem.base import private_tf
from kmem.base.checks import must_be
from kmem.base.checks import one_of
from kmem.base.sizes import format_size
from kmem.keras_graph import costs as call_costs
from kmem.keras_graph.costs import Cost
from kmem.keras_graph.costs import Costs
from kmem.keras_graph.costs import trained
from kmem.keras_graph.recording import Call
from kmem.keras_graph.recording import Recording
from kmem.keras_graph.recording import record
from kmem.keras_graph.windows import window_of
from kmem.options import MemoryOptions
from kmem.planning.network import MEASURED
from kmem.planning.network import Network
from kmem.planning.network import Stage
from kmem.step import batches
from kmem.step import capture

# How a user may have costs found.
COSTS = "measured", "flops"


@dataclasses.dataclass(frozen=True)
class OperationProfile:
    """What one operation of a model costs in a training step.

    Attributes:
        name: Its layer's name.
        output_bytes: What it gives.
        kept_bytes: What its backward pass reads of the forward pass; what
            several operations read counts for each of them.
        workspace_bytes: The most that it needs besides, while it runs.
        parameter_bytes: Its variables.
        gradient_bytes: Their gradients.
        forward_seconds: The time of its forward pass.
        backward_seconds: The time of its backward pass.
    """

    name: str
    output_bytes: int
    kept_bytes: int
    workspace_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    forward_seconds: float
    backward_seconds: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a training step of a model costs.

    Attributes:
        operations: In the order in which the model runs them; the loss last.
        network: The same for planning: what reads and keeps what.
    """

    operations: tuple[OperationProfile, ...]
    network: Network = dataclasses.field(repr=False)

    def summary(self) -> str:
        """A table, a line for each operation."""
        rows = [
            f"{'operation':<32} {'output':>10} {'kept':>10} {'workspace':>10} "
            f"{'gradients':>10} {'forward':>10} {'backward':>10}"
        ]
        rows += [
            f"{o.name[:32]:<32} {format_size(o.output_bytes):>10} "
            f"{format_size(o.kept_bytes):>10} "
            f"{format_size(o.workspace_bytes):>10} "
            f"{format_size(o.gradient_bytes):>10} "
            f"{o.forward_seconds * 1e3:>7.2f} ms "
            f"{o.backward_seconds * 1e3:>7.2f} ms"
            for o in self.operations
        ]
        return "\n".join(rows)


def profile(
    model: keras.Model,
    batch: Any,
    costs: Literal["measured", "flops"] = "measured",
) -> Profile:
    """Measures a training step of a model, operation by operation.

    The model is traced, and every operation that differs is run by itself, on
    random data; the model's state stays as it is.

    Args:
        model: A built `keras.Model`: Functional, Sequential, or subclassed;
            of a subclassed one, its calls of layers are the operations.
        batch: One batch, as `train_step` gets it: `x`, `(x, y)` or
            `(x, y, sample_weight)`, of arrays, tensors or `tf.TensorSpec`s.
        costs: `"measured"`, or `"flops"` for times that are computed from
            floating point operations and bytes, and so are repeatable.

    Returns:
        A `Profile`: bytes and seconds.

    Raises:
        ValueError: If the model is not built, or the batch has no fixed
            shape.

    Example:

    ```python
    import keras
    import numpy as np

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    batch = np.zeros((32, 8), "float32")
    print(kmem.profile(model, batch).summary())
    ```
    """
    one_of(costs, "costs", COSTS)
    recording = record_batch(model, batch)
    return measure(recording, costs, compiled=mode(model) == "xla")


def mode(
    model: keras.Model, options: MemoryOptions | None = None
) -> Literal["eager", "graph", "xla"]:
    """How Keras runs the model's steps, under options if there are some."""
    if model.run_eagerly:
        return "eager"
    allowed = options is None or options.allows_xla
    return "xla" if model.jit_compile and allowed else "graph"


def record_batch(model: keras.Model, batch: Any) -> Recording:
    """Records the model on a batch, of which only the shapes are used."""
    specs = checked_specs(model, batch)
    try:
        return record(model, specs, capture.has_own_step(model))
    except capture.NO_VALUE as error:
        if not model.run_eagerly:
            raise
        raise ValueError(
            "A plan is made from a trace of the step, so what it runs eagerly "
            "must not look at the values of tensors: use `dtr` or "
            f"`microbatches`. Received: model={model.name} ({error})"
        ) from error


def checked_specs(model: keras.Model, batch: Any) -> Any:
    """The shapes of a batch of which a model can be traced."""
    check_built(model)
    specs = batches.specs_of(batch)
    for spec in keras.tree.flatten(specs):
        if spec is not None and not spec.shape.is_fully_defined():
            raise ValueError(
                "`batch` must have a fixed shape, the batch size "
                f"included. Received: batch with shape {spec.shape}"
            )
    return specs


def check_built(model: keras.Model) -> None:
    """Refuses a model without its variables."""
    must_be(isinstance(model, keras.Model), model, "model", "a `keras.Model`")
    if not capture.has_variables(model):
        raise ValueError(
            "The model must be built: call it, or `model.build()`, first. "
            f"Received: model={model.name}"
        )


def measure(
    recording: Recording, costs: Costs, verbose: int = 0, compiled: bool = False
) -> Profile:
    """Costs each call; equal calls are run once."""
    cost_by_signature: dict[str, Cost] = {}
    found = []
    progress = keras.utils.Progbar(
        len(recording.calls), verbose=verbose, unit_name="operation"
    )
    for call in recording.calls:
        if call.operation is None:
            # What a subclassed model does between layers is not run.
            floats = tuple(i for i, v in enumerate(call.reads) if v is not None)
            found.append(
                Cost(gradients=floats, residual_bytes=call.residual_bytes)
            )
        else:
            key = signature(call)
            if key not in cost_by_signature:
                cost_by_signature[key] = _cost_of(call, costs, compiled)
            found.append(cost_by_signature[key])
        progress.add(1)
    return _assemble(recording, found)


def _cost_of(call: Call, costs: Costs, compiled: bool) -> Cost:
    try:
        with private_tf.refusals():
            return call_costs.cost_of(call, costs, compiled)
    except tf.errors.ResourceExhaustedError as error:
        raise tf.errors.ResourceExhaustedError(
            None,
            None,
            f"{call.name} with its gradient does not fit in the device even "
            "alone, so that it cannot be measured: make the batch smaller, or "
            f"split it with `microbatches`. {error.message}",
        ) from None


def _assemble(recording: Recording, costs: list[Cost]) -> Profile:
    """Puts recording and costs together."""
    sizes = tuple(map(batches.num_bytes, recording.tensors))
    # Values that depend on variables: only these have gradients.
    trained: set[int] = set()
    predictions = set(recording.outputs)
    stages, operations = [], []
    for call, cost in zip(recording.calls, costs, strict=True):
        gradients = [i for i in cost.gradients if call.reads[i] in trained]
        backward = bool(gradients) or cost.gradient_bytes > 0
        if backward:
            trained.update(call.gives)
        kept_values = {call.reads[i] for i in cost.kept_inputs}
        kept_values |= {call.gives[i] for i in cost.kept_outputs}
        # What only shows an argument differently hands the gradient on.
        own = [i for i in gradients if call.reads[i] not in call.gives]
        measured = {name: getattr(cost, name) for name in MEASURED}
        if not backward:
            measured |= {"residual_bytes": 0, "backward_seconds": 0.0}
        stage = Stage(
            name=call.name,
            inputs=distinct(call.reads),
            outputs=call.makes,
            kept=distinct(kept_values) if backward else (),
            gradients=(gradient_values := distinct(call.reads[i] for i in own)),
            shares=tuple(call.uses.get(v, 1) for v in gradient_values),
            passed=_passed(call, cost, own),
            gradient_bytes=cost.gradient_bytes,
            **measured,
            # The step itself computes the loss, and Keras looks at what
            # made its predictions: a softmax is part of some losses. What was
            # loaded as a graph has gradients where it was called alone.
            recomputable=call is not recording.calls[-1]
            and not call.effects
            and not isinstance(call.operation, keras.layers.TFSMLayer)
            and not predictions.intersection(call.gives),
            window=window_of(call),
        )
        stages.append(stage)
        operations.append(
            OperationProfile(
                name=call.name,
                output_bytes=sum(sizes[v] for v in call.makes),
                kept_bytes=sum(sizes[v] for v in stage.kept)
                + stage.residual_bytes,
                workspace_bytes=max(
                    stage.forward_workspace_bytes,
                    stage.backward_workspace_bytes,
                ),
                parameter_bytes=cost.parameter_bytes,
                gradient_bytes=cost.gradient_bytes,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
            )
        )
    network = Network(
        tuple(stages),
        sizes,
        inputs=frozenset(recording.inputs),
        lines=tuple(
            tuple(place for place in line if place not in recording.seams)
            for line in recording.frame.lines()
        ),
        shared=_shared(recording.calls),
    )
    return Profile(tuple(operations), network)


def _shared(calls: list[Call]) -> tuple[tuple[int, ...], ...]:
    """For each parameter that several calls use, the calls' numbers."""
    users: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        for variable in trained(call):
            users.setdefault(id(variable), []).append(index)
    several = {tuple(stages) for stages in users.values() if len(stages) > 1}
    return tuple(sorted(several))


def _passed(call: Call, cost: Cost, gradients: list[int]) -> tuple[int, ...]:
    """Arguments that get the result's own gradient, if there is one result
    and no argument is given twice."""
    if len(call.makes) != 1:
        return ()
    passed = [call.reads[i] for i in gradients if i in cost.passed]
    return distinct(v for v in passed if call.reads.count(v) == 1)


def signature(call: Call) -> str:
    """Equal for calls that cost the same."""
    operation = call.operation
    leaves = [
        f"{leaf.dtype.name}{leaf.shape}" if tf.is_tensor(leaf) else repr(leaf)
        for leaf in keras.tree.flatten(call.arguments)
    ]
    try:
        config = dict(operation.get_config())
        config.pop("name", None)
        described = json.dumps(config, sort_keys=True, default=repr)
    except (AttributeError, NotImplementedError, TypeError):
        # The loss, what is between layers, or a layer that has no description.
        address = operation is not None and f"layer at {id(operation):#x}"
        described = getattr(operation, "__qualname__", address)
    kind = type(operation).__name__
    # A description does not tell what is frozen within.
    weights = [
        (tuple(v.shape), v.dtype, v.trainable)
        for v in getattr(operation, "variables", [])
    ]
    return repr((kind, described, weights, leaves, call.operations))


def distinct(values) -> tuple[int, ...]:
    """Values in the order in which they first occur; constants left out."""
    return tuple(dict.fromkeys(v for v in values if v is not None))
