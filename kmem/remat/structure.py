"""Takes the tensors out of what a function is given, returns or leaves.

A tensor's Keras mask is an attribute of the Python object, which operations
do not hand on: masks are taken out and put back as tensors of their own. So
are, of what a function returns, other attributes: Keras's cross-entropies look
there for what a softmax was made from.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base import private_keras

# In the place of a value, where a layer had no such attribute.
NONE = object()
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


@dataclasses.dataclass(frozen=True)
class Left:
    """What a function leaves besides its results.

    Attributes:
        losses: The layers that added one, for each.
        attributes: Layers, what of theirs has tensors by now, and what that
            was before.
    """

    losses: list[keras.layers.Layer]
    attributes: list[tuple[keras.layers.Layer, str, Any]]

    def give(self, values: list) -> None:
        """Gives layers their losses, and their attributes' values."""
        count = len(self.losses)
        for layer, loss in zip(self.losses, values[:count], strict=True):
            # Not a method that a subclass may have: that was called before.
            keras.layers.Layer.add_loss(layer, loss)
        for own, value in zip(self.attributes, values[count:], strict=True):
            setattr(*own[:2], value)

    def put_back(self) -> None:
        """Gives layers the attributes that they had before."""
        for layer, name, before in self.attributes:
            if before is not NONE:
                setattr(layer, name, before)
            elif name in vars(layer):
                delattr(layer, name)


def key_of(attribute: tuple) -> tuple[int, str]:
    """What an attribute of `Left` is found by."""
    layer, name, *_ = attribute
    return id(layer), name


class Structure:
    """Anything nested, with its tensors in a list.

    Args:
        nested: What it is.
        whole: Whether tensors have all their attributes, or masks alone.

    Attributes:
        tensors: The tensors, of composite tensors their parts, and what is
            put on tensors.
        join: Gives the same structure around other tensors.
    """

    def __init__(self, nested: Any, whole: bool = False):
        self.tensors: list = []
        self._whole = whole
        self.join = self._take_all(nested)

    def _take_all(self, nested) -> Callable[[list], Any]:
        puts = tf.nest.map_structure(self._take, nested)
        return lambda tensors: tf.nest.map_structure(
            lambda put: put(tensors), puts
        )

    def _take(self, leaf) -> Callable[[list], Any]:
        start = len(self.tensors)
        if isinstance(leaf, _COMPOSITE):
            spec = tf.type_spec_from_value(leaf)
            self.tensors += tf.nest.flatten(leaf, expand_composites=True)
            stop = len(self.tensors)
            return lambda tensors: tf.nest.pack_sequence_as(
                spec, tensors[start:stop], expand_composites=True
            )
        if not isinstance(leaf, tf.Tensor | tf.TensorSpec):
            return lambda tensors: leaf
        self.tensors.append(leaf)
        mask = private_keras.mask_of(leaf)
        own = {} if mask is None else {private_keras.MASK: mask}
        own = vars(leaf) if self._whole else own
        gives = {
            name: self._take_all(value)
            for name, value in own.items()
            if value is not leaf  # As of what stands for a variable.
        }

        def put(tensors):
            for name, give in gives.items():
                setattr(tensors[start], name, give(tensors))
            return tensors[start]

        return put


def is_differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def summed(gradients: list):
    """The sum of gradients that may be `None`; a single one as it is."""
    present = [g for g in gradients if g is not None]
    if len(present) < 2:
        return present[0] if present else None
    return tf.add_n([tf.convert_to_tensor(g) for g in present])


def untracked(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor as a constant, to every tape."""
    return tf.stop_gradient(tensor) if is_differentiable(tensor) else tensor
