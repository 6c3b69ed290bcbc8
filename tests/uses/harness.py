"""Runs a use plainly or under options, and gives what came of it.

A use is a function of a `Trainer`: it makes a model, calls `trainer.fit` as
it would call `model.fit`, and returns the model.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from reference import state

import kmem

# The short form of every option, as a person writes it.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "microbatches": {"microbatches": 3},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "mixed_precision": {"mixed_precision": "bfloat16"},
    "remat": {"remat": "auto"},
    "dtr": {"dtr": True},
    "memory_budget": {"memory_budget": "8GB"},
    "sharding": {"sharding": "full"},
    "chunked_loss": {"chunked_loss": True},
    "chunked_attention": {"chunked_attention": True},
}
# Of the largest entry of each array: in 64 bits nothing but the order of
# additions may differ.
ROUNDING = 1e-8
# Of a history: some of Keras's own metrics count in 32 bits.
LOG_ROUNDING = 1e-4
# Of a loss that is computed in bfloat16.
HALF_ROUNDING = 0.05


@dataclasses.dataclass(frozen=True)
class Result:
    """What training left.

    Attributes:
        state: The values of the weights and of the optimizer's variables.
        logs: The histories of all calls of `fit`, one after another.
    """

    state: list[np.ndarray]
    logs: dict[str, list[float]]


class Trainer:
    """Calls `fit` for a use.

    Args:
        options: Memory options; `None` for Keras alone.
        folder: An empty folder.
        accumulated: How many of its batches a use must give for a batch.
    """

    def __init__(self, options, folder, accumulated: int = 1):
        self._options = options
        self.folder = folder
        self.batch_size = 20 // accumulated
        self.num_calls = accumulated
        self.logs: dict[str, list[float]] = {}

    def fit(self, model, *args, **kwargs) -> None:
        defaults = {"epochs": 2, "shuffle": False, "verbose": 0}
        if args and isinstance(args[0], (np.ndarray, list, tuple, dict)):
            defaults["batch_size"] = self.batch_size
        kwargs = defaults | kwargs
        if self._options is not None:
            kmem.wrap(model)
            kwargs |= self._options
        history = model.fit(*args, **kwargs)
        for name, values in history.history.items():
            self.logs.setdefault(name, []).extend(values)

    def train_on_batch(self, model, x, y) -> None:
        if self._options is not None:
            kmem.wrap(model)
            model.memory_options = kmem.MemoryOptions(**self._options)
        for first in range(0, len(x), self.batch_size):
            last = first + self.batch_size
            model.train_on_batch(x[first:last], y[first:last])
        if self._options is not None:
            model.memory_options = None


def run(
    use: Callable, option: str | None, folder, classifies: bool = False
) -> Result:
    """Runs a use from its start, in 64 bits unless the option is about 16.

    Args:
        use: The function.
        option: A key of `OPTIONS`; `None` for Keras alone.
        folder: An empty folder.
        classifies: Whether its outputs are to be logits of classes.
    """
    options = None if option is None else OPTIONS[option]
    steps = (options or {}).get("gradient_accumulation_steps", 1)
    precision = "float32" if option == "mixed_precision" else "float64"
    with (
        in_precision(getattr(use, "precision", precision)),
        classifying() if classifies else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        trainer = Trainer(options, folder, steps)
        # As a test would be that compares Keras with itself.
        warnings.filterwarnings("error", "Memory options had no effect")
        model = use(trainer)
        return Result(state(model), trainer.logs)


@contextlib.contextmanager
def in_precision(name: str):
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@contextlib.contextmanager
def classifying():
    """Within, models are compiled with a cross-entropy in the place of a mean
    error, and without metrics, which would be of numbers."""
    # Keras compiles what it loads if nobody overrides it.
    owner = next(k for k in keras.Model.__mro__ if "compile" in vars(k))
    keras_compile = owner.compile

    def compile_(model, *args, loss=None, **kwargs):
        kwargs |= dict.fromkeys(("metrics", "weighted_metrics"))
        if loss in ("mse", "mae"):
            loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        return keras_compile(model, *args, loss=loss, **kwargs)

    owner.compile = compile_
    try:
        yield
    finally:
        owner.compile = keras_compile


def in_32_bits(use):
    """Marks a use that has no meaning in 64 bits."""
    use.precision = "float32"
    return use
