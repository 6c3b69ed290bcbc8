"""Computes and traces the losses of levels, which are functions of the user's.

Keras divides a mean by the number of replicas, so that a sum over them is the
mean; here it is the mean over a replica's rows that counts, however it was
made.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from kmem import batches
from kmem import capture
from kmem import loss_terms


class _Means:
    """Reduces as Keras does, and takes back its division by replicas."""

    def reduced(self, values, sample_weight, mask, reduction, dtype):
        loss: Any = _reduce(values, sample_weight, mask, reduction, dtype)
        was_divided = reduction not in (None, "none", "sum")
        if was_divided and len(values.shape) > 0:
            loss = keras_loss.unscale_loss_for_distribution(loss)
        return loss


# As loss_terms.py does: what Keras itself calls is hooked.
_reduce = keras_loss.reduce_weighted_values
_means: Any = _Means()


@contextlib.contextmanager
def giving_32_bits(models: list) -> Iterator[None]:
    """Lets models that compute in 16 bits give float32, which a loss mixes."""

    def casting(model):
        call = model.call

        @functools.wraps(call)
        def cast(*args, **kwargs):
            return keras.tree.map_structure(_in_32_bits, call(*args, **kwargs))

        return cast

    with contextlib.ExitStack() as stack:
        for model in models:
            change = capture.attribute(model, "call", casting(model))
            stack.enter_context(change)
        yield


def value(loss: Callable, arguments: tuple) -> tf.Tensor:
    """What a loss is, in 32 bits at least."""
    with loss_terms.recording(_means):
        return _in_32_bits(tf.convert_to_tensor(loss(*arguments)))


@contextlib.contextmanager
def noting_calls(models: list, calls: list[tuple]) -> Iterator[None]:
    """Notes the first call of each model, and what it is given.

    Args:
        models: The models.
        calls: Where pairs are put: a model, and its inputs' types.
    """

    def noting(model):
        call = model.call

        @functools.wraps(call)
        def noted(inputs, *args, **kwargs):
            if all(other is not model for other, _ in calls):
                calls.append((model, batches.specs_of(inputs)))
            return call(inputs, *args, **kwargs)

        return noted

    with contextlib.ExitStack() as stack:
        for model in models:
            change = capture.attribute(model, "call", noting(model))
            stack.enter_context(change)
        yield


def trace(function: Callable, batch: Any) -> None:
    """Traces a function of a batch, of which only the shapes are used."""
    specs = keras.tree.map_structure(
        lambda t: t if isinstance(t, tf.TypeSpec) else _spec(t), batch
    )
    tf.function(function, autograph=False).get_concrete_function(specs)


def _in_32_bits(tensor):
    if tf.is_tensor(tensor) and tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tensor, tf.float32)
    return tensor


def _spec(leaf) -> tf.TypeSpec:
    return tf.type_spec_from_value(tf.convert_to_tensor(leaf))
