"""Takes the tensors out of what a function is given or returns.

A tensor's Keras mask is an attribute of the Python object, which operations
do not hand on: masks are taken out and put back as tensors of their own.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmem.base import private_keras

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


class Structure:
    """Anything nested, with its tensors in a list.

    Attributes:
        tensors: The tensors, of composite tensors their parts, and the masks.
    """

    def __init__(self, nested: Any):
        self.tensors: list = []
        self._nested = tf.nest.map_structure(self._take, nested)

    def join(self, tensors: list) -> Any:
        """The same structure around other tensors."""
        return tf.nest.map_structure(lambda put: put(tensors), self._nested)

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
        if not isinstance(mask, tf.Tensor):
            return lambda tensors: tensors[start]
        self.tensors.append(mask)

        def put(tensors):
            tensor = tensors[start]
            private_keras.set_mask(tensor, tensors[start + 1])
            return tensor

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
