"""What steps change, kept outside of the device and given back."""

import contextlib
import gc
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

_RESTORE_ATTEMPTS = 3


class Reader:
    """Reads variables again and again, all of them in one call."""

    def __init__(self, variables: list):
        self.variables = variables
        self._read = tf.function(
            lambda: [tf.convert_to_tensor(v) for v in variables],
            autograph=False,
        )
        self._arrays: list[np.ndarray] = []

    def reads(self, variables: list) -> bool:
        """Whether it reads these."""
        return [*map(id, self.variables)] == [*map(id, variables)]

    def read(self) -> list[np.ndarray]:
        """Their values, outside of the device, until they are read again.

        In the same arrays: new memory would take longer than to copy.
        """
        tensors = self._read()
        if not self._arrays:
            # Of a number `numpy` gives no array.
            self._arrays = [np.array(tensor.numpy()) for tensor in tensors]
            return self._arrays
        for array, tensor in zip(self._arrays, tensors, strict=True):
            plain = array.dtype.isbuiltin == 1 and not array.dtype.hasobject
            if plain and array.size:
                # Without a copy in between.
                source = np.frombuffer(memoryview(tensor), array.dtype)
                array.reshape(-1)[:] = source
            else:
                array[...] = tensor.numpy()
        return self._arrays


class State:
    """What steps change, as it is now, kept outside of the device.

    Args:
        variables: What they may change, or what reads that.
        metrics: Those that may make variables of their own.
    """

    def __init__(self, variables: list | Reader, metrics: list):
        if isinstance(variables, Reader):
            values = zip(variables.variables, variables.read(), strict=True)
        else:
            values = ((v, v.numpy()) for v in variables)
        self._values = list(values)
        self._metrics = metrics

    def restore(self) -> None:
        """Gives it back.

        That takes memory as well, which may be short for a moment.
        """
        for _ in range(_RESTORE_ATTEMPTS - 1):
            try:
                return self._restore()
            except tf.errors.ResourceExhaustedError:
                gc.collect()
        self._restore()

    def _restore(self) -> None:
        known = {id(variable) for variable, _ in self._values}
        for variable, value in self._values:
            # Not the array itself: a variable may take over its memory, which
            # is not the device's.
            variable.assign(tf.raw_ops.DeepCopy(x=value))
        for metric in self._metrics:
            # Those that the step has made.
            if any(id(variable) not in known for variable in metric.variables):
                metric.reset_state()


@contextlib.contextmanager
def unchanged(variables: list, metrics: list) -> Iterator[None]:
    """Gives back what steps change in a block of code; see `State`."""
    state = State(variables, metrics)
    try:
        yield
    finally:
        state.restore()
