"""Which layers are compiled under DTR, and when: `kmem.DTR(compile="layers")`.

A block is a layer of Keras's own, with all that is in it; of a recurrent
layer its cell, as the number of steps varies. So is a layer of the user's own
whose Python is known to do the same at every step (kmem/dtr/own_layers.py).
While a step runs, the calls of the blocks are compiled calls
(kmem/dtr/compiled.py). What lies between them, and other layers and models of
the user's own, runs operator by operator.

A call that cannot be compiled runs operator by operator, but for the blocks
inside. It is traced anew for arguments of other types; where only shapes
differ, for shapes of which parts are unknown, so that there is an end to it.
Not so a layer of the user's own, which may ask for a shape.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.dtr.compiled import CompiledCall
from kmem.dtr.own_layers import PLAIN
from kmem.dtr.own_layers import Reads
from kmem.dtr.own_layers import find_reads
from kmem.remat import state
from kmem.remat.structure import Structure
from kmem.step.capture import all_layers
from kmem.step.capture import children
from kmem.step.patching import attribute

_MAX_KINDS = 16


class Blocks:
    """The blocks of a model.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._blocks = _find(model)

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Compiles the calls of the blocks that are made within."""
        with contextlib.ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(attribute(block.layer, "call", block))
            yield


def _find(model) -> list["_Block"]:
    found: dict[int, _Block] = {}
    waiting = children(model)
    while waiting:
        layer = waiting.pop()
        inside = all_layers(layer)
        own = [each for each in inside if not _is_kerass(each)]
        if any(map(_is_opened, inside)):
            waiting += children(layer)
        elif not own:
            found[id(layer)] = _Block(layer, [])
        else:
            # Those inside are for where the whole cannot be compiled.
            waiting += children(layer)
            found_reads = [(each, find_reads(each)) for each in own]
            reads = [(each, read) for each, read in found_reads if read]
            if len(reads) == len(own):
                found[id(layer)] = _Block(layer, reads)
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
    """A layer's `call`.

    Args:
        layer: The layer.
        reads: The layers of the user's own in it, and what they read.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        reads: list[tuple[keras.layers.Layer, Reads]],
    ):
        self.layer = layer
        self._reads = reads
        self._call = layer.call
        self._layers = all_layers(layer)
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
        if not tf.executing_eagerly() or state.within_scope():
            return None
        key = _key((args, kwargs))
        if key is None:
            return None
        if self._reads:
            read = [reads.key(layer) for layer, reads in self._reads]
            shapes = _shapes((args, tuple(kwargs.values())))
            if None in read or shapes is None:
                return None
            key = key, tuple(read), shapes
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
            compiled = CompiledCall(
                self._call, join, specs, exact=bool(self._reads)
            )
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

    @property
    def refused(self) -> bool:
        """Whether they cannot be compiled."""
        return bool(self._compiled) and self._compiled[-1] is None

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


def _shapes(value) -> Any:
    """The shapes of all tensors; `None` if there is what could be changed."""
    if isinstance(value, tf.Tensor):
        return tuple(value.shape)
    if isinstance(value, list | dict):
        return None
    if not isinstance(value, tuple):
        return ()
    shapes = tuple(map(_shapes, value))
    return None if None in shapes else shapes


def _key(value) -> Any:
    """What a call's arguments are, but for the values and sizes of tensors;
    `None` if they are more than a function can be traced for."""
    if isinstance(value, tf.Tensor):
        mask = getattr(value, "_keras_mask", None)
        return value.dtype, value.shape.rank, mask is not None and _key(mask)
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, dict):
        value = [item for pair in sorted(value.items()) for item in pair]
    elif not isinstance(value, list | tuple):
        return None
    keys = tuple(map(_key, value))
    return None if None in keys else (type(value), keys)
