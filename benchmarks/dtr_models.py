"""The models of `dtr.py`, two of which no plan can be made for: their steps
depend on the batch.

A batch is what `train_on_batch` takes; there are as many as steps to compare.
"""

import keras
import numpy as np
import remat_models
from keras import layers

NUM_BATCHES = 5


def resnet50():
    """Of 96 x 96 pixels."""
    model, x, y = remat_models.resnet50(16)
    return model, [(x, y)] * NUM_BATCHES


def transformer():
    model, x, y = remat_models.transformer(6)
    return model, [(x, y)] * NUM_BATCHES


def lstm():
    """Two layers over sequences of 20 to 40 steps."""
    width, num_rows = 64, 256
    inputs = keras.Input((None, width))
    x = layers.LSTM(128, return_sequences=True)(inputs)
    x = layers.LSTM(128)(x)
    outputs = layers.Dense(remat_models.NUM_CLASSES)(x)
    rng = np.random.default_rng(0)
    batches = []
    for length in (30, 40, 20, 35, 25):
        x = rng.normal(size=(num_rows, length, width)).astype("float32")
        batches.append((x, np.arange(num_rows) % remat_models.NUM_CLASSES))
    return keras.Model(inputs, outputs, name="lstm"), batches


class TreeCell(layers.Layer):
    """Joins the states of two nodes in a binary TreeLSTM (Tai et al., 2015)."""

    def __init__(self, width):
        super().__init__()
        self.gates = layers.Dense(5 * width)

    def call(self, left, right):
        (h_left, c_left), (h_right, c_right) = left, right
        gates = self.gates(keras.ops.concatenate([h_left, h_right], -1))
        i, o, u, f, g = keras.ops.split(gates, 5, axis=-1)
        c = keras.ops.sigmoid(i) * keras.ops.tanh(u)
        c += keras.ops.sigmoid(f) * c_left + keras.ops.sigmoid(g) * c_right
        return keras.ops.sigmoid(o) * keras.ops.tanh(c), c


class TreeLSTM(keras.Model):
    """A binary TreeLSTM that recurses in Python.

    All rows of a batch have the same tree: `children` holds the two children
    of every inner node, the root's last; below `num_leaves` they are leaves.
    """

    def __init__(self, width):
        super().__init__(name="treelstm")
        self.words = layers.Embedding(1000, width)
        self.leaf = layers.Dense(2 * width)
        self.cell = TreeCell(width)
        self.head = layers.Dense(remat_models.NUM_CLASSES)

    def call(self, inputs):
        words, children = inputs
        children = np.asarray(children)
        num_leaves = len(children) + 1

        def state(node):
            if node < num_leaves:
                leaf = self.leaf(self.words(words[:, node]))
                return tuple(keras.ops.split(leaf, 2, axis=-1))
            left, right = children[node - num_leaves]
            return self.cell(state(left), state(right))

        return self.head(state(num_leaves + len(children) - 1)[0])


def treelstm():
    """Random trees of 24 to 40 leaves."""
    num_rows = 256
    rng = np.random.default_rng(0)
    batches = []
    for num_leaves in (32, 40, 24, 36, 28):
        words = rng.integers(0, 1000, (num_rows, num_leaves))
        x = words, _random_tree(rng, num_leaves)
        batches.append((x, np.arange(num_rows) % remat_models.NUM_CLASSES))
    model = TreeLSTM(64)
    model(batches[0][0])
    return model, batches


def _random_tree(rng, num_leaves):
    """Joins two nodes that are left, until one is."""
    nodes, children = list(range(num_leaves)), []
    while len(nodes) > 1:
        pair = [nodes.pop(rng.integers(len(nodes))) for _ in range(2)]
        children.append(pair)
        nodes.append(num_leaves + len(children) - 1)
    return np.array(children)


MODELS = {
    "ResNet50": resnet50,
    "TreeLSTM": treelstm,
    "LSTM": lstm,
    "transformer": transformer,
}
