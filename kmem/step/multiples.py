"""Whether a step hands on its gradients, or multiples of them.

The gradient of a batch is made of its parts', and of several processes'. So
what a `train_step` does to a gradient has to be the same before and after a
sum: it may multiply it by a number that is the same for all parts. A norm to
clip by, a sign or noise is not of the batch but of each part. What this module
does not do: tell apart what is neither a tape's gradient nor a short sum or
product of them, which is refused; look into eager steps, where a gradient has
to be the tape's own.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.graph import fusion

# What is linear in its first input; other inputs are places and sizes.
_SAME = frozenset(
    "Identity Cast CheckNumerics EnsureShape Neg StopGradient PreventGradient "
    "Reshape UnsortedSegmentSum".split()
)
_SUMS = frozenset("Add AddV2 AddN Sub".split())
# The kinds of operations that draw numbers.
RANDOM = re.compile(
    "Random|Multinomial|StandardNormal|TruncatedNormal|StatefulUniform|"
    "NonDeterministic|Sampler"
)
_QUOTIENTS = frozenset("RealDiv Div DivNoNan".split())


class Given:
    """The gradients that tapes gave this thread.

    Args:
        refuse: Raises an error, once variables are differentiated again:
            somewhere else, or another loss.
        see: Takes what variables are differentiated for.
    """

    def __init__(self, refuse: Callable[[], None], see: Callable[[Any], None]):
        # By their ids, which last as long as they do.
        self._tensors: dict[int, Any] = {}
        self._refuse = refuse
        self._see = see
        self._is_within = self._has_been = False

    def recording(self) -> patching.Context:
        """Within, gradients are taken note of."""

        def call(gradient, tape, target, sources, *args, **kwargs):
            compute = functools.partial(gradient, tape, target, sources)
            # What is computed again has tapes of its own.
            if self._is_within:
                return compute(*args, **kwargs)
            kinds = keras.Variable | tf.Variable
            if any(isinstance(x, kinds) for x in tf.nest.flatten(sources)):
                if self._has_been:
                    self._refuse()
                self._has_been = True
                self._see(target)
            self._is_within = True
            try:
                result = compute(*args, **kwargs)
            finally:
                self._is_within = False
            for each in tf.nest.flatten(result, expand_composites=True):
                self._tensors[id(each)] = each
            return result

        return patching.method(tf.GradientTape, "gradient", call)

    def include(self, gradient) -> bool:
        """Whether it is a multiple of what was given, or `None`."""
        if gradient is None or id(gradient) in self._tensors:
            return True
        if isinstance(gradient, tf.IndexedSlices):
            return self.include(gradient.values)
        if not tf.is_symbolic_tensor(gradient):
            return False
        kind, inputs = gradient.op.type, gradient.op.inputs
        if kind in _SUMS:
            return all(map(self.include, inputs))
        if kind in _SAME:
            return self.include(inputs[0])
        pairs = [inputs] if kind in _QUOTIENTS else []
        if kind == "Mul":
            pairs = [inputs, reversed(inputs)]
        return any(self.include(one) and _is_same(x) for one, x in pairs)


def _is_same(tensor: tf.Tensor) -> bool:
    """Whether a number is the same for all parts: made of variables and
    constants alone, and not by chance."""
    return not any(
        RANDOM.search(op.type)
        # A graph's input, if it is no variable.
        or (op.type == "Placeholder" and op.outputs[0].dtype != tf.resource)
        for op in fusion.makers(tensor)
    )
