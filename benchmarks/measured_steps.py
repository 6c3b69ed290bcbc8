"""Steps of training in a process of its own, measured as they are asked for.

The script that makes a `Process` is started again with `--run` and the name of
one of its functions, which answers in lines of JSON.
"""

import json
import os
import re
import subprocess
import sys
import time


def answer(**result):
    print(json.dumps(result), flush=True)


def first_words(error):
    """The first line of an error that tells something."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    told = (x for x in lines if x and not x.startswith("Exception encoun"))
    words = f"{type(error).__name__}: {next(told, '')}".replace("|", "/")
    return words if len(words) <= 120 else words[:117] + "..."


def run(functions, name, *arguments):
    """Calls what a `Process` was made for; its answer may be an error."""
    try:
        {function.__name__: function for function in functions}[name](
            *arguments
        )
    except Exception as error:
        answer(error=first_words(error))


class Process:
    """The script in a process of its own, which answers when it is asked.

    It begins without being asked. Once it ends, the answer is an error.
    `python` is that of another environment, if it is given.
    """

    def __init__(self, function, *arguments, python=None):
        self.answers = []
        self._process = subprocess.Popen(
            [python or sys.executable, sys.argv[0], "--run"]
            + [function.__name__, *arguments],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KMEM_CACHE": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Which it notices after the step that it may be in.
        self._process.communicate()

    def ask(self):
        if self.answers:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            line = json.dumps({"error": f"ended with status {status}"})
        self.answers.append(json.loads(line))
        return self.answers[-1]


def in_turns(process, other, num_steps):
    """Has two processes take steps in turns; the first one's first, which is
    tracing for the most part, is not among them.

    Returns:
        The other one's answers, one for each of the process after its first.
    """
    turns = []
    result = process.ask()
    while "error" not in result and len(turns) < num_steps:
        result = process.ask()
        turns.append(other.ask())
    return turns


def meter():
    """A callback that keeps, of each step, its seconds, the bytes that were
    held before it, and its peak in bytes."""
    import keras

    import kmem

    class Meter(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seconds, self.held_bytes, self.peak_bytes = [], [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.tracked = kmem.memory.track("CPU")
            self.usage = self.tracked.__enter__()
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.seconds.append(time.perf_counter() - self.start)
            self.tracked.__exit__(None, None, None)
            self.held_bytes.append(self.usage.start_bytes)
            self.peak_bytes.append(self.usage.peak_bytes)

    return Meter()


def fit(model, data, more, **options):
    """Trains step by step until standard input ends; answers after each.

    Args:
        model: What is trained, an epoch for each step.
        data: What `fit` is given.
        more: What an answer holds besides bytes and seconds: a function of
            the epoch and its logs.
        **options: Arguments of `fit`.
    """
    import keras

    steps = meter()

    class Answers(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            answer(
                seconds=steps.seconds[-1],
                held_bytes=steps.held_bytes[-1],
                peak_bytes=steps.peak_bytes[-1],
                **more(epoch, logs),
            )
            if not sys.stdin.readline():
                self.model.stop_training = True

    model.fit(
        data,
        steps_per_epoch=1,
        epochs=10**9,
        verbose=0,
        callbacks=[steps, Answers()],
        **options,
    )
