"""A penalty for each coefficient of a ridge regression, learned, and checked.

The penalties are those with which the regression does best on other rows. For
ridge regression all is known in a closed form: the coefficients
w = (X'X/n + diag(p))^-1 X'y/n, and the gradient of the loss on the other rows
with regard to the penalties, through w. What a program of two levels finds is
printed beside them.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Neumann
from kmem.multilevel import Program

ROWS, SIZE = 64, 8
keras.config.set_floatx("float64")
random = np.random.default_rng(0)
# Half of the coefficients are zero.
truth = random.normal(size=SIZE) * (np.arange(SIZE) % 2)


def rows():
    x = random.normal(size=(ROWS, SIZE))
    return x, x @ truth + random.normal(size=ROWS)


class Numbers(keras.Model):
    """Some numbers to learn."""

    def __init__(self, name):
        super().__init__(name=name)
        self.entries = self.add_weight(
            shape=(SIZE,), initializer="zeros", name="entries"
        )
        self.built = True


coefficients, logits = Numbers("ridge"), Numbers("penalties")


def squared_error(x, y):
    return 0.5 * ops.mean(ops.square(ops.matmul(x, coefficients.entries) - y))


def penalized_error(x, y):
    """Lower level, with penalties between 0 and 1."""
    penalties = ops.sigmoid(logits.entries)
    squares = ops.square(coefficients.entries)
    return squared_error(x, y) + 0.5 * ops.sum(penalties * squares)


train, other = rows(), rows()
lower = Level(
    coefficients,
    penalized_error,
    keras.optimizers.SGD(0.5),
    unroll_steps=50,
    hypergradient=ConjugateGradient(SIZE),
)
upper = Level(logits, squared_error, keras.optimizers.Adam(0.05))


def penalties_now():
    return 1 / (1 + np.exp(-logits.entries.numpy()))


def closed_form():
    """The coefficients, and the gradient with regard to the logits."""
    (x, y), (other_x, other_y) = train, other
    penalties = penalties_now()
    slopes = penalties * (1 - penalties)
    hessian = x.T @ x / ROWS + np.diag(penalties)
    w = np.linalg.solve(hessian, x.T @ y / ROWS)
    vector = other_x.T @ (other_x @ w - other_y) / ROWS
    return w, -slopes * w * np.linalg.solve(hessian, vector)


def error(found, exact):
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


w, exact = closed_form()
coefficients.entries.assign(w)
vector = upper.gradient(other, coefficients.trainable_variables)
print("relative error of the gradient with regard to the penalties")
for hypergradient in (
    ConjugateGradient(SIZE),
    Neumann(iterations=5, alpha=0.5),
    Neumann(iterations=50, alpha=0.5),
    Identity(),
    FiniteDifference(),
):
    (found,) = hypergradient(vector, lower, train, logits.trainable_variables)
    print(f"  {hypergradient}: {error(found.numpy(), exact):.1e}")

batches = {
    "ridge": tf.data.Dataset.from_tensors(train),
    "penalties": tf.data.Dataset.from_tensors(other),
}
before = squared_error(*other).numpy()
program = Program([lower, upper])
program.fit(batches, steps_per_epoch=100, epochs=2, verbose=0)
after = squared_error(*other).numpy()
print(f"error on the other rows: {before:.4f}, then {after:.4f}")
w, _ = closed_form()
distance = error(coefficients.entries.numpy(), w)
print(f"coefficients: {distance:.1e} away from the closed form")
print("coefficient of the truth, penalty")
for number, penalty in zip(truth, penalties_now(), strict=True):
    print(f"  {number:+.2f}  {penalty:.3f}")
