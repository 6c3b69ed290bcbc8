"""How far `FiniteDifference` is from the product that it estimates.

    python benchmarks/finite_difference.py --output finite_difference.md

The error of -(g(w + e v) - g(w - e v)) / 2e, e = alpha / |v|, against the same
product in float64 by automatic differentiation, for steps `alpha`, five
models and three dtypes. v is the gradient of a loss on other examples. Once as
kmem does it, both gradients in float32, and once with both of them in the
level's own dtype.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops
from table import add_output
from table import made_by
from table import writer

from kmem.multilevel import Identity
from kmem.multilevel import Level

ALPHAS = (1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
DTYPES = ("float32", "bfloat16", "float16")
ROWS, CLASSES = 16, 5


def mlp():
    inputs = keras.Input((20,))
    x = layers.Dense(64, "tanh")(inputs)
    return inputs, layers.Dense(64, "tanh")(x)


def convolutions():
    """Residual, with groups normalized."""
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(3):
        y = layers.GroupNormalization(4)(x)
        y = layers.Conv2D(16, 3, padding="same")(ops.relu(y))
        y = layers.GroupNormalization(4)(y)
        x = x + layers.Conv2D(16, 3, padding="same")(ops.relu(y))
    return inputs, layers.GlobalAveragePooling2D()(x)


def depthwise():
    """Depthwise convolutions with batch normalization and swish."""
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(24, 3, strides=2, padding="same")(inputs)
    for _ in range(2):
        y = layers.DepthwiseConv2D(3, padding="same")(x)
        y = ops.silu(layers.BatchNormalization()(y))
        x = x + layers.Conv2D(24, 1)(y)
    return inputs, layers.GlobalAveragePooling2D()(x)


def lstm():
    inputs = keras.Input((10, 8))
    return inputs, layers.LSTM(24)(inputs)


def attention():
    inputs = keras.Input((10, 24))
    x = inputs
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 12)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(24)(layers.Dense(48, "gelu")(y))
    return inputs, layers.GlobalAveragePooling1D()(x)


MODELS = (mlp, convolutions, depthwise, lstm, attention)


class Problem:
    """A classifier whose examples are weighed by a net that sees them."""

    def __init__(self, make, dtype, weights=None, mixed_precision=None):
        keras.utils.set_random_seed(0)
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        inputs, features = make()
        outputs = layers.Dense(CLASSES)(features)
        self.classifier = keras.Model(inputs, outputs, name="classifier")
        self.weigh = keras.Sequential(
            [
                keras.Input(inputs.shape[1:]),
                layers.Flatten(),
                layers.Dense(8, "tanh"),
                layers.Dense(1, "sigmoid"),
            ],
            name="weigh",
        )
        if weights:
            self.classifier.set_weights(weights[0])
            self.weigh.set_weights(weights[1])
        random = np.random.default_rng(1)
        self.batches = [
            (
                tf.constant(
                    random.normal(size=(ROWS, *inputs.shape[1:])), dtype
                ),
                tf.constant(random.integers(0, CLASSES, ROWS)),
            )
            for _ in range(2)
        ]
        options = {"mixed_precision": mixed_precision}
        self.level = Level(self.classifier, self.weighted, "sgd", **options)
        self.level.models = [self.classifier, self.weigh]

    def losses(self, x, y):
        logits = self.classifier(x, training=True)
        return ops.sparse_categorical_crossentropy(y, logits, from_logits=True)

    def weighted(self, x, y):
        return ops.mean(self.weigh(x)[:, 0] * self.losses(x, y))

    def vector(self):
        with tf.GradientTape() as tape:
            loss = ops.mean(self.losses(*self.batches[1]))
        weights = [v.value for v in self.classifier.trainable_variables]
        return tape.gradient(loss, weights)

    def weights(self):
        return self.classifier.get_weights(), self.weigh.get_weights()

    def found(self, hypergradient, vector, *arguments):
        """What a hypergradient makes of a vector, in a graph."""
        vector = [
            tf.cast(v, w.dtype)
            for v, w in zip(
                vector, self.classifier.trainable_variables, strict=True
            )
        ]
        self.level.look_once(self.batches[0])

        @tf.function(autograph=False)
        def run(vector, batch, *arguments):
            wrt = self.weigh.trainable_variables
            return hypergradient(vector, self.level, batch, wrt, *arguments)

        self.run = run
        return run


def in_own_dtype(vector, level, batch, wrt, alpha):
    """The difference of gradients in the dtype in which the level computes."""
    norm = tf.linalg.global_norm(vector)
    values = level.values()
    with level.replayed(batch):
        forth, back = (
            level.gradient(
                batch,
                wrt,
                at={
                    id(variable): w + sign * alpha / norm * v
                    for variable, w, v in zip(
                        level.variables, values, vector, strict=True
                    )
                },
            )
            for sign in (1, -1)
        )
    return [
        (b - f) * norm / (2 * alpha) for f, b in zip(forth, back, strict=True)
    ]


def in_32_bits(vector, level, batch, wrt, alpha):
    with level.in_32_bits():
        return in_own_dtype(vector, level, batch, wrt, alpha)


def flat(tensors):
    return np.concatenate([np.ravel(t).astype("float64") for t in tensors])


def error(found, exact):
    return np.linalg.norm(flat(found) - exact) / np.linalg.norm(exact)


def rows_of(make):
    """For each dtype and way the errors by step, and that of `Identity`."""
    exact_problem = Problem(make, "float64")
    weights = exact_problem.weights()
    vector = [v.numpy() for v in exact_problem.vector()]
    batch = exact_problem.batches[0]
    exact = flat(
        exact_problem.found(Identity(), vector)(
            [tf.constant(v) for v in vector], batch
        )
    )
    size = float(np.linalg.norm(flat(weights[0])))
    for dtype in DTYPES:
        mixed = None if dtype == "float32" else dtype
        problem = Problem(make, "float32", weights, mixed)
        single = [tf.constant(v, "float32") for v in vector]
        ways = {"own": in_own_dtype, "float32": in_32_bits}
        if mixed is None:
            del ways["own"]
        for way, difference in ways.items():
            run = problem.found(difference, single)
            errors = [
                error(run(single, problem.batches[0], tf.constant(a)), exact)
                for a in ALPHAS
            ]
            identity = None
            if way == "float32":
                run = problem.found(Identity(), single)
                identity = error(run(single, problem.batches[0]), exact)
            yield dtype, way, errors, identity, size


def percent(value):
    return "-" if value is None else f"{100 * value:.2g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser)
    arguments = parser.parse_args()
    steps = " | ".join(f"{alpha:g}" for alpha in ALPHAS)
    write = writer(
        arguments.output,
        f"# The step of a finite difference\n\n{made_by(__file__)}\n\n"
        f"{' '.join(__doc__.split('.md')[1].split())}\n\n"
        "Errors in percent, by the step; |w| is the norm of the weights. "
        "`Identity` is as kmem computes it at that dtype.\n\n"
        f"| model, abs(w) | level in | both gradients in | {steps} | "
        f"`Identity` |\n|{'---|' * (len(ALPHAS) + 4)}\n",
    )
    for make in MODELS:
        for dtype, way, errors, identity, size in rows_of(make):
            cells = [
                f"{make.__name__}, {size:.1f}",
                dtype,
                dtype if way == "own" else way,
                *map(percent, errors),
                percent(identity),
            ]
            write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
