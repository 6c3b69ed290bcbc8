"""Every hypergradient, for kinds of layers and memory options.

The oracle knows nothing of second derivatives: the Hessian and the mixed
derivative are central differences of first derivatives, in float64, and a
solver's answer is computed from them as its definition says.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops

import kmem
from kmem.multilevel import SAMA
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import MinimalResidual
from kmem.multilevel import Neumann
from kmem.multilevel import Unrolled
from kmem.multilevel import updates
from kmem.step import batches

# With so much of a penalty the Hessians are positive definite.
ROWS, CLASSES, PENALTY, RATE = 8, 3, 2.0, 0.25


def dense():
    return (5,), [layers.Dense(4, "tanh")]


def convolution():
    convolve = layers.Conv2D(2, 3, activation="tanh")
    return (5, 5, 1), [convolve, layers.GlobalAveragePooling2D()]


def batch_norm():
    return (5,), [layers.Dense(4), layers.BatchNormalization(), ops.tanh]


def dropout():
    return (5,), [layers.Dense(6, "tanh"), layers.Dropout(0.4, seed=7)]


def lstm():
    return (4, 3), [layers.LSTM(2)]


class _Attention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 2)
        self.normalize = layers.LayerNormalization()

    def build(self, shape):
        self.attend.build(shape, shape)
        self.normalize.build(shape)

    def call(self, x):
        return self.normalize(x + self.attend(x, x))


def attention():
    return (4, 3), [_Attention(), layers.GlobalAveragePooling1D()]


LAYERS = {
    f.__name__: f
    for f in (dense, convolution, batch_norm, dropout, lstm, attention)
}
_SQRT = kmem.Remat(solver="sqrt")
OPTIONS = {
    "plain": {},
    "microbatches": {"microbatches": 2},
    "remat": {"remat": _SQRT},
    "both": {"microbatches": 2, "remat": _SQRT},
    "bfloat16": {"mixed_precision": "bfloat16"},
}
# With what each computes from v, H and the mixed derivative, as `_expected`.
HYPERGRADIENTS = {
    "Identity": Identity(),
    "FiniteDifference": FiniteDifference(),
    "SAMA": SAMA(),
    "Neumann": Neumann(2, 0.3),
    "ConjugateGradient": ConjugateGradient(3),
    "MinimalResidual": MinimalResidual(3),
    "Unrolled": Unrolled(),
}


class Case:
    """A classifier with one kind of layer, and examples with weights."""

    def __init__(self, kind: str, dtype: str, options=None):
        keras.utils.set_random_seed(0)
        before = keras.config.dtype_policy(), keras.config.floatx()
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        try:
            shape, block = LAYERS[kind]()
            inputs = keras.Input(shape)
            x = inputs
            for layer in [*block, layers.Dense(CLASSES)]:
                x = layer(x)
            self.model = keras.Model(inputs, x, name="classifier")
            self.weigh = keras.Sequential(
                [
                    keras.Input(shape),
                    layers.Flatten(),
                    layers.Dense(1, "sigmoid"),
                ],
                name="weigh",
            )
        finally:
            keras.config.set_dtype_policy(before[0])
            keras.config.set_floatx(before[1])
        random = np.random.default_rng(1)
        for variable in self.own + self.others:
            # Numbers that float32 has, too.
            values = 0.5 * random.normal(size=variable.shape)
            variable.assign(values.astype("float32"))
        self.vector = [
            tf.constant(random.normal(size=v.shape).astype("float32"), dtype)
            for v in self.own
        ]
        x = random.normal(size=(ROWS, *shape)).astype("float32")
        self.batch = (
            tf.constant(x, dtype),
            tf.constant(random.integers(0, CLASSES, ROWS)),
        )
        self.options = options or {}
        self.parts = self.options.get("microbatches", 1)
        self.level = Level(
            self.model,
            self.loss,
            keras.optimizers.SGD(RATE),
            hypergradient=Unrolled(),
            **self.options,
        )
        self.level.models = [self.model, self.weigh]

    @property
    def own(self):
        return self.model.trainable_variables

    @property
    def others(self):
        return self.weigh.trainable_variables

    def loss(self, x, y):
        logits = self.model(x, training=True)
        each = ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
        squares = sum(ops.sum(ops.square(w)) for w in self.own)
        return ops.mean(self.weigh(x)[:, 0] * each) + PENALTY / 2 * squares

    def found(self):
        """What each hypergradient gives, all of them in one graph."""
        specs = batches.specs_of(self.batch)
        self.level.look(batches.part_of(specs, self.parts))
        self.level.optimizer.build(self.own)

        @tf.function(autograph=False)
        def run(vector, batch):
            gradients = [tf.zeros_like(v) for v in vector]
            state = [tf.convert_to_tensor(v) for v in self.level.state]
            step = updates.noted(
                self.level, batch, state, None, gradients, (True, True)
            )
            self.level.local.steps.append(step)
            results = {
                name: hypergradient(vector, self.level, batch, self.others)
                for name, hypergradient in HYPERGRADIENTS.items()
            }
            self.level.local.steps.clear()
            return results

        return {
            name: _flat(tensors)
            for name, tensors in run(self.vector, self.batch).items()
        }

    def expected(self):
        """The same, from differences of first derivatives."""
        hessian, mixed = self._differences()
        v = _flat(self.vector)
        krylov = [v]
        for _ in range(2):
            krylov.append(hessian @ krylov[-1])
        space, _ = np.linalg.qr(np.transpose(krylov))
        image = hessian @ space
        term, series = v, v
        for _ in range(2):
            term = term - 0.3 * hessian @ term
            series = series + term
        solutions = {
            "Identity": v,
            "FiniteDifference": v,
            "SAMA": v,
            "Neumann": 0.3 * series,
            # The least error in the norm of H, and the least residual.
            "ConjugateGradient": space
            @ np.linalg.solve(space.T @ image, space.T @ v),
            "MinimalResidual": space @ np.linalg.lstsq(image, v, rcond=None)[0],
            "Unrolled": RATE * v,
        }
        return {name: -mixed.T @ u for name, u in solutions.items()}

    def _differences(self, step=1e-5):
        self.level.look_once(self.batch)
        state = [(v, v.numpy()) for v in self.level.state]
        values = [v.numpy() for v in self.own]
        size = ROWS // self.parts
        slices = [
            [t[i * size : (i + 1) * size] for t in self.batch]
            for i in range(self.parts)
        ]
        variables = [*self.own, *self.others]

        @tf.function(autograph=False)
        def gradients(x, y):
            with tf.GradientTape() as tape:
                loss = self.loss(x, y)
            found = tape.gradient(loss, [v.value for v in variables])
            return tf.concat([tf.reshape(g, [-1]) for g in found], 0)

        def at(number, index, move):
            moved = values[number].copy()
            moved.flat[index] += move
            self.own[number].assign(moved)
            for variable, value in state:
                variable.assign(value)
            return sum(gradients(*each).numpy() for each in slices) / self.parts

        rows = []
        for number, value in enumerate(values):
            for index in range(value.size):
                ahead = at(number, index, step)
                rows.append((ahead - at(number, index, -step)) / (2 * step))
            self.own[number].assign(value)
        for variable, value in state:
            variable.assign(value)
        rows = np.array(rows)
        count = sum(value.size for value in values)
        hessian = rows[:, :count]
        return (hessian + hessian.T) / 2, rows[:, count:]


def errors(kind: str, option: str) -> dict[str, float]:
    """The relative error of each hypergradient."""
    in_16_bits = option == "bfloat16"
    oracle = Case(kind, "float64", {} if in_16_bits else OPTIONS[option])
    expected = oracle.expected()
    dtype = "float32" if in_16_bits else "float64"
    found = Case(kind, dtype, OPTIONS[option]).found()
    return {
        name: np.linalg.norm(found[name] - want) / np.linalg.norm(want)
        for name, want in expected.items()
    }


def rounding(kind: str) -> float:
    """The most that a hypergradient changes when weights and examples alone
    are rounded to 16 bits."""
    exact, rounded = Case(kind, "float64"), Case(kind, "float64")

    def in_16_bits(tensor):
        return tf.cast(tf.cast(tensor, "bfloat16"), "float64")

    for variable in rounded.own + rounded.others:
        variable.assign(in_16_bits(variable.value))
    x, y = rounded.batch
    rounded.batch = in_16_bits(x), y
    others = rounded.expected()
    return max(
        np.linalg.norm(others[name] - want) / np.linalg.norm(want)
        for name, want in exact.expected().items()
    )


def _flat(tensors):
    return np.concatenate([np.ravel(t).astype("float64") for t in tensors])
