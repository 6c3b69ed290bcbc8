"""What layers keep from batch to batch, when a batch comes in micro-batches.

A layer that counts its calls, takes a power iteration (spectral normalization)
or moves an average (batch normalization) would do so once a micro-batch. Here
each micro-batch begins with the state before the batch, and the batch changes
it once, by the mean of the micro-batches' changes, weighted by their examples.
That is exact where a change does not depend on the examples, or is a mean over
them. What this module does not do: compute statistics of the whole batch. A
layer that normalizes by them sees one micro-batch at a time.
"""

import warnings

import keras
import tensorflow as tf

from kmem.base.private_keras import all_layers


class LayerState:
    """The state of a model's layers that its steps assign.

    Seeds are not among it, so that each micro-batch draws its own random
    numbers, nor are metrics.

    Args:
        model: The model.
        scope: A scope in which a step of the model was run.
        data: What the step was given.

    Attributes:
        variables: Those that the step assigned.
        layers_that_see_parts: The layers whose assignments depend on `data`.
            In eager mode that is not known, and all count that assign.
    """

    def __init__(self, model, scope: keras.StatelessScope, data):
        assigned = scope.state_mapping
        self.variables = [v for v in model.weights if id(v) in assigned]
        values = {id(v): assigned[id(v)] for v in self.variables}
        if not tf.executing_eagerly() and values:
            reached = _reached_from(tf.nest.flatten(data, True))
            values = {k: v for k, v in values.items() if id(v) in reached}
        self.layers_that_see_parts = _innermost(model, set(values))

    def values(self) -> list[tf.Tensor]:
        """What the state is now."""
        return [tf.identity(v.value) for v in self.variables]

    def take_changes(self, before: list[tf.Tensor], share) -> list[tf.Tensor]:
        """What a micro-batch has changed, which is undone.

        Args:
            before: The state before the batch.
            share: The micro-batch's examples over the batch's, a scalar.

        Returns:
            For each variable the change times `share`, in float64.
        """
        changes = []
        for variable, old in zip(self.variables, before, strict=True):
            now, then = (
                tf.cast(value, tf.float64) for value in (variable.value, old)
            )
            changes.append((now - then) * tf.cast(share, tf.float64))
            with tf.control_dependencies(changes[-1:]):
                variable.assign(old)
        return changes

    def change(self, before: list[tf.Tensor], changes: list[tf.Tensor]) -> None:
        """Changes the state by the sum of what the micro-batches gave."""
        for variable, old, change in zip(
            self.variables, before, changes, strict=True
        ):
            new = tf.cast(old, tf.float64) + change
            dtype = tf.as_dtype(variable.dtype)
            variable.assign(
                tf.cast(new if dtype.is_floating else tf.round(new), dtype)
            )


def warn_of_parts(
    layers: list[keras.layers.Layer], microbatches: int, num_processes: int
) -> None:
    """Says which layers see one part of a batch at a time."""
    if not layers:
        return
    names = [f"{each.name} ({type(each).__name__})" for each in layers]
    if microbatches > 1:
        parts = (
            "see one micro-batch at a time. Their numbers are not those of "
            'the whole batch: see "What differs" in docs/accumulation.md. '
            f"Received: microbatches={microbatches}"
        )
    else:
        parts = (
            "see each process's own examples. Their numbers are not those of "
            "one process; `BatchNormalization(synchronized=True)` gives those: "
            'see "Rules" in docs/sharding.md. '
            f"Received: {num_processes} processes"
        )
    warnings.warn(
        f"Layers whose state can depend on the examples {parts}, layers "
        f"{', '.join(names)}",
        stacklevel=2,
    )


def _innermost(model, identities: set[int]) -> list[keras.layers.Layer]:
    """The layers that own variables, and not by way of a layer inside."""
    found = []
    for layer in all_layers(model):
        own = identities & {id(v) for v in layer.weights}
        for inner in all_layers(layer)[1:]:
            own -= {id(v) for v in inner.weights}
        if own:
            found.append(layer)
    return found


def _reached_from(tensors: list) -> set[int]:
    """The tensors of a graph that are computed from some, by their `id`."""
    waiting = [t for t in tensors if tf.is_tensor(t)]
    reached: dict[int, tf.Tensor] = {}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in reached:
            reached[id(tensor)] = tensor
            for reader in tensor.consumers():
                waiting += reader.outputs
    return set(reached)
