"""`chunked_attention`: the attention of a model, for some queries at a time.

While a step runs Keras's attention layers, and what calls
`keras.ops.dot_product_attention`, compute by `blocks`. The masks of padding are
not multiplied out over pairs of a query and a key, as Keras does. Where
attention drops, other numbers are drawn than without the option, of the same
layer's seed. What this module does not do: layers that compute scores of their
own, attention with a bias, and scores that are asked for. They stay as they
are.
"""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.attention import blocks
from kmem.base import patching
from kmem.base import private_keras
from kmem.step.mechanism import Mechanism

# As they are at import: what is put in their place later is not Keras's.
_OWN = tuple(
    getattr(kind, private_keras.COMPUTE_ATTENTION)
    for kind in (
        keras.layers.MultiHeadAttention,
        keras.layers.GroupQueryAttention,
    )
)
_warned: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A mask that is not multiplied out.

    Attributes:
        parts: Masks that broadcast to `(batch, queries, keys)`.
        causal: Whether it is causal besides.
        whole: Makes what Keras makes.
    """

    parts: tuple[tf.Tensor, ...]
    causal: bool
    whole: Callable


def draws_nothing(model: keras.Model) -> bool:
    """Whether a model has attention that chunks change by rounding alone."""
    layers = private_keras.all_layers(model)
    own = [layer for layer in layers if _is_keras_own(layer)]
    if any(private_keras.attention_dropout(layer).rate for layer in own):
        return False
    return bool(own) or any(map(private_keras.fused_attention, layers))


class ChunkedAttention(Mechanism):
    """Changes how attention is computed.

    Attributes:
        has_effect: Whether it has, in what was traced.
    """

    kinds = ("train", "test")

    def __init__(self, model: keras.Model):
        self._model = model
        self.has_effect = False

    def computing(self, training: bool) -> patching.Context:
        return patching.together(self._changes())

    def _changes(self) -> Iterator[patching.Context]:
        for layer in private_keras.all_layers(self._model):
            if _is_keras_own(layer):
                replacements = {
                    private_keras.ATTENTION_MASK: self._masking,
                    private_keras.COMPUTE_ATTENTION: self._computing,
                }
                for name, make in replacements.items():
                    change = functools.partial(make, layer)
                    yield patching.method(layer, name, change)
            fused = private_keras.fused_attention(layer)
            if fused is not None:
                yield patching.attribute(*fused, lambda: True)
        yield patching.method(
            private_keras.backend_nn, "dot_product_attention", self._calling
        )

    def warn(self) -> None:
        if not self.has_effect and self._model not in _warned:
            _warned.add(self._model)
            names = [
                f"{layer.name} ({type(layer).__name__})"
                for layer in private_keras.all_layers(self._model)
                if "Attention" in type(layer).__name__
            ]
            warnings.warn(
                "`chunked_attention` had no effect: it needs a model that "
                "calls `keras.layers.MultiHeadAttention`, "
                "`GroupQueryAttention` or `keras.ops.dot_product_attention`, "
                "and does not ask for scores. Leave it out. Received: "
                f"model={self._model.name}, with "
                f"{', '.join(names) or 'no layer of attention'}",
                stacklevel=1,
            )

    def _masking(
        self,
        layer,
        compute: Callable,
        query,
        value,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        use_causal_mask=False,
    ):
        """Stands for what multiplies masks out."""
        given = query_mask, value_mask, key_mask, attention_mask
        causal = use_causal_mask
        whole = functools.partial(compute, query, value, *given, causal)
        if private_keras.sliding_window(layer) is not None:
            return whole()
        every = slice(None)
        places = (every, every, None), (every, None), (every, None), (every,)
        parts = tuple(
            tf.cast(mask, tf.bool)[axes]
            for mask, axes in zip(given, places, strict=True)
            if mask is not None
        )
        if not parts and not causal:
            return None
        return _Mask(parts, causal, whole)

    def _computing(
        self,
        layer,
        compute: Callable,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
        use_causal_mask=False,
    ):
        """Stands for the attention of a layer."""
        mask, causal = attention_mask, use_causal_mask
        asked = return_attention_scores or private_keras.gives_scores(layer)
        if asked or len(query.shape) != 4:
            if isinstance(mask, _Mask):
                mask = mask.whole()
            extra = {"use_causal_mask": True} if causal else {}
            if isinstance(layer, keras.layers.MultiHeadAttention):
                extra["return_attention_scores"] = return_attention_scores
            return compute(query, key, value, mask, training, **extra)
        if isinstance(mask, _Mask):
            causal = causal or mask.causal
            parts = mask.parts
        else:
            parts = () if mask is None else (tf.cast(mask, tf.bool),)
        self.has_effect = True
        dropout, seed = private_keras.attention_dropout(layer), None
        if training and dropout.rate > 0:
            seed = tf.cast(dropout.seed_generator.next(), tf.int32)
        scores = blocks.Scores(
            scale=private_keras.attention_scale(layer),
            masks=tuple(map(_of_rank_4, parts)),
            causal=causal,
            rate=dropout.rate,
            seed=seed,
        )
        return blocks.attention(query, key, value, scores), None

    def _calling(
        self,
        compute: Callable,
        query,
        key,
        value,
        bias=None,
        mask=None,
        scale=None,
        is_causal=False,
        flash_attention=None,
        attn_logits_soft_cap=None,
    ):
        """Stands for Keras's function of attention."""
        tensors: list[Any] = [
            tf.convert_to_tensor(x) for x in (query, key, value)
        ]
        others = bias is not None, flash_attention, attn_logits_soft_cap
        if any(others) or len(query.shape) != 4:
            return compute(
                *(*tensors, bias, mask, scale, is_causal),
                *(flash_attention, attn_logits_soft_cap),
            )
        self.has_effect = True
        dtype = keras.backend.result_type(*(x.dtype for x in tensors))
        tensors = [tf.cast(each, dtype) for each in tensors]
        if scale is None:
            scale = tensors[1].shape[-1] ** -0.5
        masks = () if mask is None else (_of_rank_4(tf.cast(mask, tf.bool)),)
        scores = blocks.Scores(scale, masks, bool(is_causal))
        return blocks.attention(*tensors, scores=scores)


def _is_keras_own(layer) -> bool:
    """Whether a layer attends as Keras's own do."""
    name = private_keras.COMPUTE_ATTENTION
    return getattr(type(layer), name, None) in _OWN


def _of_rank_4(mask: tf.Tensor) -> Any:
    """`(batch, heads, queries, keys)`, with ones in front."""
    while len(mask.shape) < 4:
        mask = mask[:, None] if len(mask.shape) == 3 else mask[None]
    return mask
