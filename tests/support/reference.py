"""Training the same model twice, and comparing what came of it."""

import functools

import keras
import numpy as np

import kmem

# What cases in float64 differ by, of which some are masked: before 3.15 Keras
# counts in 32 bits what a mask leaves.
_VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
ROUNDING = 1e-12 if _VERSION >= (3, 15) else 1e-7


@functools.cache
def whole(case, precision="float64", mode="graph", batch_size=20):
    """Trains a case on whole batches; returns its state and its history."""
    model, history = train(case, precision, mode, batch_size=batch_size)
    return state(model), history


MODES = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
}


def train(case, precision="float64", mode="graph", **options):
    """Trains a case from its start; returns the model and its history.

    Args:
        case: A function that returns a compiled model and the arguments of
            its `fit`.
        precision: Keras's `floatx`.
        mode: How the model runs, a key of `MODES`.
        **options: Changes the arguments of `fit`.
    """
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(precision)
    keras.config.set_dtype_policy(precision)
    try:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model, arguments = case()
        for name, value in MODES[mode].items():
            setattr(model, name, value)
        arguments = {"shuffle": False, "verbose": 0, "epochs": 2} | arguments
        history = kmem.wrap(model).fit(**(arguments | options))
        return model, history.history
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def relative_error(got, want):
    """The largest difference of two states, relative to each one's largest
    entry."""
    return max(
        np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-3)
        for a, b in zip(got, want, strict=True)
    )


def state(model):
    """The values of a model's weights and of its optimizer's."""
    optimizer = model.optimizer
    values = model.get_weights() + [v.numpy() for v in optimizer.variables]
    return [np.asarray(value, "float64") for value in values if np.size(value)]


def log_error(got, want):
    """The largest relative difference of two histories."""
    assert got.keys() == want.keys()
    return max(
        np.max(np.abs(np.subtract(got[key], want[key])))
        / max(np.max(np.abs(want[key])), 1e-3)
        for key in want
    )
