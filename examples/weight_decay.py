"""A weight decay for each weight, learned, and compared with a grid's.

    python examples/weight_decay.py

A softmax regression learns digits from few images, whose pixels stand among as
many numbers that say nothing. A decay keeps the weights of these small. The
lower level trains the regression with a decay for each weight. The upper level
moves the decays to where the regression does better on other images, by the
implicit function theorem (Lorraine et al., AISTATS 2020). With the same number
of steps it is compared, on images that were not used,

* with "grid": one decay for all weights, of a grid the one that is best on the
  other images, and
* with "all": this decay, and the images of both levels to learn from.

Decays of single weights learn from the other images, by which the grid only
chooses. So "all" is the fair comparison. Learned decays are better than "grid"
in 5 seeds of 5, 0.884 against 0.660 in the mean, and than "all" in 3 of 5,
0.884 against 0.878.
"""

import argparse

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops
from sklearn.datasets import load_digits

from kmem.multilevel import ConjugateGradient
from kmem.multilevel import Level
from kmem.multilevel import Program

NUM_PIXELS, NUM_CLASSES = 64, 10
TRAIN, OTHER = 100, 400  # images
GRID = [0.0001, 0.001, 0.01, 0.1, 1.0]
STEPS = 20  # of the regression before one of the decays
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Decays(keras.Model):
    """A positive decay for each weight."""

    def __init__(self, start):
        super().__init__(name="decays")
        shape = 2 * NUM_PIXELS, NUM_CLASSES
        logs = keras.initializers.Constant(np.log(start))
        self.logs = self.add_weight(shape=shape, initializer=logs)
        self.built = True

    def call(self, weights):
        return 0.5 * ops.sum(ops.exp(self.logs) * ops.square(weights))


def make_data(random):
    """Images to learn from, to choose decays by, and to test with."""
    images, labels = load_digits(return_X_y=True)
    noise = random.normal(size=images.shape)
    x = np.concatenate([images / 8 - 1, noise], axis=1).astype("float32")
    order = random.permutation(len(x))
    ends = [TRAIN, TRAIN + OTHER]
    return zip(
        np.split(x[order], ends), np.split(labels[order], ends), strict=True
    )


def train(images, decay, updates, other=None):
    """A regression, trained with a decay, and its decays: learned if there are
    `other` images."""
    layer = layers.Dense(NUM_CLASSES, kernel_initializer="zeros")
    model = keras.Sequential(
        [keras.Input((2 * NUM_PIXELS,)), layer], name="regression"
    )
    decays = Decays(decay)

    def loss(x, y):
        return cross_entropy(y, model(x))

    def decayed_loss(x, y):
        return loss(x, y) + decays(layer.kernel)

    levels = [
        Level(
            model,
            decayed_loss,
            keras.optimizers.SGD(0.1, momentum=0.9),
            unroll_steps=STEPS,
            hypergradient=ConjugateGradient(10),
        )
    ]
    data = {"regression": tf.data.Dataset.from_tensors(images).repeat()}
    steps = STEPS * updates
    if other is not None:
        levels.append(Level(decays, loss, keras.optimizers.Adam(0.1)))
        data["decays"] = tf.data.Dataset.from_tensors(other).repeat()
        steps = updates
    Program(levels).fit(data, steps_per_epoch=steps, verbose=0)
    return model, np.exp(decays.logs.numpy())


def accuracy(model, images):
    x, y = images
    return np.mean(np.argmax(model.predict(x, verbose=0), axis=-1) == y)


def compare(seed, updates):
    """Accuracies on new images, and the learned decays."""
    keras.utils.set_random_seed(seed)
    images, other, test = make_data(np.random.default_rng(seed))
    tried = [train(images, decay, updates)[0] for decay in GRID]
    best = int(np.argmax([accuracy(model, other) for model in tried]))
    both = tuple(map(np.concatenate, zip(images, other, strict=True)))
    on_both, _ = train(both, GRID[best], updates)
    learned, decays = train(images, GRID[best], updates, other)
    models = tried[best], on_both, learned
    return [accuracy(model, test) for model in models], decays


def draw(names, accuracies, decays):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    left.plot(names, np.transpose(accuracies), "o-", color="0.7")
    left.plot(names, np.mean(accuracies, axis=0), "o-", label="mean of seeds")
    left.set(ylabel="accuracy on new images")
    left.legend(frameon=False)
    logs = np.log10(decays)
    for part, label in zip(np.split(logs, 2), ["pixels", "noise"], strict=True):
        right.hist(part.ravel(), bins=30, alpha=0.6, label=label)
    right.set(xlabel="learned decay, log10", ylabel="weights, of the last seed")
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig("weight_decay.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100)
    arguments = parser.parse_args()
    names = ["grid", "all", "learned"]
    print("seed  " + "".join(f"{name:>9}" for name in names))
    found, decays = [], None
    for seed in range(arguments.seeds):
        accuracies, decays = compare(seed, arguments.updates)
        found.append(accuracies)
        print(f"{seed:4}  " + "".join(f"{value:9.3f}" for value in accuracies))
    means = np.mean(found, axis=0)
    print("mean  " + "".join(f"{value:9.3f}" for value in means))
    draw(names, found, decays)


if __name__ == "__main__":
    main()
