"""How near `kmem.estimate` comes to the peak of steps that are run.

    python benchmarks/estimate.py --output benchmarks/estimate.md

Each row is a process of its own.
"""

import argparse
import gc
import time

from table import add_output
from table import lines_of
from table import made_by
from table import writer

NUM_CLASSES = 10
NUM_STEPS = 5


def application(name, size):
    import keras

    make = getattr(keras.applications, name)
    return make(weights=None, input_shape=(size, size, 3), classes=NUM_CLASSES)


def convolutions():
    import keras
    from keras import layers

    x = inputs = keras.Input((32, 32, 3))
    for filters in (32, 32, 64, 64):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(NUM_CLASSES, "softmax")(x)
    return keras.Model(inputs, outputs)


def perceptron():
    import keras
    from keras import layers

    hidden = [layers.Dense(1024, "relu") for _ in range(6)]
    last = layers.Dense(NUM_CLASSES, "softmax")
    return keras.Sequential([keras.Input((512,)), *hidden, last])


def transformer():
    import keras
    from keras import layers

    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(inputs)
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, 32, dropout=0.1)(y, y)
        x = layers.Add()([x, y])
        y = layers.Dense(512, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(128)(y))])
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, "softmax")(x))


def recurrent():
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((50, 64)),
            layers.LSTM(128, return_sequences=True),
            layers.LSTM(128),
            layers.Dense(NUM_CLASSES, "softmax"),
        ]
    )


MODELS = {
    "convolutions": (convolutions, "adam", 64),
    "MLP": (perceptron, "adam", 1024),
    "transformer": (transformer, "adam", 32),
    "LSTM": (recurrent, "adam", 64),
    "ResNet50, 64x64": (lambda: application("ResNet50", 64), "momentum", 16),
    "EfficientNetV2B0, 64x64": (
        lambda: application("EfficientNetV2B0", 64),
        "adam",
        16,
    ),
}


def row(name):
    """Gives a line of the table."""
    import keras
    import numpy as np
    import tensorflow as tf

    import kmem

    # Before the model: what is there already is none of its.
    before = kmem.memory.current("CPU")
    keras.utils.set_random_seed(0)
    make, optimizer, size = MODELS[name]
    model = make()
    if optimizer == "momentum":
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(
        optimizer, "sparse_categorical_crossentropy", jit_compile=False
    )
    shape = size, *model.input_shape[1:]
    dtype = model.inputs[0].dtype
    batch = tf.TensorSpec(shape, dtype), tf.TensorSpec((size,), "int64")
    start = time.perf_counter()
    estimate = kmem.estimate(model, batch)
    seconds = time.perf_counter() - start
    x = tf.cast(tf.random.uniform(shape, 0, 255), dtype)
    y = tf.constant(np.arange(size) % NUM_CLASSES, "int64")
    peaks = []
    for _ in range(NUM_STEPS + 1):
        gc.collect()
        with kmem.memory.track("CPU") as usage:
            model.train_on_batch(x, y)
        peaks.append(usage.peak_bytes - before)
    # The first one traces.
    least, most = min(peaks[1:]), max(peaks[1:])
    middle = sorted(peaks[1:])[NUM_STEPS // 2]
    error = estimate.peak_bytes / middle - 1
    return (
        f"| {name} | {size} | {estimate.peak_bytes / 1e6:.1f} | "
        f"{estimate.least_peak_bytes / 1e6:.1f} to "
        f"{estimate.most_peak_bytes / 1e6:.1f} | {least / 1e6:.1f} to "
        f"{most / 1e6:.1f} | {error:+.1%} | {seconds:.1f} |"
    )


HEADER = (
    "Graph mode, `train_on_batch`. Estimated, from, to: `peak_bytes`, "
    "`least_peak_bytes` and `most_peak_bytes` in MB, told before anything was "
    f"run. Measured: the peaks of {NUM_STEPS} steps, with all that the model "
    "has in memory. Error: of the estimate, against their median. Seconds: "
    "of the estimate.\n\n"
    "| model | batch | estimated | from, to | measured | error | seconds |\n"
    "|---|---|---|---|---|---|---|\n"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(MODELS)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    add_output(parser)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(row(arguments.run), flush=True)
        return
    title = "# `kmem.estimate` against measured peaks\n\n"
    write = writer(arguments.output, f"{title}{made_by(__file__)}\n\n{HEADER}")
    for name in arguments.models:
        for line in lines_of(__file__, "--run", name):
            write(line)


if __name__ == "__main__":
    main()
