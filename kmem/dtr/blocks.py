"""Which layers are compiled under DTR, and when: `kmem.DTR(compile="layers")`.

A block is a layer of Keras's own, with all that is in it; of a recurrent
layer its cell, as the number of steps varies. While a step runs, the calls of
the blocks are compiled calls (kmem/dtr/compiled.py). What lies between them,
and layers and models of the user's own, runs operator by operator: their
Python may do something else at every step.

A call that cannot be compiled runs operator by operator. It is traced anew
for arguments of other types; where only shapes differ, for shapes of which
parts are unknown, so that there is an end to it.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.capture import all_layers
from kmem.capture import attribute
from kmem.capture import children
from kmem.dtr.compiled import CompiledCall
from kmem.remat import state
from kmem.remat.structure import Structure

_MAX_KINDS = 16
_PLAIN = (type(None), bool, int, float, str)


class Blocks:
    """The blocks of a model.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._blocks = [_Block(layer) for layer in _find(model)]

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Compiles the calls of the blocks that are made within."""
        with contextlib.ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(attribute(block.layer, "call", block))
            yield


def _find(layer) -> list[keras.layers.Layer]:
    found: dict[int, keras.layers.Layer] = {}
    for child in children(layer):
        own = all(map(_is_kerass, all_layers(child)))
        if own and not any(map(_is_opened, all_layers(child))):
            found[id(child)] = child
        else:
            found |= {id(inner): inner for inner in _find(child)}
    return list(found.values())


def _is_opened(layer) -> bool:
    return isinstance(layer, keras.Model | keras.layers.RNN)


def _is_kerass(layer) -> bool:
    """Whether all of its Python is Keras's: no function of the user's."""
    functions = filter(inspect.isfunction, vars(layer).values())
    return all(
        code.__module__.startswith("keras.")
        for code in (type(layer), *functions)
    )


class _Block:
    """A layer's `call`."""

    def __init__(self, layer: keras.layers.Layer):
        self.layer = layer
        self._call = layer.call
        self._layers = all_layers(layer)
        self._kinds: dict[Any, _Kind] = {}

    def __call__(self, *args, **kwargs):
        kind = self._kind(args, kwargs)
        if kind is None:
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
        if not tf.executing_eagerly() or state.within_scope():
            return None
        key = _key((args, kwargs))
        if key is None:
            return None
        trainable = tuple(layer.trainable for layer in self._layers)
        key = key, trainable, state.ambient_key()
        kind = self._kinds.get(key)
        if kind is None and len(self._kinds) < _MAX_KINDS:
            kind = self._kinds[key] = _Kind()
        return kind

    def compile(self, join, specs: list) -> CompiledCall | None:
        """The compiled call; `None` if it cannot be compiled."""
        attributes = [dict(vars(layer)) for layer in self._layers]
        try:
            compiled = CompiledCall(self._call, join, specs)
        except (Exception, state.CannotRepeat):
            # An error of the layer itself comes again, operator by operator.
            compiled = None
        for layer, before in zip(self._layers, attributes, strict=True):
            for name, value in list(vars(layer).items()):
                if _holds_symbols(value):
                    # It keeps a tensor from one call to the next.
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

    def compiled(self, block, join, specs) -> CompiledCall | None:
        if self._compiled and all(map(_covers, self._specs, specs)):
            return self._compiled[-1]
        if self._compiled:
            specs = list(map(_common, self._specs, specs))
        self._specs = specs
        self._compiled.append(block.compile(join, specs))
        return self._compiled[-1]


def _holds_symbols(value) -> bool:
    leaves = value if isinstance(value, list | tuple) else [value]
    return any(tf.is_symbolic_tensor(leaf) for leaf in leaves)


def _covers(spec: tf.TensorSpec, other: tf.TensorSpec) -> bool:
    return spec.is_compatible_with(other)


def _common(spec: tf.TensorSpec, other: tf.TensorSpec) -> tf.TensorSpec:
    pairs = zip(spec.shape, other.shape, strict=True)
    return tf.TensorSpec([a if a == b else None for a, b in pairs], spec.dtype)


def _key(value) -> Any:
    """What a call's arguments are, but for the values and sizes of tensors;
    `None` if they are more than a function can be traced for."""
    if isinstance(value, tf.Tensor):
        mask = getattr(value, "_keras_mask", None)
        return value.dtype, value.shape.rank, mask is not None and _key(mask)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, dict):
        value = [item for pair in sorted(value.items()) for item in pair]
    elif not isinstance(value, list | tuple):
        return None
    keys = tuple(map(_key, value))
    return None if None in keys else (type(value), keys)
