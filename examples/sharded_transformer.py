"""A transformer whose training state is divided between two processes.

    python examples/sharded_transformer.py

The same file runs on a cluster: `srun python examples/sharded_transformer.py`.
"""

import keras
from sklearn.datasets import load_digits

import kmem

# Each image is a sequence of 16 patches of 4 numbers.
IMAGES, LABELS = load_digits(return_X_y=True)
PATCHES = IMAGES.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4) / 16


class Positions(keras.layers.Layer):
    """Adds what is learned of each place in the sequence."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=input_shape[1:], name="table")

    def call(self, x):
        return x + self.table


def block(x):
    attended = keras.layers.MultiHeadAttention(4, 16)(x, x)
    x = keras.layers.LayerNormalization()(x + attended)
    hidden = keras.layers.Dense(256, activation="gelu")(x)
    hidden = keras.layers.Dropout(0.1)(hidden)
    return keras.layers.LayerNormalization()(x + keras.layers.Dense(64)(hidden))


def transformer():
    inputs = keras.Input((16, 4))
    x = keras.layers.Dense(64)(inputs)
    x = Positions()(x)
    for _ in range(2):
        x = block(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def main():
    """What every process runs."""
    model = transformer()
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = kmem.wrap(model).fit(
        PATCHES,
        LABELS,
        batch_size=64,
        epochs=2,
        sharding="full",
        callbacks=[kmem.callbacks.ShardedCheckpoint("checkpoint")],
        verbose=0,
    )
    kmem.distributed.save_weights(model, "transformer.weights.h5")
    # The epochs since the last checkpoint: none, if it was complete.
    return history.history.get("accuracy")


if __name__ == "__main__":
    accuracies = kmem.distributed.launch(main, num_processes=2)
    print("accuracy of each epoch, in each process:", accuracies)

    model = transformer()  # whole, in plain Keras
    model.load_weights("transformer.weights.h5")
    scores = model.predict(PATCHES, verbose=0)
    print("after training, of a loaded model:", end=" ")
    print(float((scores.argmax(-1) == LABELS).mean()))
