"""What each of several processes holds, sends and takes for a step.

    python benchmarks/sharding.py --output benchmarks/sharding.md

A row is a training in processes of its own, in a network of their own, whose
loopback interface counts what they send. They share the machine's processors,
as would not be on a cluster: times tell how ways compare, and no more.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import statistics
import time

from table import add_output
from table import made_by
from table import writer

# The first steps trace, and make the optimizer's variables.
NUM_FIRST_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain of dense layers, and the rows of a batch of all processes."""

    depth: int
    width: int
    rows: int

    @property
    def parameter_bytes(self):
        return 4 * self.depth * self.width * (self.width + 1)


CASES = {"large": Case(8, 2048, 16), "busy": Case(8, 1024, 1024)}
SINGLE, MIRRORED = "one process", "MultiWorkerMirroredStrategy"
BFLOAT16 = {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
# Arguments of `kmem.Sharding`, and the weights that are sent for each that
# a process does not hold.
WAYS = {
    '"optimizer"': ({"stage": "optimizer"}, 2),
    '"gradients"': ({"stage": "gradients"}, 2),
    '"full"': ({"stage": "full"}, 3),
    '"full", bfloat16': ({"stage": "full", **BFLOAT16}, 1.5),
    '"full", cpu_offload': ({"stage": "full", "cpu_offload": True}, 3),
}


def train(name, way, num_steps):
    """Trains in this process; what its steps took."""
    import keras
    import numpy as np
    import tensorflow as tf

    import kmem

    case = CASES[name]
    if way == MIRRORED:
        strategy = mirrored()
    else:
        kmem.ShardedStrategy()
        strategy = tf.distribute.get_strategy()
    random = np.random.default_rng(0)
    batch = random.normal(size=(2, case.rows, case.width)).astype("float32")
    data = tf.data.Dataset.from_tensors((batch[0], batch[1])).repeat()
    before_bytes = kmem.memory.current("CPU")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((case.width,))])
        for _ in range(case.depth):
            model.add(keras.layers.Dense(case.width, "relu"))
        model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
    if way == MIRRORED:
        mend(model)

    seconds, losses, held, peaks, sent = [], [], [], [], []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            kmem.memory.reset_peak("CPU")
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            seconds.append(time.perf_counter() - self.start)
            losses.append(float(logs["loss"]))
            held.append(kmem.memory.current("CPU") - before_bytes)
            peaks.append(kmem.memory.peak("CPU") - before_bytes)
            sent.append(loopback_bytes())

    options = {}
    if way in WAYS:
        kmem.wrap(model)
        options = {"sharding": kmem.Sharding(**WAYS[way][0])}
    model.fit(
        data,
        steps_per_epoch=NUM_FIRST_STEPS + num_steps,
        callbacks=[Steps()],
        verbose=0,
        **options,
    )
    return {
        "seconds": statistics.median(seconds[NUM_FIRST_STEPS:]),
        "losses": losses,
        "held_bytes": max(held[NUM_FIRST_STEPS:]),
        "peak_bytes": max(peaks[NUM_FIRST_STEPS:]),
        "sent_bytes": (sent[-1] - sent[NUM_FIRST_STEPS - 1]) / num_steps,
    }


def mirrored():
    """TensorFlow's own data parallelism, with the same batches for all."""
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def mend(model):
    """Lets Keras 3.15 train over several workers, which it fails to.

    It adds up a replica's batch, which is a tuple, to build a model that is
    built; and takes the mean over the rows of logs, which are scalars. Here
    logs stay those of a worker's own rows.
    """
    from keras.src.backend.tensorflow import trainer

    model._symbolic_build = lambda *args, **kwargs: None
    model._maybe_symbolic_build = lambda *args, **kwargs: None
    trainer._collective_all_reduce_multi_worker = lambda strategy: False


def loopback_bytes():
    """What this network has carried."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(loopback.split(":")[1].split()[0])


def rows(name, sizes, num_steps):
    """Gives the lines of the table for a model, and numbers of processes."""
    import kmem

    def results(way, count):
        main = functools.partial(train, name, way, num_steps)
        return kmem.distributed.launch(main, count)

    single = results(SINGLE, 1)
    yield row(name, SINGLE, 1, single, single, None)
    for size in sizes:
        mirrored = results(MIRRORED, size)
        yield row(name, MIRRORED, size, mirrored, single, mirrored)
        for way in WAYS:
            yield row(name, way, size, results(way, size), single, mirrored)


def most(found, key):
    """The most of any process."""
    return max(each[key] for each in found)


def row(name, way, size, found, single, mirrored):
    parameter_bytes = CASES[name].parameter_bytes
    held, peak, seconds = (
        most(found, key) for key in ("held_bytes", "peak_bytes", "seconds")
    )
    of_peak = of_time = "-"
    if mirrored is not None:
        of_peak = f"{peak / most(mirrored, 'peak_bytes'):.3f}"
        of_time = f"{seconds / most(mirrored, 'seconds'):.2f}"
    sent = found[0]["sent_bytes"] / size
    expected = "-"
    if size > 1:
        times = WAYS[way][1] if way in WAYS else 2
        theory_bytes = times * parameter_bytes * (size - 1) / size
        expected = f"{sent / theory_bytes:.3f}"
    losses = zip(*(each["losses"] for each in found), strict=True)
    error = max(
        abs(statistics.mean(of_ranks) - want) / want
        for of_ranks, want in zip(losses, single[0]["losses"], strict=True)
    )
    cells = [
        name,
        str(size),
        way,
        f"{held / 1e6:.1f}",
        f"{held / parameter_bytes:.3f}",
        f"{peak / 1e6:.1f}",
        of_peak,
        f"{sent / 1e6:.1f}",
        expected,
        f"{seconds:.3f}",
        of_time,
        f"{error:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def header(num_steps):
    models = "; ".join(
        f'"{name}": {case.depth} x Dense({case.width}), '
        f"P = {case.parameter_bytes / 1e6:.1f} MB, batches of {case.rows} rows"
        for name, case in CASES.items()
    )
    return (
        "# Sharded training beside TensorFlow's data parallelism\n\n"
        f"{made_by(__file__)}\n\n"
        f"{models}, of all processes together. Adam, float32, graph mode. The "
        "processes share one machine and its processors, and send over its "
        f"loopback interface. {num_steps} steps after the first "
        f"{NUM_FIRST_STEPS}; of the processes, the one with the most. Held: in "
        "memory between steps. Peak: the most in memory during a step. Sent: "
        "by a process in a step, as the interface has counted it; beside it, "
        'relative to theory, 2P(N-1)/N, and 3P(N-1)/N for "full", half of it '
        "in bfloat16. Time: the median step; beside it, relative to "
        "MultiWorkerMirroredStrategy. Error: the largest of the losses, "
        "relative to those of one process. Keras 3.15 does not train under "
        "MultiWorkerMirroredStrategy; the script patches two of its functions. "
        "Without a GPU there is no other memory for cpu_offload: its row shows "
        "that it costs nothing besides the copies.\n\n"
        "| model | N | way | held, MB | of P | peak, MB | of Mirrored | "
        "sent, MB | of theory | time, s | of Mirrored | error |\n"
        f"|{'---|' * 12}\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=list(CASES)
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=10)
    add_output(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    write = writer(arguments.output, header(arguments.steps))
    for name in arguments.cases:
        for line in rows(name, arguments.processes, arguments.steps):
            write(f"{line}\n")


if __name__ == "__main__":
    main()
