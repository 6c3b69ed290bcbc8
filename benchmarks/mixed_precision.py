"""Peak memory of a training step in 16 bits, for three kinds of model.

    python benchmarks/mixed_precision.py > benchmarks/mixed_precision.md

Every row is trained in a process of its own, in graph mode, on one batch. The
peak is what the step needs besides what was in use before the model was made:
parameters, gradients, optimizer, batch, activations and workspace. It takes
some minutes on a CPU, whose matrix products in 16 bits are slow.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time

PRECISIONS = ("float32", "bfloat16", "float16")
MODELS = ("dense", "convolution", "transformer")
NUM_STEPS = 2


def build(name):
    """Returns a model and a batch of inputs; its outputs are 8 classes."""
    import keras
    import numpy as np
    from keras import layers

    if name == "dense":
        shape, num_rows = (128,), 1024
        x = inputs = keras.Input(shape)
        for _ in range(12):
            x = layers.Dense(128, activation="relu")(x)
    elif name == "convolution":
        shape, num_rows = (32, 32, 3), 64
        x = inputs = keras.Input(shape)
        for _ in range(8):
            x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
            x = layers.BatchNormalization()(x)
            x = layers.ReLU()(x)
        x = layers.GlobalAveragePooling2D()(x)
    else:
        shape, num_rows = (64, 64), 64
        x = inputs = keras.Input(shape)
        for _ in range(4):
            y = layers.LayerNormalization()(x)
            y = layers.MultiHeadAttention(4, 16, dropout=0.1)(y, y)
            x = layers.Add()([x, y])
            y = layers.LayerNormalization()(x)
            y = layers.Dense(256, activation="gelu")(y)
            x = layers.Add()([x, layers.Dense(64)(y)])
        x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, layers.Dense(8)(x))
    data = np.random.default_rng(0).normal(size=(num_rows, *shape))
    return model, data.astype("float32")


def measure(name, precision):
    """Trains a few steps; returns the peak's bytes and the seconds a step."""
    import keras
    import numpy as np

    import kmem

    before = kmem.memory.current()
    keras.utils.set_random_seed(0)
    model, x = build(name)
    y = np.arange(len(x)) % 8
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model = kmem.wrap(model)
    option = None if precision == "float32" else precision
    stamps = []

    def train(epochs, callbacks=()):
        model.fit(
            x,
            y,
            batch_size=len(x),
            epochs=epochs,
            verbose=0,
            callbacks=list(callbacks),
            mixed_precision=option,
        )

    train(1)
    kmem.memory.reset_peak()
    stamp = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: stamps.append(time.perf_counter())
    )
    train(NUM_STEPS + 1, [stamp])
    return {
        "peak_bytes": kmem.memory.peak() - before,
        "seconds": min(b - a for a, b in zip(stamps, stamps[1:], strict=False)),
    }


def measured_apart(name, precision):
    command = [sys.executable, __file__, "--only", name, precision]
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def hardware():
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line for line in lines if line.startswith("model name")]
        name = names[0].split(":")[1].strip() if names else name
    return f"{name}, {os.cpu_count()} cores, no accelerator"


def main():
    import keras
    import tensorflow as tf

    print("# Mixed precision: peak memory of a training step\n")
    print(
        f"{hardware()}. TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}, Python {platform.python_version()}. "
        f"{datetime.date.today()}. Graph mode, Adam. Made by "
        "`benchmarks/mixed_precision.py`.\n"
    )
    print("| model | precision | peak MB | of float32 | seconds a step |")
    print("|---|---|---|---|---|")
    for name in MODELS:
        plain = None
        for precision in PRECISIONS:
            result = measured_apart(name, precision)
            plain = plain or result["peak_bytes"]
            print(
                f"| {name} | {precision} | {result['peak_bytes'] / 1e6:.2f} "
                f"| {result['peak_bytes'] / plain:.3f} "
                f"| {result['seconds']:.3f} |",
                flush=True,
            )
    print(
        "\nThe peak depends on the order in which the threads take the "
        "operations: it varies\nby some percent from run to run. The time is "
        "that of this CPU, which multiplies\nfloat16 slowly; it says nothing "
        "about an accelerator."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "PRECISION"))
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(*arguments.only)))
    else:
        main()
