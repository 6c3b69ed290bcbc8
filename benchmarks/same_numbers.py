"""Does a plan change a number? Trains with and without, and compares bits.

    python benchmarks/same_numbers.py --output benchmarks/same_numbers.md

Each model takes some steps in graph mode, with TensorFlow's deterministic
operations: as plain Keras, as plain Keras once more, and by plans. Compared
are the losses of all steps and, after the last, weights, statistics, states
of random numbers and the optimizer's variables.

Batches are small: where TensorFlow's graph optimizer expects a step to take
most of the device, 256 MB for a CPU, it adds gradients up in the order in
which they come, and plain Keras does not repeat its own bits.
"""

import argparse
import pathlib
import subprocess
import sys

from table import made_by

NUM_STEPS = 5
NUM_ROWS = 4
WAYS = ("plain", "plain, once more", "sqrt", "optimal")


def rows(name):
    """Prints the lines of the table for a model."""
    import numpy as np

    want = None
    for way in WAYS:
        values, plan = trained(name, way)
        if want is None:
            want = values
            continue
        differing = [
            float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
            for a, b in zip(values, want, strict=True)
            if not np.array_equal(a, b)
        ]
        again = "-"
        if plan:
            inside = sum(s.stop - s.start for s in plan.segments)
            again = f"{inside} of {len(plan.network.stages)}"
        most = f"{max(differing):.0e}" if differing else "0"
        cells = [name, way, again, f"{len(differing)} of {len(want)}", most]
        print(f"| {' | '.join(cells)} |", flush=True)


def trained(name, way):
    """All numbers after the steps, and the plan that was followed."""
    import keras
    import numpy as np
    import remat_models
    import tensorflow as tf

    import kmem

    tf.config.experimental.enable_op_determinism()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    models = {**remat_models.MODELS, "subclassed": subclassed}
    model, x, y = models[name]()
    x, y = x[:NUM_ROWS], y[:NUM_ROWS]
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    losses = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])

    plan = None
    if not way.startswith("plain"):
        plan = kmem.plan(model, (x, y), budget="auto", solver=way)
    kmem.wrap(model).fit(
        x,
        y,
        batch_size=len(x),
        epochs=NUM_STEPS,
        shuffle=False,
        verbose=0,
        callbacks=[Losses()],
        remat=plan,
    )
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(losses), *(v.numpy() for v in variables)], plan


def subclassed():
    """Blocks with batch norm and dropout, layers of the user's own, which a
    model of the user's own calls in a loop."""
    import keras
    import numpy as np
    import remat_models

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = keras.layers.BatchNormalization()
            self.convolution = keras.layers.Conv2D(16, 3, padding="same")
            self.dropout = keras.layers.Dropout(0.2)

        def call(self, x, training=None):
            y = keras.ops.relu(self.norm(x, training=training))
            y = self.dropout(self.convolution(y), training=training)
            return x + y

    class Blocks(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Conv2D(16, 3, padding="same")
            self.blocks = [Block() for _ in range(8)]
            self.pool = keras.layers.GlobalAveragePooling2D()
            self.head = keras.layers.Dense(remat_models.NUM_CLASSES)

        def call(self, x, training=None):
            x = self.first(x)
            for block in self.blocks:
                x = block(x, training=training)
            return self.head(self.pool(x))

    images = np.random.default_rng(0).normal(size=(16, 48, 48, 3))
    images = images.astype("float32")
    model = Blocks()
    model(images)
    return model, images, np.arange(16) % remat_models.NUM_CLASSES


def main():
    names = ["ResNet50", "DenseNet121", "U-Net", "transformer"]
    names += ["EfficientNetV2B0", "subclassed"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        rows(arguments.run)
        return

    table = (
        "# The same numbers\n\n"
        f"{made_by(__file__)}\n\n"
        f"Graph mode, deterministic operations, float32, {NUM_STEPS} steps of "
        f"SGD with momentum, {NUM_ROWS} rows. Differing: how many of the "
        "arrays (losses, weights, statistics, states of random numbers, "
        "optimizer) are not equal to plain Keras's to the bit, and by how much "
        "at most, relative to the array's largest number.\n\n"
        "| model | way | in segments | differing | by |\n"
        "|---|---|---|---|---|\n"
    )
    print(table, end="", flush=True)
    for name in arguments.models:
        # In a process of its own, in which nothing else is in memory.
        command = [sys.executable, __file__, "--run", name]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True
        )
        print(done.stdout, end="", flush=True)
        table += done.stdout
    if arguments.output:
        arguments.output.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
