"""Which sources help a target with few labels, learned in three levels.

    python examples/domain_adaptation.py

The target is noisy images of digits, of which few have labels. There are many
clean images from eight sources. One source's digits are upright, as are the
target's. Those of the others are turned or mirrored. A net is trained on the
sources and then tuned on the target. How much does each source's loss count?

1. The lowest level trains a net on the sources, with a weight for each.
2. The middle level trains a net on half of the target's labelled images, and
   keeps it near to the first one, by a penalty of their distance.
3. The top level learns the weights with which the second net does well on the
   other half.

The gradient goes through both nets. This is meta-parameterized pre-training
(Raghu et al., NeurIPS 2021) with the penalty of implicit MAML (Rajeswaran et
al., NeurIPS 2019). Then nets are trained anew with the weights, and tuned on
all labelled images of the target. They are compared with nets for which all
sources count equally, and with nets that see the target alone. All take as
many steps.

In 10 seeds of 10 the learned weights are better than equal weights, by 0.07 in
the mean. In 8 of 10 they are better than the target alone, by 0.05 in the mean.
With equal weights the sources do harm.
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

NUM_SOURCES, NUM_CLASSES, BATCH_SIZE = 8, 10, 50
SOURCE_IMAGES, LABELLED, NOISE = 1000, 10, 0.3
TUNING_STEPS = 100
cross_entropy = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="none"
)


def make_model(name):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(NUM_CLASSES),
        ],
        name=name,
    )


class SourceWeights(keras.Model):
    """A positive weight for each source: one in the mean."""

    def __init__(self):
        super().__init__(name="weights")
        shape = (NUM_SOURCES,)
        self.scores = self.add_weight(shape=shape, initializer="zeros")
        self.built = True

    def call(self, sources):
        return ops.take(NUM_SOURCES * ops.softmax(self.scores), sources)


def make_data(random):
    """Images of the sources; those of the target with labels, and others."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = random.permutation(len(images))
    images, labels = images[order], labels[order]

    x, y = images[:SOURCE_IMAGES], labels[:SOURCE_IMAGES]
    sources = random.integers(NUM_SOURCES, size=len(x), dtype="int32")
    views = np.stack(
        [
            np.rot90(side, turns, axes=(1, 2))
            for side in (x, x[:, :, ::-1])
            for turns in range(4)
        ]
    )
    source = views[sources, np.arange(len(x))], y, sources

    x, y = images[SOURCE_IMAGES:], labels[SOURCE_IMAGES:]
    x = x + NOISE * random.normal(size=x.shape).astype("float32")
    rows = [np.flatnonzero(y == label) for label in range(NUM_CLASSES)]
    few = np.stack([of_class[:LABELLED] for of_class in rows])
    test = np.concatenate([of_class[LABELLED:] for of_class in rows])
    halves = [
        (x[half.ravel()], y[half.ravel()]) for half in np.split(few, 2, axis=1)
    ]
    return source, halves, (x[test], y[test])


def batches_of(*arrays):
    data = tf.data.Dataset.from_tensor_slices(arrays)
    data = data.shuffle(len(arrays[0]), seed=0).repeat()
    return data.batch(BATCH_SIZE, drop_remainder=True)


def source_level(model, weights):
    def loss(x, y, sources):
        of_images = weights(sources)
        # The weights say which sources matter, not how long a step is.
        of_images = of_images / (ops.mean(of_images) + 1e-6)
        return ops.mean(of_images * cross_entropy(y, model(x)))

    optimizer = keras.optimizers.SGD(0.1)
    return Level(model, loss, optimizer, hypergradient=Identity())


def target_loss(model):
    return lambda x, y: ops.mean(cross_entropy(y, model(x)))


def learn_weights(source, halves, steps):
    first, second = make_model("first"), make_model("second")
    weights = SourceWeights()
    loss = target_loss(second)

    def loss_near_first(x, y):
        pairs = zip(
            second.trainable_variables, first.trainable_variables, strict=True
        )
        distance = sum(ops.sum(ops.square(u - v)) for u, v in pairs)
        return loss(x, y) + 0.3 * distance

    program = Program(
        [
            source_level(first, weights),
            Level(
                second,
                loss_near_first,
                keras.optimizers.SGD(0.1),
                hypergradient=Identity(),
            ),
            Level(weights, loss, keras.optimizers.Adam(0.02)),
        ]
    )
    data = {
        "first": batches_of(*source),
        "second": batches_of(*halves[0]),
        "weights": batches_of(*halves[1]),
    }
    program.fit(data, steps_per_epoch=steps, verbose=0)
    return weights


def train(source, weights, target, steps):
    """A net, trained on the sources if there are weights, and tuned."""
    model = make_model("net")
    if weights is not None:
        program = Program([source_level(model, weights)])
        data = {"net": batches_of(*source)}
        program.fit(data, steps_per_epoch=steps, verbose=0)
        steps = 0
    level = Level(model, target_loss(model), keras.optimizers.SGD(0.1))
    data = {"net": batches_of(*target)}
    steps += TUNING_STEPS
    Program([level]).fit(data, steps_per_epoch=steps, verbose=0)
    return model


def compare(seed, steps):
    """Accuracies on the target, and the weights of the sources."""
    keras.utils.set_random_seed(seed)
    source, halves, (x, y) = make_data(np.random.default_rng(seed))
    target = [np.concatenate(pair) for pair in zip(*halves, strict=True)]
    learned = learn_weights(source, halves, steps)
    accuracies = []
    for weights in (None, SourceWeights(), learned):
        keras.utils.set_random_seed(seed)  # the same first weights for all
        model = train(source, weights, target, steps)
        predicted = ops.convert_to_numpy(ops.argmax(model(x), axis=-1))
        accuracies.append(np.mean(predicted == y))
    return accuracies, ops.convert_to_numpy(learned(np.arange(NUM_SOURCES)))


def draw(names, accuracies, weights):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    left.plot(names, np.transpose(accuracies), "o-", color="0.7")
    left.plot(names, np.mean(accuracies, axis=0), "o-", label="mean of seeds")
    left.set(ylabel="accuracy on the target")
    left.legend(frameon=False)
    sides, turns = ["", "mirrored "], [0, 90, 180, 270]
    sources = [f"{side}{turn}°" for side in sides for turn in turns]
    right.barh(sources, np.mean(weights, axis=0))
    right.set(xlabel="weight of a source, mean of seeds")
    figure.tight_layout()
    figure.savefig("domain_adaptation.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    names = ["target alone", "equal weights", "learned weights"]
    print("seed  " + "".join(f"{name:>17}" for name in names))
    found = []
    for seed in range(arguments.seeds):
        found.append(compare(seed, arguments.steps))
        print(f"{seed:4}  " + "".join(f"{a:17.3f}" for a in found[-1][0]))
    accuracies, weights = map(np.array, zip(*found, strict=True))
    means = accuracies.mean(axis=0)
    print("mean  " + "".join(f"{value:17.3f}" for value in means))
    print(f"weights of the sources: {weights.mean(axis=0).round(2)}")
    draw(names, accuracies, weights)


if __name__ == "__main__":
    main()
