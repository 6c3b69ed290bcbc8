"""How long `memory_budget` looks for options, and how right it is.

    python benchmarks/search.py --output benchmarks/search.md

Each row is a process of its own: the peak of plain steps is measured, then a
share of what they add to memory is the budget.
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

NUM_CLASSES = 10
NUM_STEPS = 3
SHARES = (0.7, 0.5)


def resnet50():
    import keras

    return images(keras.applications.ResNet50, 96)


def convnext_tiny():
    import keras

    return images(keras.applications.ConvNeXtTiny, 64)


def efficientnet_v2b0():
    import keras

    return images(keras.applications.EfficientNetV2B0, 96)


def images(application, size, num_rows=32):
    import numpy as np

    shape = size, size, 3
    model = application(weights=None, input_shape=shape, classes=NUM_CLASSES)
    random = np.random.default_rng(0)
    x = random.uniform(0, 255, size=(num_rows, *shape)).astype("float32")
    return model, x, np.arange(num_rows) % NUM_CLASSES


def transformer():
    import remat_models

    return remat_models.transformer(6, num_rows=32)


def bert():
    import keras_hub
    import numpy as np

    model = keras_hub.models.BertTextClassifier(
        backbone=keras_hub.models.BertBackbone(
            vocabulary_size=30522,
            num_layers=2,
            num_heads=2,
            hidden_dim=128,
            intermediate_dim=512,
            max_sequence_length=128,
        ),
        num_classes=NUM_CLASSES,
    )
    num_rows, shape = 64, (64, 128)
    x = {
        "token_ids": np.arange(64 * 128).reshape(shape) % 30522,
        "segment_ids": np.zeros(shape, "int32"),
        "padding_mask": np.ones(shape, "int32"),
    }
    return model, x, np.arange(num_rows) % NUM_CLASSES


def attention():
    """Long sequences: the scores are most of it."""
    import keras
    import numpy as np
    from keras import layers

    x = inputs = keras.Input((384, 64))
    for _ in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(x, x)])
        x = layers.Add()([x, layers.Dense(64, "gelu")(x)])
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(NUM_CLASSES)(x))
    data = np.random.default_rng(0).normal(size=(16, 384, 64))
    return model, data.astype("float32"), np.arange(16) % NUM_CLASSES


MODELS = {
    "ResNet50, 96x96": resnet50,
    "ConvNeXtTiny, 64x64": convnext_tiny,
    "EfficientNetV2B0, 96x96": efficientnet_v2b0,
    "transformer, 6 layers": transformer,
    "BERT tiny": bert,
    "attention": attention,
}


def row(name, share):
    """Gives a line of the table."""
    import keras
    import tensorflow as tf

    import kmem
    from kmem.budget.report import describe

    kmem.memory.current("CPU")
    keras.utils.set_random_seed(0)
    model, x, y = MODELS[name]()
    num_updates = 0

    class Counted(keras.optimizers.Adam):
        def update_step(self, *args, **kwargs):
            nonlocal num_updates
            num_updates += 1
            super().update_step(*args, **kwargs)

    model.compile(
        Counted(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model = kmem.wrap(model)
    data = tf.data.Dataset.from_tensors((x, y))

    def num_traces():
        return num_updates // len(model.trainable_variables)

    def step(options):
        start = time.perf_counter()
        with kmem.memory.track("CPU") as usage:
            model.fit(data, verbose=0, **options)
        return usage.peak_bytes, time.perf_counter() - start

    def steps(options):
        taken = [step(options) for _ in range(NUM_STEPS)]
        peaks, seconds = zip(*taken, strict=True)
        return max(peaks), statistics.median(seconds)

    first_seconds = step({})[1]
    gc.collect()
    in_use = kmem.memory.current("CPU")
    plain_peak, plain_seconds = steps({})
    budget = in_use + int(share * (plain_peak - in_use))
    num_updates = 0
    options = {"memory_budget": budget}
    begin = f"| {name} | {share} | {plain_peak / 1e6:.0f} | "
    begin += f"{first_seconds:.0f} | {plain_seconds:.2f} | "
    begin += f"{budget / 1e6:.0f} | "
    start = time.perf_counter()
    try:
        step(options)
    except ValueError as error:
        seconds = time.perf_counter() - start
        least = getattr(error, "smallest_bytes", None) or 0
        what = f"refused: at least {least / 1e6:.0f} MB"
        return begin + f"{what} | | | | {seconds:.0f} | {num_traces()} |"
    waited = time.perf_counter() - start
    traces = num_traces()
    # In turns: what else the machine does slows both down.
    turns = [(step(options), step({})) for _ in range(NUM_STEPS)]
    peak = max(chosen[0] for chosen, _ in turns)
    seconds = statistics.median(chosen[1] for chosen, _ in turns)
    ratio = statistics.median(chosen[1] / plain[1] for chosen, plain in turns)
    chosen = model.memory_report.chosen
    return begin + (
        f"{describe(chosen.options)} | "
        f"{chosen.predicted_peak_bytes / 1e6:.0f} | {peak / 1e6:.0f} | "
        f"{ratio:.2f} | {waited - seconds:.0f} | {traces} |"
    )


HEADER = (
    "Graph mode, Adam, a `fit` of one batch. Plain: the peak of plain steps in "
    "MB, the seconds of Keras's first `fit`, with its trace, and of the next "
    "ones. The budget is what is in memory between steps and a share of what "
    "plain steps add to it. Predicted, peak: what was expected of the chosen "
    f"option, and the most that {NUM_STEPS} steps needed. Time: of a step, "
    "relative to a plain one; the two come in turns. Search: the seconds of "
    "the first `fit` within the budget beyond those of the next ones; traces: "
    "how many steps were traced meanwhile.\n\n"
    "| model | share | plain, MB | first, s | s | budget, MB | chosen "
    "| predicted | peak | time | search | traces |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def main():
    # Each budget is searched for.
    os.environ["KMEM_CACHE"] = "0"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(MODELS)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    add_output(parser)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        name, share = arguments.run
        print(row(name, float(share)), flush=True)
        return
    title = "# The search behind `memory_budget`\n\n"
    header = f"{title}{made_by(__file__)}\n\n{HEADER}"
    write = writer(arguments.output, header)
    for name in arguments.models:
        for share in SHARES:
            for line in lines_of(__file__, "--run", name, share):
                write(line)


if __name__ == "__main__":
    main()
