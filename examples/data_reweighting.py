"""Weights for the images of a long-tailed data set, learned from balanced ones.

    python examples/data_reweighting.py

A classifier learns from many images of some classes and few of others. A small
net sees each image's loss and gives it a weight, and learns the weights with
which the classifier does well on a few balanced images (Meta-Weight-Net, Shu
et al., NeurIPS 2019). The defaults are those of Betty's page on memory, for a
GPU: ResNet50 with a stem for images of 32 x 32, and batches of 100 at both
levels. A gradient of a gradient holds several times what a gradient does; the
options of the levels make room for it.

In small, on a CPU: `--data digits --blocks 1 1 1 1 --width 16 --batch 20`.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import ops

import kmem  # before the first TensorFlow operation
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Program

NUM_CLASSES = 10
cross_entropy = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="none"
)


def resnet(blocks, width, group_norm=False):
    """ResNet50, for 3, 4, 6 and 3 blocks, with a stem that keeps the size.

    With `group_norm` its numbers do not depend on the parts of a batch.
    """

    def convolve(x, filters, kernel_size, strides=1):
        x = layers.Conv2D(
            filters, kernel_size, strides, padding="same", use_bias=False
        )(x)
        if group_norm:
            return layers.GroupNormalization(8)(x)
        return layers.BatchNormalization()(x)

    def bottleneck(x, filters, strides):
        y = layers.ReLU()(convolve(x, filters, 1))
        y = layers.ReLU()(convolve(y, filters, 3, strides))
        y = convolve(y, 4 * filters, 1)
        if x.shape != y.shape:
            x = convolve(x, 4 * filters, 1, strides)
        return layers.ReLU()(layers.Add()([x, y]))

    inputs = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolve(inputs, width, 3))
    for stage, count in enumerate(blocks):
        for number in range(count):
            strides = 2 if stage > 0 and number == 0 else 1
            x = bottleneck(x, width * 2**stage, strides)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES)(x), name="classifier")


def meta_weight_net():
    return keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(100, "relu"),
            layers.Dense(1, "sigmoid"),
        ],
        name="reweight",
    )


def make_levels(classifier, reweight, hypergradient, **options):
    """The two levels, with the same memory options for both."""

    def losses(x, y):
        return cross_entropy(y, classifier(x, training=True))

    def weighted_loss(x, y):
        """Lower level: what the classifier minimises."""
        each = losses(x, y)
        weights = reweight(ops.stop_gradient(each)[:, None])[:, 0]
        return ops.mean(weights * each)

    def balanced_loss(x, y):
        """Upper level: what good weights achieve."""
        return ops.mean(losses(x, y))

    return [
        Level(
            classifier,
            weighted_loss,
            keras.optimizers.SGD(0.01, momentum=0.9),
            hypergradient=hypergradient,
            **options,
        ),
        Level(
            reweight,
            balanced_loss,
            keras.optimizers.Adam(1e-5),
            **options,
        ),
    ]


def load(name):
    """Images of 32 x 32 with labels: to learn from, and to test with."""
    if name == "cifar10":
        try:
            (x, y), test = keras.datasets.cifar10.load_data()
            return [
                (images.astype("float32") / 255, labels[:, 0])
                for images, labels in [(x, y), test]
            ]
        except Exception as error:  # as Keras raises for all that fails
            print(f"CIFAR-10 is not to be had: {error}")
            print("The digits of scikit-learn are used instead.")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    x = x.repeat(4, axis=1).repeat(4, axis=2).repeat(3, axis=3)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return (x[:-300], y[:-300]), (x[-300:], y[-300:])


def long_tailed(x, y, imbalance, num_balanced):
    """Images with ever fewer of each class, and others with equally many.

    The last class has `imbalance` times fewer than the first.
    """
    each = num_balanced // NUM_CLASSES
    balanced, rest = [], []
    most = min(np.bincount(y)) - each
    for label in range(NUM_CLASSES):
        found = np.flatnonzero(y == label)
        count = most * imbalance ** (-label / (NUM_CLASSES - 1))
        balanced.append(found[:each])
        rest.append(found[each : each + max(1, round(count))])
    balanced, rest = np.concatenate(balanced), np.concatenate(rest)
    return (x[rest], y[rest]), (x[balanced], y[balanced])


def batches_of(x, y, rows):
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.shuffle(len(x), seed=0).repeat()
    return data.batch(rows, drop_remainder=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default="cifar10", choices=["cifar10", "digits"]
    )
    parser.add_argument("--imbalance", type=float, default=100)
    parser.add_argument("--balanced", type=int, default=1000)
    parser.add_argument("--blocks", type=int, nargs=4, default=[3, 4, 6, 3])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--mixed-precision", choices=["bfloat16", "float16"])
    parser.add_argument("--remat", default="auto")
    return parser.parse_args()


def main():
    arguments = parse()
    keras.utils.set_random_seed(0)
    (x, y), (test_x, test_y) = load(arguments.data)
    # At most half of what there is of the rarest class.
    num_balanced = min(
        arguments.balanced, NUM_CLASSES * (min(np.bincount(y)) // 2)
    )
    many, few = long_tailed(x, y, arguments.imbalance, num_balanced)
    print(f"{len(many[0])} images, {np.bincount(many[1])} of each class,")
    print(f"and {len(few[0])} balanced ones")

    options = {
        "microbatches": arguments.microbatches,
        "mixed_precision": arguments.mixed_precision,
        "remat": arguments.remat,
    }
    classifier = resnet(arguments.blocks, arguments.width)
    program = Program(
        make_levels(classifier, meta_weight_net(), Identity(), **options)
    )
    data = {
        "classifier": batches_of(*many, arguments.batch),
        "reweight": batches_of(*few, arguments.batch),
    }
    program.summary(data)
    classifier.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with kmem.memory.track() as usage:
        program.fit(
            data,
            steps_per_epoch=arguments.steps,
            epochs=arguments.epochs,
            validation_data=batches_of(test_x, test_y, arguments.batch).take(
                len(test_x) // arguments.batch
            ),
            validation_model=classifier,
            verbose=2,
        )
    print(f"peak {usage.peak_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
