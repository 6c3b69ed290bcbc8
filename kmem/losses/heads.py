"""Finds the layer that makes a model's logits.

It is the last one of a Functional or Sequential model: a `Dense` layer or a
`ReversibleEmbedding` that is called with `reverse=True`, followed by nothing
but a softmax. What this module does not do: look into a `call` that somebody
wrote.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.base.patching import Context

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

    @property
    def transposed(self) -> bool:
        """Whether the weight is `(classes, features)`."""
        return self.is_reversed and self.layer.tie_weights

    @property
    def weight(self) -> Any:
        """The weight of the moment, a tensor."""
        layer = self.layer
        if not self.is_reversed:
            return tf.convert_to_tensor(layer.kernel)
        tied = layer.tie_weights
        return tf.convert_to_tensor(
            layer.embeddings if tied else layer.reverse_embeddings
        )

    @property
    def bias(self) -> Any:
        """The bias of the moment, a tensor, or `None`."""
        bias = getattr(self.layer, "bias", None)
        return None if bias is None else tf.convert_to_tensor(bias)

    @property
    def num_classes(self) -> int:
        """How many logits a token has."""
        return self.layer.input_dim if self.is_reversed else self.layer.units

    @property
    def soft_cap(self) -> float | None:
        """What bounds the logits; see `kmem.losses.chunks.Form`."""
        return getattr(self.layer, "logit_soft_cap", None)

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
        return patching.together(self._changes())

    def _changes(self) -> Iterator[Context]:
        # Another tensor, which has another mask.
        def pass_on(call):
            return lambda inputs, *args, **kwargs: tf.identity(inputs)

        def pass_if_reversed(call):
            def run(inputs, reverse=False, **kwargs):
                if reverse:
                    return tf.identity(inputs)
                return call(inputs, **kwargs)

            return run

        change = pass_if_reversed if self.is_reversed else pass_on
        yield patching.method(self.layer, "call", change)
        for layer in self.after:
            yield patching.method(layer, "call", pass_on)


def of(model: keras.Model) -> Head:
    """Finds a model's head.

    Raises:
        ValueError: If there is none that can be computed in chunks.
    """
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
    after: list[Any] = []
    while True:
        node = _maker(functional, outputs[0])
        layer = None if node is None else node.operation
        inner = layer is not None and private_keras.functional_of(layer)
        if inner:
            functional, outputs = inner, keras.tree.flatten(inner.outputs)
            if len(outputs) != 1:
                break
            continue
        if _is_softmax(layer) and not after:
            after.append(layer)
            outputs = private_keras.tensors_into(node)
            continue
        if layer is not None and _is_head(layer, node, after):
            return _checked(Head, layer, tuple(after))
        break
    raise ValueError(
        "`chunked_loss` needs a model that ends with a `Dense` layer (with no "
        "activation or a softmax) or with `ReversibleEmbedding(reverse=True)`, "
        f"whose logits nothing else reads. {_INSTEAD}. Received: a model that "
        f"ends with {getattr(layer, 'name', None)} ({type(layer).__name__})"
    )


def _maker(functional, tensor):
    """The call that makes a tensor, if nothing else reads what it makes."""
    nodes = private_keras.nodes_of(functional)
    readers = [
        node
        for node in nodes
        if any(each is tensor for each in private_keras.tensors_into(node))
    ]
    makers = [
        node
        for node in nodes
        if any(each is tensor for each in private_keras.tensors_of(node))
    ]
    is_output = any(
        each is tensor for each in keras.tree.flatten(functional.outputs)
    )
    if len(makers) != 1 or len(readers) + is_output != 1:
        return None
    (maker,) = makers
    calls = [each for each in nodes if each.operation is maker.operation]
    reverses = [each for each in calls if _reverses(each)]
    return maker if len(reverses or calls) == 1 else None


def _reverses(node) -> bool:
    return bool(private_keras.keywords_of(node).get("reverse"))


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


def _checked(make, layer, after) -> Head:
    quantized = getattr(layer, "quantization_mode", None)
    if quantized or layer.activity_regularizer is not None:
        raise ValueError(
            "`chunked_loss` needs a last layer without quantization and "
            f"without an activity regularizer. {_INSTEAD}. Received: "
            f"layer={layer.name}, quantization_mode={quantized}"
        )
    is_reversed = not isinstance(layer, keras.layers.Dense)
    activation = None if is_reversed else layer.activation
    is_softmax = bool(after) or activation is keras.activations.softmax
    return make(layer, after, is_softmax, is_reversed)
