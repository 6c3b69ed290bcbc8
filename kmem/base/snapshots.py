"""What Python holds of a device's memory: tensors and variables, by size.

Python's garbage collector knows all of its objects, so nothing has to be
written down while a program runs. What this does not do: name what TensorFlow
holds by itself, such as the tensors of a step that is running, constants of
graphs, and batches that an input pipeline has made ready. That is one number,
the rest.
"""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base import drawing
from kmem.base.private_keras import tf_variable
from kmem.base.sizes import format_size

# Their elements lie elsewhere.
_NO_DATA = (tf.string, tf.resource, tf.variant)


@dataclasses.dataclass(frozen=True)
class HeldTensor:
    """A tensor or variable that Python holds.

    Attributes:
        name: A variable's path, such as `"dense/kernel"`; "" of a tensor.
        shape: Its shape.
        dtype: Its dtype.
        num_bytes: Its size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Snapshot(drawing.Shown):
    """What a device's memory holds at a moment, in bytes.

    Attributes:
        in_use_bytes: All that is in use.
        tensors: What Python holds of it, the largest first. Tensors that
            share their memory, such as a reshaped one, are there once.
        rest_bytes: What is held otherwise: by TensorFlow itself, or where
            Python cannot look.
    """

    in_use_bytes: int
    tensors: tuple[HeldTensor, ...]
    rest_bytes: int

    def summary(self, num_tensors: int = 20) -> str:
        """A table of the largest tensors and what the others take."""
        largest = self.tensors[:num_tensors]
        others = sum(each.num_bytes for each in self.tensors[num_tensors:])
        lines = [
            f"{each.name[-40:] or 'a tensor':<40} "
            f"{format_size(each.num_bytes):>10} {each.dtype}{list(each.shape)}"
            for each in largest
        ]
        for name, size in (
            (f"{len(self.tensors) - len(largest)} more", others),
            ("held by TensorFlow itself", self.rest_bytes),
            ("in use", self.in_use_bytes),
        ):
            lines.append(f"{name:<40} {format_size(size):>10}")
        return "\n".join(lines)


def snapshot(device: str, in_use_bytes: int) -> Snapshot:
    """Looks through all that Python holds of a device, by how its name ends,
    such as `"CPU:0"`; `in_use_bytes` are in use there."""
    tensors = sorted(_held(device), key=lambda each: -each.num_bytes)
    known = sum(each.num_bytes for each in tensors)
    # Tensors that point to a NumPy array's memory are not the device's.
    rest = max(in_use_bytes - known, 0)
    return Snapshot(in_use_bytes, tuple(tensors), rest)


def _held(device: str) -> Iterator[HeldTensor]:
    objects = gc.get_objects()
    paths = {
        id(tf_variable(each)): each.path
        for each in objects
        if isinstance(each, keras.Variable)
    }
    variables: list[Any] = [v for v in objects if isinstance(v, tf.Variable)]
    tensors: list[Any] = [t for t in objects if isinstance(t, tf.Tensor)]
    places = set()
    # Variables first: a tensor may be a variable's value.
    for each in variables + tensors:
        if tf.is_symbolic_tensor(each) or each.dtype in _NO_DATA:
            continue
        value = each.read_value() if isinstance(each, tf.Variable) else each
        # A variable's value may be emptied, and its shape unknown.
        num_bytes = value.shape.num_elements() * value.dtype.size
        if not num_bytes or not each.device.endswith(device):
            continue
        place = _place(value) or id(each)
        if place not in places:
            places.add(place)
            yield HeldTensor(
                paths.get(id(each), getattr(each, "name", "")),
                tuple(value.shape),
                value.dtype.name,
                num_bytes,
            )


def _place(value: Any) -> int:
    """Where its elements begin, if Python can see that."""
    if "CPU" in value.device:
        with contextlib.suppress(ValueError):  # 16 bits have no buffer.
            return np.asarray(memoryview(value)).ctypes.data
    return 0
