"""`memory_budget` beside every single option that keeps the same budget.

    python benchmarks/one_knob.py --output benchmarks/one_knob.md

For each of 15 budgets from the smallest that is possible to plain training's
peak: what `memory_budget` chooses, and the quickest of all numbers of
micro-batches and of a plan for that budget. The two take their steps in turns
in one process: the time is the median of the ratios.
"""

import argparse
import gc
import os
import statistics
import time

from table import add_output
from table import lines_of
from table import made_by
from table import writer

NUM_BUDGETS = 15
NUM_CLASSES = 10
NUM_TURNS = 9
NUM_STEPS = 5


def resnet():
    """He et al. (2016), with 14 layers for images of 32 x 32."""
    import keras
    from keras import layers

    def convolved(x, num_filters, strides, size=3):
        x = layers.Conv2D(num_filters, size, strides, "same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    x = inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolved(x, 16, 1))
    for num_filters in (16, 32, 64):
        for block in range(2):
            strides = 2 if num_filters > 16 and block == 0 else 1
            y = layers.ReLU()(convolved(x, num_filters, strides))
            y = convolved(y, num_filters, 1)
            if strides > 1:
                x = convolved(x, num_filters, strides, size=1)
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return classifier(inputs, x, num_rows=64)


def unet():
    import remat_models

    return remat_models.unet()


def transformer():
    import remat_models

    return remat_models.transformer(4, num_rows=32)


def lstm():
    import keras
    from keras import layers

    x = inputs = keras.Input((48, 64))
    x = layers.LSTM(128, return_sequences=True)(x)
    return classifier(inputs, layers.LSTM(128)(x), num_rows=64)


def perceptron():
    import keras
    from keras import layers

    x = inputs = keras.Input((64,))
    for _ in range(12):
        x = layers.Dense(256, activation="gelu")(x)
    return classifier(inputs, x, num_rows=8192)


def separable():
    """Depthwise and pointwise convolutions (Howard et al., 2017)."""
    import keras
    from keras import layers

    x = inputs = keras.Input((64, 64, 3))
    for num_filters, strides in [(32, 2), (64, 1), (128, 2), (256, 2)]:
        x = layers.SeparableConv2D(num_filters, 3, strides, "same")(x)
        x = layers.LayerNormalization()(x)
        x = layers.Activation("swish")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return classifier(inputs, x, num_rows=32)


def classifier(inputs, x, num_rows):
    import keras
    import numpy as np

    model = keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(x))
    random = np.random.default_rng(0)
    data = random.normal(size=(num_rows, *inputs.shape[1:]))
    return model, data.astype("float32"), np.arange(num_rows) % NUM_CLASSES


MODELS = {
    "ResNet-14": resnet,
    "U-Net": unet,
    "transformer, 4 layers": transformer,
    "LSTM, 2 layers": lstm,
    "12 x Dense(256)": perceptron,
    "separable convolutions": separable,
}
# Batch normalization sees a part of a batch at a time, and dropout draws for
# each: `memory_budget` splits a batch of theirs only where nothing else fits.
DIFFER_IN_PARTS = "ResNet-14", "U-Net", "transformer, 4 layers"


class Training:
    """A model that takes each step under other options."""

    def __init__(self, name):
        import keras
        import tensorflow as tf

        import kmem

        # It counts from TensorFlow's first operation on.
        kmem.memory.current("CPU")
        keras.utils.set_random_seed(0)
        model, *data = MODELS[name]()
        self.num_rows = len(data[0])
        # On the device, where `fit` has its batches too.
        self._batch = [tf.raw_ops.DeepCopy(x=array) for array in data]
        model.compile(
            keras.optimizers.SGD(1e-3, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.model = kmem.wrap(model)
        # Both are made here.
        self.step(kmem.MemoryOptions())
        self._variables = [*model.variables, *model.optimizer.variables]
        self._start = [variable.numpy() for variable in self._variables]

    def step(self, options):
        """Takes a step; returns its peak in bytes, and its seconds."""
        import kmem

        self.model.memory_options = options
        start = time.perf_counter()
        with kmem.memory.track("CPU") as usage:
            self.model.train_on_batch(*self._batch)
        return usage.peak_bytes, time.perf_counter() - start

    def steps(self, options, count=3):
        """The most that some steps add to what is in memory, and the least
        time."""
        # The first one traces.
        self.step(options)
        in_use = self.in_use()
        peaks, seconds = zip(
            *(self.step(options) for _ in range(count)), strict=True
        )
        return max(peaks) - in_use, min(seconds)

    def in_use(self):
        """What is in memory between steps: traced functions leave something."""
        import kmem

        gc.collect()
        return kmem.memory.current("CPU")

    def trained(self, options, count=3):
        """The weights after some steps from the start."""
        for variable, value in zip(self._variables, self._start, strict=True):
            variable.assign(value)
        for _ in range(count):
            self.step(options)
        return [weight.numpy() for weight in self.model.trainable_weights]

    def plan(self, budget_bytes):
        """Options with the best plan for a budget, or `None`."""
        import kmem

        # The planner counts with a batch beside the one that is in memory.
        budget_bytes += sum(tensor.numpy().nbytes for tensor in self._batch)
        try:
            made = kmem.plan(self.model, tuple(self._batch), budget_bytes)
        except ValueError:
            return None
        return kmem.MemoryOptions(remat=kmem.Remat(plan=made))


def rows(name):
    """Gives the lines of the table for a model."""
    import kmem
    from kmem.budget.report import describe

    training = Training(name)
    plain = kmem.MemoryOptions()
    expected = training.trained(plain)
    singles = {plain: training.steps(plain)}
    largest = singles[plain][0] + training.in_use()
    count = 2
    while count <= training.num_rows:
        options = kmem.MemoryOptions(microbatches=count)
        singles[options] = training.steps(options)
        count *= 2
    smallest = None
    try:
        training.step(kmem.MemoryOptions(memory_budget=1))
    except ValueError as error:
        smallest = error.smallest_bytes
    step_bytes = (largest - smallest) / (NUM_BUDGETS - 1)
    for number in range(NUM_BUDGETS):
        budget = int(smallest + number * step_bytes)
        knob = kmem.MemoryOptions(memory_budget=budget)
        _, waited = training.step(knob)
        # Before the functions of other ways take memory, which stay.
        peak = max(training.step(knob)[0] for _ in range(NUM_STEPS))
        report = training.model.memory_report
        is_split = report.chosen.options.microbatches is not None
        may_split = is_split or name not in DIFFER_IN_PARTS
        room = budget - training.in_use()
        fit = {
            options: step
            for options, step in singles.items()
            if step[0] <= room and (may_split or not options.microbatches)
        }
        planned = training.plan(budget)
        if planned:
            found = training.steps(planned)
            if found[0] <= room:
                fit[planned] = found
        best = min(fit, key=lambda options: fit[options][1], default=None)
        ways = (knob, plain, best) if best else (knob, plain)
        turns = [in_turn(training, ways, n) for n in range(NUM_TURNS)]
        error = largest_error(training.trained(knob), expected)
        single = "none | | |"
        if best:
            single = f"{describe(best)} | {ratio(turns, 2, 1):.2f} | "
            single += f"{ratio(turns, 0, 2):.2f} |"
        yield (
            f"| {name} | {budget / 1e6:.1f} | {peak / 1e6:.1f} | "
            f"{'yes' if peak <= budget else 'NO'} | "
            f"{describe(report.chosen.options)} | "
            f"{ratio(turns, 0, 1):.2f} | {single} {error:.0e} | {waited:.0f} |"
        )


def in_turn(training, ways, first):
    """A step in each way; another one comes first each time, as a step runs
    slower behind one that has given much memory back."""
    order = [(first + i) % len(ways) for i in range(len(ways))]
    found = {i: training.step(ways[i]) for i in order}
    return [found[i] for i in range(len(ways))]


def ratio(turns, one, other):
    return statistics.median(t[one][1] / t[other][1] for t in turns)


def largest_error(got, expected):
    import numpy as np

    pairs = zip(got, expected, strict=True)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


HEADER = (
    "Graph mode, SGD with momentum, on one batch. Budgets go from the smallest "
    "that an error names to the peak of plain training. Peak: the most that is "
    f"in memory in any of {NUM_STEPS} steps. Chosen, and best: what "
    "`memory_budget` does, and the quickest single option that was measured to "
    "keep the budget, of micro-batches in powers of two and a plan for the "
    "budget; of plans alone where micro-batches would change numbers and the "
    "chosen step has none. Time: of a step, relative to plain training, and of "
    f"the chosen one relative to the best; medians of {NUM_TURNS} that were "
    "taken in turns. Error: the largest difference of a weight from plain "
    "training after 3 steps, relative to its array's largest number; with "
    "batch normalization the parts of a batch have statistics of their own. "
    "Search: seconds of the first step.\n\n"
    "| model | budget, MB | peak | kept | chosen | time | best single | time | "
    "of best | error | search |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def main():
    # Each budget is searched for.
    os.environ["KMEM_CACHE"] = "0"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(MODELS)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    add_output(parser)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        for line in rows(arguments.run):
            print(line, flush=True)
        return
    title = "# One knob beside every single option\n\n"
    header = f"{title}{made_by(__file__)}\n\n{HEADER}"
    write = writer(arguments.output, header)
    for name in arguments.models:
        for line in lines_of(__file__, "--run", name):
            write(line)


if __name__ == "__main__":
    main()
