"""Backward passes that let go of their gradients where they fail.

TensorFlow never frees the gradients that wait for their turn when a backward
pass ends with an error, as it does where memory runs out; and it goes on after
a sum of gradients that has failed. Here a pass that has failed goes on to its
end, where its error is raised, and runs nothing more.

What it does not do: change a pass that does not fail, or one that runs outside
of `freed_on_failure`.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

from kmem.base import private_tf
from kmem.base.patching import Context
from kmem.base.patching import attribute
from kmem.base.patching import setting
from kmem.base.patching import together

_plain_pass = private_tf.imperative_grad.imperative_grad
_plain_record_operation = private_tf.record.record_operation


# The error of the backward pass that runs here, once there is one; `None` where
# none runs. One within another has its own.
_errors: contextvars.ContextVar[list[BaseException] | None] = (
    contextvars.ContextVar("errors", default=None)
)


def freed_on_failure() -> Context:
    """Backward passes within free their gradients also if they fail."""
    _register()
    changes = (
        attribute(private_tf.imperative_grad, "imperative_grad", _run_pass),
        attribute(private_tf.record, "record_operation", _record_operation),
    )
    return together(changes)


@functools.cache
def _register() -> None:
    """Once and for all: it must not happen while a backward pass runs."""
    zeros = functools.partial(_unless_failed, None, private_tf.zero_gradients)
    private_tf.register_gradients(_gradient, _sum, zeros)


def _run_pass(*args, **kwargs):
    errors: list[BaseException] = []
    try:
        with setting(_errors, errors):
            found = _plain_pass(*args, **kwargs)
        if errors:
            raise errors[0]
        return found
    finally:
        errors.clear()  # The tracebacks hold this list.


def _gradient(name, attributes, num_inputs, *args):
    compute = private_tf.gradient_of_operation
    nothing = [None] * num_inputs
    return _unless_failed(nothing, compute, name, attributes, num_inputs, *args)


def _record_operation(
    op_type,
    output_tensors,
    input_tensors,
    backward_function,
    forward_function=None,
):
    nothing = [None] * len(input_tensors)

    def backward(*gradients):
        return _unless_failed(nothing, backward_function, *gradients)

    _plain_record_operation(
        op_type, output_tensors, input_tensors, backward, forward_function
    )


def _sum(gradients):
    return _unless_failed(gradients[0], private_tf.sum_of_gradients, gradients)


def _unless_failed(nothing: Any, call: Callable, *args) -> Any:
    errors = _errors.get()
    if errors is None:
        return call(*args)
    if not errors:
        try:
            return call(*args)
        except BaseException as error:
            errors.append(error)
    return nothing
