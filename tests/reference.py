"""Training the same model twice, and comparing what came of it."""

import keras
import numpy as np

import kmem


def train(case, precision="float64", compile_options=None, **options):
    """Trains a case from its start; returns the model and its history.

    Args:
        case: A function that returns a compiled model and the arguments of
            its `fit`.
        precision: Keras's `floatx`.
        compile_options: What to set on the model after compiling:
            `run_eagerly` or `jit_compile`.
        **options: Changes the arguments of `fit`.
    """
    before = keras.config.floatx()
    keras.config.set_floatx(precision)
    try:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model, arguments = case()
        for name, value in (compile_options or {}).items():
            setattr(model, name, value)
        arguments = {"shuffle": False, "verbose": 0, "epochs": 2} | arguments
        history = kmem.wrap(model).fit(**(arguments | options))
        return model, history.history
    finally:
        keras.config.set_floatx(before)


def relative_error(got, want):
    """The largest difference of two models' weights and optimizer states,
    relative to the largest entry of each."""
    pairs = zip(state(got), state(want), strict=True)
    return max(
        np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-3) for a, b in pairs
    )


def state(model):
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
