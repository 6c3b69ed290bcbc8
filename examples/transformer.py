"""A language model from a config, with random weights, in parts of a batch.

The config has the names of KerasHub's backbones. Sequences have different
lengths, so that the loss is divided by the tokens that are not masked: the
update is that of the whole batch all the same. The one line that has changed
from plain Keras is marked.
"""

import keras
import numpy as np
from keras import layers
from keras import ops

import kmem  # before the first TensorFlow operation

CONFIG = {
    "vocabulary_size": 64,
    "num_layers": 1,
    "num_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 64,
    "dropout": 0.1,
    "max_sequence_length": 24,
}


class TokensAndPositions(layers.Layer):
    """What a token is, and where; padding is 0 and masked."""

    def __init__(self, vocabulary_size, length, size, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(vocabulary_size, size, mask_zero=True)
        self.positions = layers.Embedding(length, size)

    def call(self, ids):
        return self.tokens(ids) + self.positions(ops.arange(ids.shape[1]))

    def compute_mask(self, ids, mask=None):
        return ops.not_equal(ids, 0)


def from_config(config):
    size, dropout = config["hidden_dim"], config["dropout"]
    ids = keras.Input((config["max_sequence_length"],), dtype="int32")
    x = TokensAndPositions(config["vocabulary_size"], ids.shape[1], size)(ids)
    for _ in range(config["num_layers"]):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(
            config["num_heads"], size // config["num_heads"], dropout=dropout
        )(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(config["intermediate_dim"], "gelu")(y)
        y = layers.Dropout(dropout)(layers.Dense(size)(y))
        x = layers.Add()([x, y])
    x = layers.LayerNormalization()(x)
    return keras.Model(ids, layers.Dense(config["vocabulary_size"])(x))


def counting_sequences(config, rows):
    """Each counts on from somewhere, for a while."""
    random = np.random.default_rng(0)
    length = config["max_sequence_length"] + 1
    count = config["vocabulary_size"] - 1
    start = random.integers(0, count, (rows, 1))
    ids = 1 + (start + np.arange(length)) % count
    lengths = random.integers(4, length + 1, (rows, 1))
    ids = np.where(np.arange(length) < lengths, ids, 0)
    return ids[:, :-1], ids[:, 1:]


keras.utils.set_random_seed(0)
model = from_config(CONFIG)
model.compile(
    optimizer=keras.optimizers.AdamW(3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=0
    ),
    weighted_metrics=["sparse_categorical_accuracy"],
)
x, y = counting_sequences(CONFIG, 512)
kmem.wrap(model).fit(  # was: model.fit(
    x,
    y,
    batch_size=128,
    epochs=2,
    verbose=2,
    microbatches=4,
)
