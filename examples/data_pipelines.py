"""Batches from `tf.data` and from a `PyDataset`, as they are.

Both hand out small batches. With `gradient_accumulation_steps` four of them
make one update, that of their union: of 128 rows, and in the end of what is
left over. The lines that have changed are marked.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import kmem  # before the first TensorFlow operation

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")


class Digits(keras.utils.PyDataset):
    """Digits with some noise, which is made when a batch is asked for."""

    def __init__(self, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.batch_size = batch_size

    def __len__(self):
        return -(-len(images) // self.batch_size)

    def __getitem__(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        noise = np.random.default_rng(index).normal(0, 0.05, (1, 64))
        return images[rows] + noise.astype("float32"), labels[rows]


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


data = tf.data.Dataset.from_tensor_slices((images, labels))
data = data.shuffle(2048, seed=0).batch(32).prefetch(tf.data.AUTOTUNE)
model = build()
kmem.wrap(model).fit(  # was: model.fit(
    data, epochs=2, verbose=2, gradient_accumulation_steps=4
)
updates = int(model.optimizer.iterations.numpy())
print(f"tf.data: {len(data)} batches an epoch, {updates} updates in two")

model = build()
kmem.wrap(model).fit(  # was: model.fit(
    Digits(32, workers=2), epochs=2, verbose=2, gradient_accumulation_steps=4
)
updates = int(model.optimizer.iterations.numpy())
print(f"PyDataset: {updates} updates in two epochs")
