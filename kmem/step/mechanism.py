"""What one option changes of a model's training, and when.

A session (session.py) is a list of mechanisms, put together once from the
options. Each has a module of its own and says what it changes; what it does
not name it leaves as it is.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from kmem.base.patching import Context


class Mechanism:
    """One that changes nothing.

    Attributes:
        kinds: Of the model's functions (`"train"`, `"test"`, `"predict"`)
            those that compute differently.
        runs_eagerly: Whether its functions run operator by operator.
        between_steps: Whether it changes the model between steps, too, so
            that functions that were traced before cannot run.
    """

    kinds: tuple[str, ...] = ("train",)
    runs_eagerly = False
    between_steps = False

    def start(self) -> None:
        """Called before the model trains."""

    def stop(self, failed: bool = False) -> None:
        """Called when the model has trained, `failed` if an error ended it."""

    def stays(self, failed: bool) -> bool:
        """Whether the model is left changed when it has trained."""
        return False

    def wrapped(self, function: Callable) -> Callable:
        """A function of the model, which takes an iterator."""
        return function

    def take(self, step: Callable, data) -> Any:
        """Takes a training step: a function of a batch that returns logs."""
        return step(data)

    def computing(self, training: bool) -> Context:
        """Around the Python of a forward pass, and of the backward pass."""
        return contextlib.nullcontext()

    def warn(self) -> None:
        """Says, once, what a user who trains so should know, as far as the
        steps that were traced tell."""

    def updating(self) -> Context:
        """Around the Python of an update."""
        return contextlib.nullcontext()
