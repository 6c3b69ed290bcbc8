"""What a step needs in memory, however busy the machine is."""

import gc

import keras
from tensorflow.python.eager import context

import kmem

_NUM_STEPS = 6


def in_one_order():
    """Within it a graph's operations run one by one, in one order each time.

    So a step's peak is the same each time, and two peaks can be compared. It
    is not for graphs with loops, which TensorFlow refuses to run so.
    """
    return context.function_executor_type("SINGLE_THREADED_EXECUTOR")


def least_peak_bytes(step, *arguments) -> int:
    """The least that a step took above what was held, of a few steps.

    A graph's operations end in another order each time, and a thread that is
    kept waiting holds a result for longer: a step may take more than it needs,
    and never less.

    Args:
        step: A function that takes no lasting memory after its first run.
        *arguments: What it is given.
    """
    return min(peaks_bytes(step, *arguments))


def peaks_bytes(step, *arguments) -> list[int]:
    """What each of a few steps took, as `least_peak_bytes`."""
    step(*arguments)
    gc.collect()
    peaks = []
    for _ in range(_NUM_STEPS):
        with kmem.memory.track("CPU") as usage:
            step(*arguments)
        peaks.append(usage.peak_bytes - usage.start_bytes)
    return peaks


def program_peaks(program, data, num_steps, **options) -> list[int]:
    """The peak of each step of a `fit` of all levels on the same data."""
    peaks = Peaks()
    program.fit(
        {level.name: data for level in program.levels},
        steps_per_epoch=num_steps,
        verbose=0,
        callbacks=[peaks],
        **options,
    )
    return peaks.found


class Peaks(keras.callbacks.Callback):
    """The device's peak in each step of `fit`, with what is held."""

    def __init__(self):
        super().__init__()
        self.found: list[int] = []

    def on_train_batch_begin(self, batch, logs=None):
        kmem.memory.reset_peak()

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(kmem.memory.peak())
