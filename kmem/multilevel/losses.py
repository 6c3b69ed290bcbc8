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

from kmem.step import batches
from kmem.step import loss_terms
from kmem.step import patching


@contextlib.contextmanager
def giving_32_bits(models: list) -> Iterator[None]:
    """Lets models that compute in 16 bits give float32, which a loss mixes."""

    def casting(model, call):
        @functools.wraps(call)
        def cast(*args, **kwargs):
            return keras.tree.map_structure(_in_32_bits, call(*args, **kwargs))

        return cast

    with _calls_replaced(models, casting):
        yield


def value(loss: Callable, arguments: tuple, name: str) -> tf.Tensor:
    """What the loss of a level is, in 32 bits at least.

    Raises:
        ValueError: If that is no scalar.
    """
    means: Any = loss_terms.Means()
    with loss_terms.recording(means):
        found = loss(*arguments)
    is_number = isinstance(found, int | float) or keras.ops.is_tensor(found)
    shape = tf.convert_to_tensor(found).shape if is_number else None
    if shape is None or shape.rank != 0:
        what = type(found).__name__ if shape is None else f"shape {shape}"
        raise ValueError(
            "A level's loss must return a scalar, the mean over the batch's "
            "rows: add up several losses, and end with `keras.ops.mean`. "
            f"Received: level '{name}' with a loss of {what}"
        )
    return _in_32_bits(tf.convert_to_tensor(found))


@contextlib.contextmanager
def noting_calls(models: list, calls: list[tuple]) -> Iterator[None]:
    """Notes the first call of each model, and what it is given.

    Args:
        models: The models.
        calls: Where pairs are put: a model, and its inputs' types.
    """

    def noting(model, call):
        @functools.wraps(call)
        def noted(inputs, *args, **kwargs):
            if all(other is not model for other, _ in calls):
                calls.append((model, batches.specs_of(inputs)))
            return call(inputs, *args, **kwargs)

        return noted

    with _calls_replaced(models, noting):
        yield


def trace(function: Callable, batch: Any) -> None:
    """Traces a function of a batch, of which only the shapes are used."""
    specs = keras.tree.map_structure(
        lambda t: t if isinstance(t, tf.TypeSpec) else _spec(t), batch
    )
    tf.function(function, autograph=False).get_concrete_function(specs)


@contextlib.contextmanager
def _calls_replaced(models: list, replacement: Callable) -> Iterator[None]:
    """Within, each model's `call` is what `replacement` makes of both."""
    with contextlib.ExitStack() as stack:
        for model in models:
            call = functools.partial(replacement, model)
            stack.enter_context(patching.method(model, "call", call))
        yield


def _in_32_bits(tensor):
    if tf.is_tensor(tensor) and tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tensor, tf.float32)
    return tensor


def _spec(leaf) -> tf.TypeSpec:
    return tf.type_spec_from_value(tf.convert_to_tensor(leaf))
