"""What a training step is going to need, told without running it.

The step is traced once, for a batch size that divides no other dimension, so
that its graph tells every tensor's size for any batch; its allocations are
then simulated as TensorFlow's executor makes them (planning/allocations.py).
Variables that the optimizer does not have yet are made in a graph, where they
take no memory. What this does not know: what XLA fuses and in which order it
computes, and what kernels keep for themselves on other processors.
"""

import dataclasses
import functools
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base import drawing
from kmem.base import patching
from kmem.base import private_keras
from kmem.base.sizes import format_size
from kmem.fit.session import Session
from kmem.graph import reading
from kmem.graph import releasing
from kmem.keras_graph import profiling
from kmem.options import MemoryOptions
from kmem.planning import allocations
from kmem.planning.timeline import TensorAtPeak
from kmem.planning.timeline import Timeline
from kmem.planning.timeline import figure
from kmem.step import batches
from kmem.step.capture import optimizer_config
from kmem.step.capture import optimizers

# Batch sizes to trace with: prime, so that few dimensions are multiples.
_PRIMES = (1009, 1511, 2003, 2503, 3001, 4001)
_NUM_TENSORS = 20
_COUNTS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Estimate(drawing.Shown):
    """What a training step needs, in bytes.

    The peak is the sum of parameters, optimizer, batch, gradients, activations
    and workspace. In a graph whose order is not given, threads decide which
    of some operations run first: the peak is between the least and the most.

    Attributes:
        batch_size: The number of examples of the batch.
        parameter_bytes: All variables of the model.
        optimizer_bytes: All variables of the optimizer.
        batch_bytes: The batch itself.
        gradient_bytes: The gradients of weights that exist at the peak.
        activation_bytes: Tensors at the peak that grow with the batch.
        workspace_bytes: The rest of the peak: updates of weights, loops.
        peak_bytes: The device's peak, with everything above in it.
        least_peak_bytes: The peak if idle threads run nothing early.
        most_peak_bytes: The peak if they run all that they can.
        tensors: The largest tensors at the peak.
        options: For each option of `fit`, the peak in bytes with it.
        is_compiled: Whether XLA compiles the step, which may need more or
            less: it orders and joins operations itself.
        timeline: What `plot` draws.
    """

    batch_size: int
    parameter_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    gradient_bytes: int
    activation_bytes: int
    workspace_bytes: int
    peak_bytes: int
    least_peak_bytes: int
    most_peak_bytes: int
    tensors: tuple[TensorAtPeak, ...] = ()
    options: dict[str, int] = dataclasses.field(default_factory=dict)
    is_compiled: bool = False
    timeline: Timeline = dataclasses.field(default=Timeline(), repr=False)

    def plot(self, path: str | os.PathLike) -> None:
        """Draws the memory over the step, by what it is for, and names the
        largest tensors at the peak.

        It is a step in one of the orders that threads may choose: its peak is
        between the least and the most.

        Args:
            path: Where to save the picture; its ending says the format.

        Raises:
            ImportError: If matplotlib is missing.
        """
        figure(self.timeline).savefig(path, dpi=150)

    def summary(self) -> str:
        """A table: what the peak is made of, the options, and the largest
        tensors."""
        lines = [f"a step of {self.batch_size} examples"]
        names = "parameter optimizer batch gradient activation workspace peak"
        for name in names.split():
            size = getattr(self, f"{name}_bytes")
            lines.append(f"{name:<32} {format_size(size):>10}")
        if self.is_compiled:
            lines.append("(of the step as it is without XLA)")
        lines += ["", "the peak with an option"]
        lines += [
            f"{name:<32} {format_size(size):>10}"
            for name, size in self.options.items()
        ]
        lines += ["", "the largest tensors at the peak"]
        lines += map(str, self.tensors)
        return "\n".join(lines)


def estimate(model: keras.Model, batch: Any) -> Estimate:
    """Tells the memory that a model's training step needs, without running it.

    Nothing is allocated on the device: the batch may be larger than the
    machine's memory.

    Args:
        model: A built and compiled `keras.Model` that trains in a graph.
        batch: One batch, as `train_step` gets it: `x`, `(x, y)` or
            `(x, y, sample_weight)`, of arrays, tensors or `tf.TensorSpec`s.

    Returns:
        An `Estimate`, in bytes.

    Raises:
        ValueError: If the model is not built or not compiled, runs eagerly or
            on several replicas, or if the batch has no fixed shape.

    Example:

    ```python
    import keras
    import tensorflow as tf

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    batch = tf.TensorSpec((10**9, 8)), tf.TensorSpec((10**9, 4))
    print(kmem.estimate(model, batch).summary())
    ```
    """
    return Step(model, batch).estimate()


class Step:
    """A training step, traced once for batches of all sizes."""

    def __init__(self, model: keras.Model, batch: Any):
        self._model = model
        self._batch = profiling.checked_specs(model, batch)
        _check(model)
        self.rows = batches.num_rows(self._batch) or 1
        self._traced_rows = _traced_rows(model, self._batch)
        self._program = functools.cache(self._sized)
        self.peak = functools.cache(self._simulated)
        self._trace()
        self._layers = {layer.name for layer in private_keras.all_layers(model)}
        weights = model.trainable_variables
        self._weights = {batches.num_bytes(variable) for variable in weights}

    def _trace(self) -> None:
        model, optimizer = self._model, self._model.optimizer
        config = optimizer_config(optimizer)
        specs = batches.with_rows(self._batch, self._traced_rows)
        leaves = batches.leaves(specs)
        # A few numbers; what is first made in a graph is gone with it.
        with patching.attribute(model, "optimizer", None):
            private_keras.build_metrics(model, specs)

        def tell(call, *args, **kwargs):
            results = call(*args, **kwargs)
            batches.tell_rows(results, self._traced_rows)
            return results

        telling = [
            patching.method(layer, patching.call_of(layer), tell)
            for layer in private_keras.all_layers(model)
        ]

        def trace(optimizer):
            own = patching.attribute(model, "optimizer", optimizer)
            with own, patching.together(telling):
                session = Session(model, MemoryOptions(), ordered=False)
                run = batches.of_leaves(session.on_batch(), specs)
                function = releasing.function(run, input_signature=leaves)
                return function.get_concrete_function().graph

        # Variables that are made here take no memory.
        with tf.Graph().as_default():
            if not optimizer.built:
                optimizer = optimizer.from_config(config)
            self._graph = trace(optimizer)
            self._optimizer_bytes = batches.num_bytes(optimizer.variables)
        self._num_leaves = len(leaves)

    def _sized(self, rows: int, halves: bool):
        sizes = reading.Sizes(rows, self._traced_rows, halves)
        return reading.read(self._graph, sizes), sizes

    def _simulated(self, rows: int, halves: bool = False, late: bool = True):
        """The simulated step with a batch size, and what was simulated."""
        program, sizes = self._program(rows, halves)
        nodes = program.nodes
        if late:
            given = program.arguments[: self._num_leaves]
            nodes = allocations.on_demand(nodes, given)
        threads = tf.config.threading.get_inter_op_parallelism_threads()
        threads = threads or len(os.sched_getaffinity(0))
        peak = allocations.simulate(nodes, program.results, threads)
        return peak, program, sizes

    def peak_bytes(self, rows: int, halves: bool = False) -> int:
        """What a step is expected to allocate, besides what is there."""
        late, _, _ = self.peak(rows, halves)
        early, _, _ = self.peak(rows, halves, late=False)
        return (late.num_bytes + early.num_bytes) // 2

    def _held_bytes(self, rows: int) -> int:
        batch = batches.num_bytes(batches.with_rows(self._batch, rows))
        parameters = batches.num_bytes(self._model.variables)
        return parameters + self._optimizer_bytes + batch

    def estimate(self) -> Estimate:
        """The estimate for the batch."""
        early, _, _ = self.peak(self.rows, late=False)
        late, program, sizes = self.peak(self.rows)
        expected = (early.num_bytes + late.num_bytes) // 2
        held = self._held_bytes(self.rows)
        parameters = batches.num_bytes(self._model.variables)
        batch = held - parameters - self._optimizer_bytes
        kinds: dict[str, list] = {
            kind: [] for kind in ("gradients", "activations", "workspace")
        }
        for each in late.arrays:
            kinds[self._kind(each, program, sizes)].append(each)
        in_use = {kind: late.in_use(arrays) for kind, arrays in kinds.items()}
        at = int(np.argmax(sum(in_use.values())))
        gradients, activations, _ = (int(each[at]) for each in in_use.values())
        fixed = {
            "parameters": parameters,
            "optimizer": self._optimizer_bytes,
            "batch": batch,
        }
        tensors = self.largest(late, program, sizes)
        return Estimate(
            batch_size=self.rows,
            parameter_bytes=parameters,
            optimizer_bytes=self._optimizer_bytes,
            batch_bytes=batch,
            gradient_bytes=gradients,
            activation_bytes=activations,
            workspace_bytes=expected - activations - gradients,
            peak_bytes=held + expected,
            least_peak_bytes=held + min(early.num_bytes, late.num_bytes),
            most_peak_bytes=held + max(early.num_bytes, late.num_bytes),
            tensors=tensors,
            options=self._options(held),
            is_compiled=profiling.mode(self._model) == "xla",
            timeline=Timeline(self.rows, late.starts, fixed, in_use, tensors),
        )

    def _kind(self, held, program, sizes) -> str:
        """What an array is for."""
        outputs = program.operations[held.node].outputs
        if held.index >= 0 and any(map(sizes.grows, outputs)):
            return "activations"
        is_gradient = held.index >= 0 and held.num_bytes in self._weights
        return "gradients" if is_gradient else "workspace"

    def _options(self, held: int) -> dict[str, int]:
        """The peak under options, by arithmetic."""
        gradients = batches.num_bytes(self._model.trainable_variables)
        peaks = {}
        for count in _COUNTS:
            if count <= self.rows:
                # The sum of the gradients stays beside each micro-batch's.
                size = -(-self.rows // count)
                late, _, _ = self.peak(size)
                peak = held + gradients + late.num_bytes
                peaks[f"microbatches={count}"] = peak
        # Weights are copied to 16 bits; the layers' own stay in 32.
        halves = self.peak_bytes(self.rows, halves=True)
        peaks["mixed_precision='bfloat16'"] = held + gradients // 2 + halves
        size = -(-self.rows // 2)
        rest = self._held_bytes(size) - self._optimizer_bytes
        own = -(-self._optimizer_bytes // 2)
        name = "sharding='optimizer', 2 processes"
        peaks[name] = rest + own + self.peak_bytes(size)
        return peaks

    def largest(self, peak, program, sizes) -> tuple[TensorAtPeak, ...]:
        """The largest tensors at a peak, with what `peak` gives beside it."""
        names = [node.name for node in program.nodes]
        scopes = {part for name in names for part in name.split("/")}

        def tensor(held) -> TensorAtPeak:
            op = program.operations[held.node]
            shape, dtype = (), "workspace"
            if held.index >= 0:
                output = op.outputs[held.index]
                dtype = output.dtype.name
                if output.shape.rank is not None:
                    shape = tuple(sizes.shape(output))
            layer = _layer(op.name, self._layers, scopes)
            kind = self._kind(held, program, sizes)
            return TensorAtPeak(
                *(layer, op.name, shape, dtype, held.num_bytes, kind)
            )

        return tuple(map(tensor, peak.held[:_NUM_TENSORS]))


def largest_tensors(model: keras.Model, batch: Any, rows: int) -> tuple:
    """What an error says of a step without options: see `Step.largest`.

    Nothing where the step cannot be traced: the error is what matters.
    """
    try:
        step = Step(model, batch)
        return step.largest(*step.peak(rows))
    except Exception:
        return ()


def _check(model: keras.Model) -> None:
    if not model.compiled:
        raise ValueError(
            f"The model must be compiled. Received: model={model.name}"
        )
    if model.run_eagerly:
        raise ValueError(
            "The model must train in a graph, whose allocations are known "
            "before it runs. Received: run_eagerly=True"
        )
    others = [each for each in optimizers(model) if each is not model.optimizer]
    if not all(each.built for each in others):
        raise ValueError(
            "All optimizers but the model's own must be built: call their "
            f"`build(variables)` first. Received: model={model.name}"
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            "The model must train on one device; give it a replica's batch "
            f"without a strategy. Received: {replicas} replicas"
        )


def _traced_rows(model: keras.Model, specs: Any) -> int:
    """A batch size that divides no other dimension."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    for each in inputs:
        if each.shape and each.shape[0] is not None:
            # The only one that the model takes.
            return each.shape[0]
    others = {size for v in model.variables for size in v.shape}
    for spec in keras.tree.flatten(specs):
        others.update(spec.shape[1:] if spec is not None else ())
    for prime in _PRIMES:
        if not any(size and size % prime == 0 for size in others):
            return prime
    raise ValueError(
        "The model must have no dimension that is a multiple of each of "
        f"{_PRIMES}. Received: model={model.name}"
    )


def _layer(name: str, layers: set[str], scopes: set[str]) -> str:
    """The innermost layer in an operation's name.

    The scope of `dense` may be `dense_1`, and that of `dense_1` then is
    `dense_1_1`: a scope is given a number where it is there already.
    """
    numbered = {scope.rpartition("_")[0] for scope in scopes}
    for part in reversed(name.split("/")):
        base = part.rpartition("_")[0]
        is_base = base not in scopes and part in numbered
        for candidate in (base, part) if is_base else (part, base):
            if candidate in layers:
                return candidate
    return ""
