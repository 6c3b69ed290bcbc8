"""Gathers a layer's weights just before the layer runs.

A unit is a layer of Keras's own, with all that is in it, or a layer that is
named. Its call gathers the weights, runs, and forgets them. In the stage
"gradients" the backward pass still has them; in the stage "full" it gathers
them again, and makes again what the layer makes of them alone (kmem/remat),
unless a plan says what runs again, which contains the gathering then.

A forward pass gathers weights while the unit before runs, so that no unit has
to wait for its own. A backward pass, whose gradients need more memory, does
not.

Weights that no unit has, such as those that a model of one's own keeps itself,
are gathered where they are read, and kept for the backward pass.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem import remat
from kmem.base import patching
from kmem.base.patching import attribute
from kmem.base.private_keras import all_layers
from kmem.keras_graph.opening import children
from kmem.sharding.gathering import gathered
from kmem.sharding.variables import ShardedVariable
from kmem.sharding.variables import prepared


@dataclasses.dataclass
class Unit:
    """A layer whose weights are gathered together.

    Args:
        keeps: Whether the backward pass is left the weights.
        line: The inputs of the unit that ran last.
    """

    layer: keras.layers.Layer
    name: str
    keeps: bool
    line: list[tf.Tensor]

    def __post_init__(self):
        self._call = getattr(self.layer, patching.call_of(self.layer))
        # Of the weights' regularizers, until they are asked for.
        self._penalties: dict[int, tf.Tensor] = {}

    def changes(self) -> Iterator[patching.Context]:
        """Within these, the layer gathers its weights when it is called."""
        yield attribute(self.layer, patching.call_of(self.layer), self._run)
        for variable in self._sharded():
            # A gradient of the layer's own reads it again after the call.
            shard = variable.shard
            read = functools.partial(shard.read_full, shard.travel)
            yield attribute(variable, "read_whole", read)
        for variable in self._regularized():
            penalty = _Penalty(variable, self._penalties)
            yield patching.member(variable, "regularizer", penalty)

    def _run(self, *args, **kwargs) -> Any:
        regularized = self._regularized()
        functions = [v.regularizer.plain for v in regularized]

        def run(*args, **kwargs):
            with self._gathered((args, kwargs)):
                result = self._call(*args, **kwargs)
                # While the weights are there.
                return result, [
                    penalty(variable)
                    for penalty, variable in zip(
                        functions, regularized, strict=True
                    )
                ]

        run.__name__ = self.layer.name
        # What runs within a plan's segment is seen there only.
        within = remat.is_running()
        if not (self.keeps or within) and self._gathers_again(args, kwargs):
            run = remat.recompute(run, check=False, keep_residuals=True)
        result, penalties = run(*args, **kwargs)
        if not within:
            by_variable = zip(map(id, regularized), penalties, strict=True)
            self._penalties.update(by_variable)
        return result

    def _regularized(self) -> list[ShardedVariable]:
        return [
            variable
            for variable in self._sharded()
            if variable.trainable and variable.regularizer is not None
        ]

    def _gathers_again(self, *arguments) -> bool:
        """Whether there are weights that a gradient will need."""
        tensors = tf.nest.flatten(arguments, expand_composites=True)
        tensors = [tensor for tensor in tensors if tf.is_tensor(tensor)]
        sharded = self._sharded()
        return any(v.trainable for v in sharded) or (
            bool(sharded) and remat.is_watched(tensors)
        )

    def _sharded(self) -> list[ShardedVariable]:
        return [
            variable
            for variable in self.layer.weights
            if type(variable) is ShardedVariable
        ]

    def _gathered(self, arguments):
        variables = self._sharded()
        if not variables:
            return contextlib.nullcontext()
        inputs = tf.nest.flatten(arguments, expand_composites=True)
        after = inputs
        if not remat.is_repeating():
            # Forward, while the unit before runs.
            after, self.line[:] = self.line[:] or inputs, inputs
        shards = [variable.shard for variable in variables]
        return prepared(variables, gathered(shards, self.name, after))


class _Penalty(keras.regularizers.Regularizer):
    """A weight's penalty: the one computed while the weight was there, if it
    is among `computed`, by the weight's `id`."""

    def __init__(self, variable, computed: dict[int, tf.Tensor]):
        self.plain = variable.regularizer
        self._take = functools.partial(computed.pop, id(variable), None)

    def __call__(self, value):
        penalty = self._take()
        return self.plain(value) if penalty is None else penalty


def find(model, names: tuple[str, ...] | None) -> list[keras.layers.Layer]:
    """The layers of a model that are units; those that are named as a whole,
    whatever is in them."""
    names = names or ()
    layers = {layer.name for layer in all_layers(model)}
    missing = [name for name in names if name not in layers]
    if missing:
        raise ValueError(
            "`units` must be names of layers. "
            f"Received: {', '.join(missing)}, which the model does not have"
        )
    return list(_find(model, names))


def applied(layers: list, keeps: bool) -> patching.Context:
    """Lets layers gather their weights when they are called, and leaves them to
    the backward pass if `keeps`."""
    line: list[tf.Tensor] = []
    return patching.together(
        change
        for number, layer in enumerate(layers)
        for change in Unit(layer, f"unit {number}", keeps, line).changes()
    )


def _find(layer, names) -> Iterator[keras.layers.Layer]:
    for child in children(layer):
        kerass = type(child).__module__.startswith("keras.")
        is_unit = kerass and not isinstance(child, keras.Model)
        if (is_unit or child.name in names) and child.weights:
            yield child
        else:
            yield from _find(child, names)
