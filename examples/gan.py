"""A GAN with a `train_step` of its own, which makes two updates.

The class is that of Keras's own guide. Its step is no single gradient, so that
there is nothing to accumulate or to plan; `dtr` needs to know nothing of a
step. The one line that has changed is marked.
"""

import keras
import tensorflow as tf
from keras import layers
from keras import ops
from sklearn.datasets import load_digits

import kmem  # before the first TensorFlow operation

LATENT_SIZE = 16


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_size):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_size = latent_size
        self.seeds = keras.random.SeedGenerator(0)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def noise(self, rows):
        shape = (rows, self.latent_size)
        return keras.random.normal(shape, seed=self.seeds)

    def train_step(self, real):
        rows = ops.shape(real)[0]
        both = ops.concatenate([self.generator(self.noise(rows)), real])
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        gradients = tape.gradient(d_loss, weights)
        self.d_optimizer.apply(gradients, weights)

        mislead = ops.zeros((rows, 1))
        with tf.GradientTape() as tape:
            fake = self.generator(self.noise(rows))
            g_loss = self.loss_fn(mislead, self.discriminator(fake))
        weights = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, weights)
        self.g_optimizer.apply(gradients, weights)

        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


keras.utils.set_random_seed(0)
discriminator = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, 2, "same", activation="leaky_relu"),
        layers.Conv2D(64, 3, 2, "same", activation="leaky_relu"),
        layers.GlobalMaxPooling2D(),
        layers.Dense(1),
    ]
)
generator = keras.Sequential(
    [
        keras.Input((LATENT_SIZE,)),
        layers.Dense(4 * 32, "leaky_relu"),
        layers.Reshape((2, 2, 32)),
        layers.Conv2DTranspose(32, 4, 2, "same", activation="leaky_relu"),
        layers.Conv2DTranspose(32, 4, 2, "same", activation="leaky_relu"),
        layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
    ]
)
gan = GAN(discriminator, generator, LATENT_SIZE)
gan.compile(
    d_optimizer=keras.optimizers.Adam(3e-4),
    g_optimizer=keras.optimizers.Adam(3e-4),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
images, _ = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
data = tf.data.Dataset.from_tensor_slices(images).shuffle(2048).batch(512)
kmem.wrap(gan).fit(  # was: gan.fit(
    data.take(2),
    epochs=2,
    callbacks=[kmem.callbacks.MemoryMonitor()],
    verbose=2,
    dtr="18MB",
)
