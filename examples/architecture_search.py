"""The operations of a network, learned: a tiny DARTS.

    python examples/architecture_search.py

A network for scikit-learn's digits has three places: for a convolution, an
activation and a pooling. Each has three operations to choose from, with equally
many weights. During the search a place holds all three and mixes what they
give. The lower level trains the network on some images. The upper level learns
the shares of the mixtures on others, through the last update of the network
(Liu et al., ICLR 2019). The operations with the largest shares are then trained
from scratch on both, and so are the other 26 choices of the same space.

With the seeds 0, 1 and 2 the chosen network has an accuracy of 0.91, 0.92 and
0.94. The others have 0.81, 0.81 and 0.85 in the mean. The chosen one is better
than 17, 17 and 22 of the 26, and not the best. The activation that does nothing
won each time, as skip connections do in other searches.
"""

import argparse
import itertools

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops
from sklearn.datasets import load_digits

from kmem.multilevel import Level
from kmem.multilevel import Program
from kmem.multilevel import Unrolled

FILTERS, BATCH_SIZE = 16, 50
# All convolutions have nine weights for each filter.
PLACES = {
    "convolution": {"3 x 3": (3, 3), "1 x 9": (1, 9), "9 x 1": (9, 1)},
    "activation": {
        "relu": ops.relu,
        "tanh": ops.tanh,
        "none": lambda x: x,
    },
    "pooling": {
        "maximum": lambda x: ops.max_pool(x, 4),
        "mean": lambda x: ops.average_pool(x, 4),
        "minimum": lambda x: -ops.max_pool(-x, 4),
    },
}
NAMES = [list(place) for place in PLACES.values()]
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mix(shares, x):
    return ops.sum(ops.stack(x, axis=-1) * shares, axis=-1)


class Network(keras.Model):
    """For each place the names of its operations: one, or several to mix."""

    def __init__(self, names):
        super().__init__(name="network")
        kinds, activations, poolings = (
            [place[name] for name in chosen]
            for place, chosen in zip(PLACES.values(), names, strict=True)
        )
        self.convolutions = [
            layers.Conv2D(FILTERS, size, padding="same") for size in kinds
        ]
        self.activations, self.poolings = activations, poolings
        self.head = layers.Dense(10)
        self.flatten = layers.Flatten()

    def call(self, x, shares=None):
        for number, place in enumerate(
            [self.convolutions, self.activations, self.poolings]
        ):
            each = [operation(x) for operation in place]
            x = each[0] if shares is None else mix(shares[number], each)
        return self.head(self.flatten(x))


class Architecture(keras.Model):
    """For each place the shares of its operations."""

    def __init__(self):
        super().__init__(name="architecture")
        shape = (len(NAMES), len(NAMES[0]))
        self.scores = self.add_weight(shape=shape, initializer="zeros")
        self.built = True

    def shares(self):
        return ops.softmax(self.scores)


def batches_of(x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.shuffle(len(x), seed=0)
    return data.batch(BATCH_SIZE, drop_remainder=True)


def search(train, other, epochs):
    """The shares after each epoch: (epochs, places, operations)."""
    network = Network(NAMES)
    architecture = Architecture()
    network(train[0][:1], architecture.shares())  # makes its weights

    def loss(x, y):
        logits = network(x, architecture.shares())
        return cross_entropy(y, logits)

    lower = Level(
        network, loss, keras.optimizers.Adam(0.005), hypergradient=Unrolled(1)
    )
    upper = Level(architecture, loss, keras.optimizers.Adam(0.05))
    data = {"network": batches_of(*train), "architecture": batches_of(*other)}
    alone = {"network": data["network"]}
    Program([lower]).fit(alone, epochs=10, verbose=0)
    shares = []
    Program([lower, upper]).fit(
        data,
        epochs=epochs,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_: shares.append(
                    ops.convert_to_numpy(architecture.shares())
                )
            )
        ],
        verbose=0,
    )
    return np.stack(shares)


def accuracy(choice, train, test, epochs):
    """Of a network of these operations, trained from scratch."""
    network = Network([[name] for name in choice])
    network.compile("adam", cross_entropy, metrics=["accuracy"])
    network.optimizer.learning_rate = 0.01
    network.fit(*train, BATCH_SIZE, epochs=epochs, verbose=0)
    return network.evaluate(*test, batch_size=500, verbose=0)[1]


def draw(shares):
    figure, axes = plt.subplots(1, len(PLACES), figsize=(9, 3), sharey=True)
    for number, (ax, place) in enumerate(zip(axes, PLACES, strict=True)):
        ax.plot(range(1, len(shares) + 1), shares[:, number])
        ax.set(title=place, xlabel="epoch", ylim=(0, 1))
        ax.legend(NAMES[number], frameon=False)
    axes[0].set_ylabel("share")
    figure.tight_layout()
    figure.savefig("architecture_search.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", type=int, default=20, help="epochs")
    parser.add_argument("--epochs", type=int, default=10, help="of a choice")
    parser.add_argument("--others", type=int, default=26, help="choices")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    keras.utils.set_random_seed(arguments.seed)
    random = np.random.default_rng(arguments.seed)

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = random.permutation(len(images))
    train, other, test = (
        (images[rows], labels[rows]) for rows in np.split(order, [400, 800])
    )
    shares = search(train, other, arguments.search)
    draw(shares)

    best = shares[-1].argmax(axis=-1)
    found = tuple(
        names[number] for names, number in zip(NAMES, best, strict=True)
    )
    choices = list(itertools.product(*NAMES))
    choices.remove(found)
    random.shuffle(choices)
    both = [np.concatenate(pair) for pair in zip(train, other, strict=True)]
    print("accuracy on images that were not used")
    accuracies = []
    for choice in [found, *choices[: arguments.others]]:
        accuracies.append(accuracy(choice, both, test, arguments.epochs))
        which = "chosen" if choice == found else "other"
        print(f"  {which:6}  {accuracies[-1]:.3f}  {', '.join(choice)}")
    chosen, *others = accuracies
    print(f"chosen {chosen:.3f}, others {np.mean(others):.3f} in the mean")
    worse = np.sum(chosen > np.array(others))
    print(f"the chosen one is better than {worse} of {len(others)} others")


if __name__ == "__main__":
    main()
