"""Which layers are compiled under DTR, and when: `kmem.DTR(compile=...)`.

A block is a layer of Keras's own, with all that is in it; of a recurrent
layer its cell, as the number of steps varies. So is a layer of a class that
the user names: by that it is said to do the same at every call with the same
shapes and attributes. While a step runs, the calls of the blocks are compiled
calls (kmem/dtr/compiled.py). What lies between them, and other layers and
models of the user's own, runs operator by operator.

A call that cannot be compiled runs operator by operator, but for the blocks
inside. It is traced anew for arguments of other types, and for other plain
attributes of the layers; where only shapes differ, for shapes of which some
sizes are unknown, so that there is an end to it. Not so a layer that the user
names, which may ask for a shape.
"""

import inspect
from typing import Any
from typing import Literal

import keras
import tensorflow as tf

from kmem.base import private_keras
from kmem.base.patching import Context
from kmem.base.patching import attribute
from kmem.base.patching import call_of
from kmem.base.patching import together
from kmem.dtr.compiled import CompiledCall
from kmem.keras_graph.opening import children
from kmem.remat import state
from kmem.remat.structure import Structure

_MAX_KINDS = 16
_PLAIN = (type(None), bool, int, float, str)


class Blocks:
    """The blocks of a model, compiled as `kmem.DTR` says."""

    def __init__(
        self,
        model: keras.Model,
        compile: Literal["layers"] | None | tuple[type, ...] = "layers",
    ):
        self._blocks: list[_Block] = []
        if compile is not None:
            named = compile if isinstance(compile, tuple) else ()
            self._blocks = _find(model, named)

    def compiled(self) -> Context:
        """Compiles the calls of the blocks that are made within."""
        return together(
            attribute(block.layer, call_of(block.layer), block)
            for block in self._blocks
        )


def _find(model, named: tuple[type, ...]) -> list["_Block"]:
    blocks: dict[int, _Block] = {}
    waiting = children(model)
    while waiting:
        layer = waiting.pop()
        is_named = isinstance(layer, named)
        is_opened = any(map(_is_opened, private_keras.all_layers(layer)))
        if is_named or not is_opened:
            blocks[id(layer)] = _Block(layer, exact=is_named)
        if is_named or is_opened:
            # Those inside are for where the whole cannot be compiled.
            waiting += children(layer)
    return list(blocks.values())


def _is_opened(layer) -> bool:
    """Whether a layer, and what holds it, is not compiled as a whole: unless
    all of its Python is Keras's, with no function of the user's."""
    functions = filter(inspect.isfunction, vars(layer).values())
    return isinstance(layer, keras.Model | keras.layers.RNN) or not all(
        code.__module__.startswith("keras.")
        for code in (type(layer), *functions)
    )


class _Block:
    """A layer's `call`.

    Args:
        layer: The layer.
        exact: Whether it is traced for each shape by itself.
    """

    def __init__(self, layer: keras.layers.Layer, exact: bool):
        self.layer = layer
        self._exact = exact
        self._call = getattr(layer, call_of(layer))
        self._layers = private_keras.all_layers(layer)
        self._kinds: dict[Any, _Kind] = {}

    def __call__(self, *args, **kwargs):
        kind = self._kind(args, kwargs)
        if kind is None or kind.refused:
            return self._call(*args, **kwargs)
        arguments = Structure((args, kwargs))
        # Those who trace are not to hold on to any.
        tensors, arguments.tensors = arguments.tensors, []
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        compiled = kind.compiled(self, arguments.join, specs)
        if compiled is None:
            return self._call(*args, **kwargs)
        return compiled(tensors)

    def _kind(self, args, kwargs) -> "_Kind | None":
        if not tf.executing_eagerly() or private_keras.stateless_scope():
            return None
        key = _key((args, kwargs), self._exact)
        if key is None:
            return None
        attributes = tuple(map(_plain_attributes, self._layers))
        key = key, attributes, state.ambient_key()
        kind = self._kinds.get(key)
        if kind is None and len(self._kinds) < _MAX_KINDS:
            kind = self._kinds[key] = _Kind()
        return kind

    def compile(self, join, specs: list) -> CompiledCall | None:
        """The compiled call; `None` if it cannot be compiled."""
        if not all(layer.built for layer in self._layers):
            return None
        attributes = [dict(vars(layer)) for layer in self._layers]
        try:
            compiled = CompiledCall(self._call, join, specs, self._exact)
        except (Exception, state.CannotRepeat):
            # An error of the layer itself comes again, operator by operator.
            compiled = None
        for layer, before in zip(self._layers, attributes, strict=True):
            for name, value in list(vars(layer).items()):
                if _is_kept(value) and value is not before.get(name, layer):
                    # It keeps something from one call to the next.
                    compiled = None
                    object.__delattr__(layer, name)
                    if name in before:
                        object.__setattr__(layer, name, before[name])
        return compiled


class _Kind:
    """Calls that differ in the values and shapes of tensors only."""

    def __init__(self):
        self._specs: list[tf.TensorSpec] = []
        # All of them: what they made may have to be made again.
        self._compiled: list[CompiledCall | None] = []

    @property
    def refused(self) -> bool:
        """Whether they cannot be compiled."""
        return bool(self._compiled) and self._compiled[-1] is None

    def compiled(self, block, join, specs) -> CompiledCall | None:
        covers = tf.TensorSpec.is_compatible_with
        if self._compiled and all(map(covers, self._specs, specs)):
            return self._compiled[-1]
        if self._compiled:
            specs = [
                own.most_specific_common_supertype([spec])
                for own, spec in zip(self._specs, specs, strict=True)
            ]
        self._specs = specs
        self._compiled.append(block.compile(join, specs))
        return self._compiled[-1]


def _is_kept(value) -> bool:
    leaves = value if isinstance(value, list | tuple) else [value]
    return isinstance(value, _PLAIN) or any(
        tf.is_symbolic_tensor(leaf) for leaf in leaves
    )


def _plain_attributes(layer) -> tuple:
    """What a layer's Python may read that a trace holds as it is now."""
    return tuple(
        (name, type(value), value)
        for name, value in vars(layer).items()
        if isinstance(value, _PLAIN)
    )


def _key(value, exact: bool) -> Any:
    """What a call's arguments are, but for the values of tensors and, unless
    `exact`, their sizes; `None` if a function cannot be traced for them."""
    if isinstance(value, tf.Tensor):
        mask = private_keras.mask_of(value)
        num_on = sum(each is not None for each in vars(value).values())
        if exact and num_on > (mask is not None):
            return None  # The user's Python may read what else is put on it.
        shape = tuple(value.shape) if exact else value.shape.rank
        return value.dtype, shape, mask is not None and _key(mask, exact)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return None  # TensorFlow may not be able to sort them.
        value = [item for pair in sorted(value.items()) for item in pair]
    elif not isinstance(value, list | tuple):
        return None
    keys = tuple(_key(item, exact) for item in value)
    return None if None in keys else (type(value), keys)
