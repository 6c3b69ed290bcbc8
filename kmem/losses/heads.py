"""Finds the layer that makes a model's logits.

It is the last one of a Functional or Sequential model: a `Dense` layer or a
`ReversibleEmbedding` that is called with `reverse=True`, followed by nothing
but a softmax. What this module does not do: look into a `call` that somebody
wrote.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.base.patching import Context
from kmem.base.patching import attribute
from kmem.base.patching import call_of

_INSTEAD = (
    "Leave `chunked_loss` out, or compute the loss with "
    "`kmem.losses.LinearCrossEntropy` in a layer or a `train_step`"
)


@dataclasses.dataclass(frozen=True)
class Head:
    """The layers that make a model's output of hidden states.

    Attributes:
        layer: What multiplies hidden states with a weight.
        after: The layers between its logits and the model's output.
        is_softmax: Whether the output is probabilities.
        is_reversed: Whether `layer` is an embedding.
    """

    layer: Any
    after: tuple[Any, ...]
    is_softmax: bool
    is_reversed: bool

    def weights(self) -> tuple[list[tf.Tensor], dict[str, Any]]:
        """Those of the moment that have a gradient, the bias last, and what
        `chunks.Form` has to know of the others."""
        layer, axis = self.layer, None
        bias = [] if getattr(layer, "bias", None) is None else [layer.bias]
        if layer.quantization_mode:
            trained, multiply = self._quantized()
        else:
            tied = self.is_reversed and layer.tie_weights
            name = "embeddings" if tied else "reverse_embeddings"
            weight = getattr(layer, name if self.is_reversed else "kernel")
            # One of LoRA is made of a frozen weight and of others.
            frozen = isinstance(weight, keras.Variable) and not weight.trainable
            trained = [] if frozen else [weight]
            fixed = self._as_called(weight) if frozen else None
            axis = None if frozen else int(not tied)

            def multiply(hidden, weight: Any = fixed):
                return tf.matmul(hidden, weight, transpose_b=tied)

        tensors = list(map(tf.convert_to_tensor, trained + bias))
        return tensors, {"multiply": multiply, "axis": axis}

    def _quantized(self) -> tuple[list, Callable]:
        """Of a layer that multiplies, and differentiates, itself."""
        layer = self.layer
        call = getattr(type(layer), call_of(layer))
        how = {"reverse": True} if self.is_reversed else {}
        variables = {
            name: each
            for name, each in vars(layer).items()
            if isinstance(each, keras.Variable) and name != "bias"
        }
        trained = [name for name, each in variables.items() if each.trainable]
        fixed = {n: self._as_called(each) for n, each in variables.items()}
        # What comes after the product is for who asks.
        fixed |= dict.fromkeys(("bias", "activation", "logit_soft_cap"))

        def multiply(hidden, *tensors):
            given = fixed | dict(zip(trained, tensors, strict=True))
            changes = (attribute(layer, *item) for item in given.items())
            with patching.together(changes):
                return call(layer, hidden, **how)

        return [variables[name] for name in trained], multiply

    def _as_called(self, variable) -> tf.Tensor:
        """A variable that is not trained as Keras casts it for a call."""
        value = tf.stop_gradient(tf.convert_to_tensor(variable))
        is_float = value.dtype.is_floating
        return tf.cast(value, self.compute_dtype) if is_float else value

    @property
    def num_classes(self) -> int:
        """How many logits a token has."""
        return self.layer.input_dim if self.is_reversed else self.layer.units

    @property
    def num_features(self) -> int:
        """How many numbers the hidden states of a token are."""
        if self.is_reversed:
            return self.layer.output_dim
        return self.layer.input_spec.axes[-1]

    @property
    def compute_dtype(self) -> str:
        """What the logits are computed in."""
        own = getattr(self.layer, "reverse_dtype", None)
        return keras.backend.standardize_dtype(own or self.layer.compute_dtype)

    def outputs(self, logits: tf.Tensor) -> Any:
        """What the model would give of logits."""
        for layer in self.after:
            if layer.compute_dtype != logits.dtype:
                logits = tf.cast(logits, layer.compute_dtype)
        return keras.activations.softmax(logits) if self.is_softmax else logits

    def passed(self) -> Context:
        """Within, the model gives hidden states in the place of logits."""

        # Another tensor, which has another mask.
        def pass_on(call, /, inputs, *args, **kwargs):
            return tf.identity(inputs)

        def pass_if_reversed(call, /, inputs, reverse=False, **kwargs):
            if reverse:
                return tf.identity(inputs)
            return call(inputs, **kwargs)

        change = pass_if_reversed if self.is_reversed else pass_on
        own = patching.method(self.layer, call_of(self.layer), change)
        after = [patching.method(each, "call", pass_on) for each in self.after]
        return patching.together([own, *after])


def of(model: keras.Model) -> Head:
    """Finds a model's head; a `ValueError` if there is none that can be
    computed in chunks."""
    functional = private_keras.functional_of(model)
    if functional is None:
        raise ValueError(
            "`chunked_loss` needs a Functional or Sequential model, whose last "
            f"layer can be found, and a model that is built. {_INSTEAD}. "
            f"Received: model={model.name} ({type(model).__name__})"
        )
    outputs = keras.tree.flatten(functional.outputs)
    if len(outputs) != 1:
        raise ValueError(
            f"`chunked_loss` needs a model with one output. {_INSTEAD}. "
            f"Received: model={model.name} with {len(outputs)} outputs"
        )
    layer: Any = None
    after: list[Any] = []
    while len(outputs) == 1:
        node = _maker(functional, outputs[0])
        layer = getattr(node, "operation", None)
        inner = layer is not None and private_keras.functional_of(layer)
        if inner:
            functional, outputs = inner, keras.tree.flatten(inner.outputs)
        elif _is_softmax(layer) and not after:
            after.append(layer)
            outputs = node.arguments.keras_tensors[:1]
        elif layer is not None and _is_head(layer, node, after):
            return _checked(layer, tuple(after))
        else:
            break
    raise ValueError(
        "`chunked_loss` needs a model that ends with a `Dense` layer (with no "
        "activation or a softmax) or with `ReversibleEmbedding(reverse=True)`, "
        f"whose logits nothing else reads. {_INSTEAD}. Received: a model that "
        f"ends with {getattr(layer, 'name', None)} ({type(layer).__name__})"
    )


def _maker(functional, tensor) -> Any:
    """The call that makes a tensor, if nothing else reads what it makes."""
    nodes = private_keras.nodes_of(functional)

    def among(tensors):
        return any(each is tensor for each in tensors)

    readers = [x for x in nodes if among(x.arguments.keras_tensors)]
    makers = [x for x in nodes if among(x.outputs)]
    is_output = among(keras.tree.flatten(functional.outputs))
    if len(makers) != 1 or len(readers) + is_output != 1:
        return None
    (maker,) = makers
    calls = [each for each in nodes if each.operation is maker.operation]
    reverses = [each for each in calls if _reverses(each)]
    return maker if len(reverses or calls) == 1 else None


def _reverses(node) -> bool:
    return bool(node.arguments.kwargs.get("reverse"))


def _is_softmax(layer) -> bool:
    """Whether a layer is a softmax over the classes, and nothing else."""
    if type(layer) is keras.layers.Softmax:
        return layer.axis in (-1, [-1])
    return type(layer) is keras.layers.Activation and (
        layer.activation is keras.activations.softmax
    )


def _is_head(layer, node, after) -> bool:
    if _reverses(node):
        return hasattr(layer, "tie_weights") and hasattr(layer, "embeddings")
    if type(layer) is not keras.layers.Dense:
        return False
    plain = keras.activations.linear, None
    softmax = () if after else (keras.activations.softmax,)
    return layer.activation in (*plain, *softmax)


def _checked(layer, after) -> Head:
    quantized = layer.quantization_mode
    known = quantized in (None, "int4", "int8")
    if not known or layer.activity_regularizer is not None:
        raise ValueError(
            "`chunked_loss` needs a last layer of float numbers, or quantized "
            f"to int8 or int4, without an activity regularizer. {_INSTEAD}. "
            f"Received: layer={layer.name}, quantization_mode={quantized}"
        )
    is_reversed = not isinstance(layer, keras.layers.Dense)
    activation = None if is_reversed else layer.activation
    is_softmax = bool(after) or activation is keras.activations.softmax
    return Head(layer, after, is_softmax, is_reversed)
