"""A batch that does not fit, and the one argument that makes it fit."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import kmem  # before the first TensorFlow operation

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16

layers = [keras.Input((8, 8, 1)), keras.layers.UpSampling2D(4)]
for _ in range(4):
    layers.append(keras.layers.Conv2D(16, 3, padding="same"))
    layers.append(keras.layers.LeakyReLU())
layers += [keras.layers.Flatten(), keras.layers.Dense(10)]
model = keras.Sequential(layers)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])

kmem.memory.limit("100MB", device="CPU")  # a CPU as a device of that size
try:
    model.fit(images, labels, batch_size=512, verbose=2)
except tf.errors.ResourceExhaustedError:
    print("Keras: out of memory")

with kmem.memory.track("CPU") as usage:
    history = kmem.wrap(model).fit(
        images, labels, batch_size=512, epochs=3, verbose=2, microbatches=8
    )
print(f"kmem: loss {history.history['loss'][-1]:.3f}", end=", ")
print(f"peak {usage.peak_bytes / 1e6:.0f} MB of 100 MB")
