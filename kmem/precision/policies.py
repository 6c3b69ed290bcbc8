"""Gives the layers of a model mixed policies, and their own ones back.

Within `applied` a layer computes in 16 bits from float32 variables; on leaving
it has the very policy object it had before, so what callbacks see and save is
a plain float32 model. What this module does not do: it sees layers only. Code
in a `train_step` or a `compute_loss` gets 16-bit predictions and must cast by
itself.
"""

import contextlib
import difflib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from kmem.base import private_keras
from kmem.base.patching import attribute
from kmem.base.patching import call_of
from kmem.base.private_keras import all_layers
from kmem.options import MixedPrecision
from kmem.precision import guards

_lock = threading.RLock()
_entries: "weakref.WeakKeyDictionary[keras.Model, _Entry]" = (
    weakref.WeakKeyDictionary()
)
# Inside a graph Keras casts what these are given, integers as well, to what
# they compute in: values and ids would be rounded. What they give is float32
# in any policy.
_FLOAT32_ANYWAY = (
    keras.layers.CategoryEncoding,
    keras.layers.Discretization,
    keras.layers.Normalization,
)


@contextlib.contextmanager
def applied(
    model: keras.Model, option: MixedPrecision | None
) -> Iterator[None]:
    """Lets a model compute in 16 bits.

    Meant to be entered by a training step while it is traced, or on every
    step in eager mode. Entering again for the same model is counted, in any
    order and from any thread: replicas trace a step in turns.

    Within, calling the model raises a `ValueError` that names the layer if
    ids would be rounded, or if a layer's own code mixes dtypes.

    Args:
        model: A model with float32 layers. Layers that compute in 16 bits
            already stay as they are.
        option: What to compute in, and which layers to leave out; with a
            layer, its sublayers are left out. `None` changes nothing.

    Raises:
        ValueError: If a layer is float64 or quantized in a way that Keras does
            not compute in `option.dtype`, if `exclude` names no layer of the
            model, or if another option is applied to the model. Nothing has
            been changed then.
    """
    if option is None:
        yield
        return
    with _lock:
        entry = _entries.get(model)
        if entry is None:
            entry = _entries[model] = _Entry(model, option)
        elif entry.option != option:
            raise ValueError(
                "`mixed_precision` must be the same for all steps of a model "
                f"that run at one time. Received: {option} while "
                f"{entry.option} is applied to model '{model.name}'"
            )
        entry.count += 1
    try:
        yield
    finally:
        with _lock:
            entry.count -= 1
            if not entry.count:
                del _entries[model]
                entry.undo(model)


class _Policy(keras.DTypePolicy):
    """A layer's policy for the time being.

    Attributes:
        replaced: The policy that comes back.
        entry: Who put this one in its place.
        quantization_mode: That of the layer, which stays what it is.
    """

    quantization_mode: Any = None

    def __init__(self, layer, entry):
        super().__init__(f"mixed_{entry.option.dtype}")
        self.replaced = getattr(layer, private_keras.DTYPE_POLICY)
        self.entry = entry
        self.quantization_mode = layer.quantization_mode

    def convert_input(self, x, autocast, dtype):
        converted = super().convert_input(x, autocast, dtype)
        guards.mark_rounded(converted, x)
        return converted


class _Entry:
    """What is changed in one model, and how to undo it."""

    def __init__(self, model, option):
        self.option = option
        self.count = 0
        self._changes = contextlib.ExitStack()
        layers = all_layers(model)
        excluded = _excluded(layers, option)
        _refuse_other_policies(layers, excluded, option.dtype)
        for layer in layers:
            left_out = layer in excluded
            if layer.compute_dtype == "float32" and not left_out:
                # The public setter would lose the order and the patterns of
                # the keys of a `DTypePolicyMap`.
                name, policy = private_keras.DTYPE_POLICY, _Policy(layer, self)
                self._changes.enter_context(attribute(layer, name, policy))
            if layer is model or left_out or guards.concern(layer):
                name = call_of(layer)
                call = guards.guarded(layer, name, option, left_out)
                self._changes.enter_context(attribute(layer, name, call))

        adder = getattr(model, private_keras.ADD_PENALTY)

        # Keras adds penalties of activations up in the dtype of the first
        # loss, and ends in an error where another one differs.
        def add_up(loss):
            return adder(keras.ops.cast(loss, "float32"))

        change = attribute(model, private_keras.ADD_PENALTY, add_up)
        self._changes.enter_context(change)

    def undo(self, model):
        self._changes.close()
        # A layer that was made meanwhile may have taken the policy of the
        # layer around it, as those inside `MultiHeadAttention` do.
        for layer in all_layers(model):
            policy = getattr(layer, private_keras.DTYPE_POLICY)
            if isinstance(policy, _Policy) and policy.entry is self:
                name = private_keras.DTYPE_POLICY
                object.__setattr__(layer, name, policy.replaced)


def _excluded(layers, option) -> set:
    names = {layer.name for layer in layers}
    for name in option.exclude:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0)
            raise ValueError(
                "`exclude` must name layers of the model. "
                f"Did you mean {near[0]!r}? Received: {name!r}"
            )
    chosen = [
        layer
        for layer in layers
        if layer.name in option.exclude or isinstance(layer, _FLOAT32_ANYWAY)
    ]
    return {inner for layer in chosen for inner in all_layers(layer)}


def _refuse_other_policies(layers, excluded, dtype):
    # Sums of products of two integers of 8 bits are too large for float16.
    quantized = [None, "int4", *(["int8"] if dtype == "bfloat16" else [])]
    refused = [
        f"'{layer.name}' ({layer.quantization_mode or layer.compute_dtype})"
        for layer in layers
        if layer not in excluded
        and (
            layer.quantization_mode not in quantized
            or layer.compute_dtype == "float64"
        )
    ]
    if refused:
        raise ValueError(
            "`mixed_precision` needs layers of float32, quantized to int4, or "
            "for bfloat16 to int8, or not at all; leave the others out with "
            "`kmem.MixedPrecision(..., exclude=(...))`. Received: "
            + ", ".join(refused)
        )
