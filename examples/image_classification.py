"""An image classifier as it is, which recomputes what pays.

A residual network with batch normalization, dropout and augmentation, written
for plain Keras. The one line that has changed is marked.
"""

import keras
from keras import layers
from sklearn.datasets import load_digits

import kmem  # before the first TensorFlow operation

keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16


def residual_block(x, filters):
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    y = layers.BatchNormalization()(y)
    y = layers.Activation("relu")(y)
    y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
    y = layers.BatchNormalization()(y)
    return layers.Activation("relu")(layers.Add()([x, y]))


inputs = keras.Input((8, 8, 1))
x = layers.RandomTranslation(0.1, 0.1)(inputs)
x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
for _ in range(2):
    x = residual_block(x, 16)
x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
model = keras.Model(inputs, layers.Dense(10)(x))
model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

history = kmem.wrap(model).fit(  # was: model.fit(
    images,
    labels,
    batch_size=256,
    epochs=1,
    validation_split=0.2,
    callbacks=[
        kmem.callbacks.MemoryMonitor(),
        keras.callbacks.ModelCheckpoint("classifier.keras"),
    ],
    verbose=2,
    remat="auto",
)
keras.saving.load_model("classifier.keras")  # a plain Keras model
