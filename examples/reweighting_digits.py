"""A weight for each class of long-tailed digits, learned from balanced ones.

    python examples/reweighting_digits.py

There are 100 images of one digit, ever fewer of the others, and 2 of the last.
Besides there are 5 images of each digit, which are the balanced ones. The
lower level trains a classifier on all of these images, with a weight for each
class. The upper level learns the weights with which one update of the
classifier makes a smaller loss on the balanced images. This is the way of
learning to reweight (Ren et al., ICML 2018) and of Meta-Weight-Net (Shu et al.,
NeurIPS 2019), with a weight for each class in the place of one for each image.

It is compared with the same number of updates of the same classifier

* "tail": on the long-tailed images alone,
* "all": on the long-tailed and the balanced images, without weights, and
* "counts": on the same, with a weight of one over the images of the class.

Learned weights are better than "tail" and "all" in 10 seeds of 10: 0.921 in the
mean, against 0.746 and 0.875. They are as good as "counts", 0.923, which knows
what is wrong with the images.
"""

import argparse

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops
from sklearn.datasets import load_digits

from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Program

NUM_CLASSES, BATCH_SIZE = 10, 50
TEST, BALANCED, MOST = 50, 5, 100  # images of a class
cross_entropy = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="none"
)


def make_classifier():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(NUM_CLASSES),
        ],
        name="classifier",
    )


class ClassWeights(keras.Model):
    """A positive weight for each class: one in the mean."""

    def __init__(self):
        super().__init__(name="weights")
        shape = (NUM_CLASSES,)
        self.scores = self.add_weight(shape=shape, initializer="zeros")
        self.built = True

    def call(self, labels):
        return ops.take(NUM_CLASSES * ops.softmax(self.scores), labels)


def fixed(weights):
    weights = weights.astype("float32")
    return lambda labels: ops.take(weights, labels)


def long_tailed(imbalance, random):
    """Images to test with, those of the long tail, and the balanced ones."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    test, tail, balanced = [], [], []
    for place, label in enumerate(random.permutation(NUM_CLASSES)):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = MOST * imbalance ** (-place / (NUM_CLASSES - 1))
        parts = np.cumsum([TEST, BALANCED, max(1, round(count))])
        for found, part in zip(
            [test, balanced, tail], np.split(rows, parts), strict=False
        ):
            found.append(part)
    rows = [np.concatenate(found) for found in (test, tail, balanced)]
    return [(images[part], labels[part]) for part in rows]


def batches_of(x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.shuffle(len(x), seed=0).repeat()
    return data.batch(BATCH_SIZE, drop_remainder=True)


def train(images, steps, weights, balanced=None):
    """A classifier, trained with weights, learned if there are `balanced`."""
    classifier = make_classifier()

    def weighted_loss(x, y):
        each = cross_entropy(y, classifier(x, training=True))
        of_images = weights(y)
        # The weights say which images matter, not how long a step is.
        return ops.mean(of_images / ops.mean(of_images) * each)

    def balanced_loss(x, y):
        return ops.mean(cross_entropy(y, classifier(x, training=True)))

    levels = [
        Level(
            classifier,
            weighted_loss,
            keras.optimizers.SGD(0.1),
            hypergradient=Identity(),
        )
    ]
    data = {"classifier": batches_of(*images)}
    if balanced is not None:
        levels.append(
            Level(weights, balanced_loss, keras.optimizers.Adam(0.05))
        )
        data["weights"] = batches_of(*balanced)
    Program(levels).fit(data, steps_per_epoch=steps, verbose=0)
    return classifier


def compare(seed, imbalance, steps):
    """Accuracies on balanced images, counts of images and learned weights."""
    random = np.random.default_rng(seed)
    test, tail, balanced = long_tailed(imbalance, random)
    both = [np.concatenate(pair) for pair in zip(tail, balanced, strict=True)]
    counts = np.bincount(both[1])
    alike, by_counts = fixed(np.ones(NUM_CLASSES)), fixed(1 / counts)
    learned = ClassWeights()
    accuracies = []
    for arguments in (
        (tail, steps, alike),
        (both, steps, alike),
        (both, steps, by_counts),
        (both, steps, learned, balanced),
    ):
        keras.utils.set_random_seed(seed)  # the same first weights for all
        classifier = train(*arguments)
        predicted = ops.argmax(classifier(test[0]), axis=-1)
        accuracies.append(np.mean(ops.convert_to_numpy(predicted) == test[1]))
    weights = ops.convert_to_numpy(learned(np.arange(NUM_CLASSES)))
    return accuracies, counts, weights


def draw(names, accuracies, counts, weights):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    left.plot(names, np.transpose(accuracies), "o-", color="0.7")
    left.plot(names, np.mean(accuracies, axis=0), "o-", label="mean of seeds")
    left.set(ylabel="accuracy on balanced images")
    left.legend(frameon=False)
    right.scatter(counts, weights)
    right.set(xscale="log", xlabel="images of a class", ylabel="weight")
    figure.tight_layout()
    figure.savefig("reweighting_digits.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--imbalance", type=float, default=50)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    names = ["tail", "all", "counts", "learned"]
    print("seed  " + "".join(f"{name:>9}" for name in names))
    found = []
    for seed in range(arguments.seeds):
        found.append(compare(seed, arguments.imbalance, arguments.steps))
        print(
            f"{seed:4}  " + "".join(f"{value:9.3f}" for value in found[-1][0])
        )
    accuracies, counts, weights = map(np.array, zip(*found, strict=True))
    means = accuracies.mean(axis=0)
    print("mean  " + "".join(f"{value:9.3f}" for value in means))
    for name, others in zip(names[:-1], accuracies.T, strict=False):
        wins = np.sum(accuracies[:, -1] > others)
        print(f"learned beats {name} in {wins} of {len(found)} seeds")
    draw(names, accuracies, counts, weights)


if __name__ == "__main__":
    main()
