"""The models of `remat.py`: a step of each takes about a second on two cores.

All are Functional, and in their sizes activations take more memory than the
parameters.
"""

import keras
import numpy as np
from keras import layers

NUM_CLASSES = 10


def resnet50(num_rows=32):
    model, x, y = _application(keras.applications.ResNet50, num_rows)
    for layer in model.layers:
        # As in Goyal et al. (2017): without, rounding grows fast in training.
        if layer.name.endswith("_3_bn"):
            layer.gamma.assign(keras.ops.zeros_like(layer.gamma))
    return model, x, y


def densenet121():
    return _application(keras.applications.DenseNet121, num_rows=24)


def efficientnetv2b0():
    return _application(
        keras.applications.EfficientNetV2B0,
        num_rows=32,
        include_preprocessing=False,
    )


def _application(make, num_rows, **arguments):
    model = make(
        weights=None,
        input_shape=(96, 96, 3),
        classes=NUM_CLASSES,
        classifier_activation=None,
        **arguments,
    )
    return model, _images(num_rows, 96), np.arange(num_rows) % NUM_CLASSES


def unet():
    """Four levels of two convolutions each, and skip connections."""

    def block(x, num_filters):
        for _ in range(2):
            x = layers.Conv2D(num_filters, 3, padding="same", use_bias=False)(x)
            x = layers.BatchNormalization()(x)
            x = layers.ReLU()(x)
        return x

    x = inputs = keras.Input((96, 96, 3))
    skips = []
    for num_filters in (16, 32, 64, 128):
        skips.append(block(x, num_filters))
        x = layers.MaxPooling2D(2)(skips[-1])
    x = block(x, 256)
    for num_filters in (128, 64, 32, 16):
        x = layers.Conv2DTranspose(num_filters, 2, strides=2)(x)
        x = block(layers.Concatenate()([x, skips.pop()]), num_filters)
    model = keras.Model(inputs, layers.Conv2D(NUM_CLASSES, 1)(x), name="unet")
    images = _images(16, 96)
    return model, images, (images[..., 0] > 0).astype("int32")


def transformer(num_layers=12, num_rows=16):
    """Layers that are normalized before each of their two halves."""
    width, length = 128, 128
    x = inputs = keras.Input((length, width))
    for _ in range(num_layers):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, width // 4, dropout=0.1)(y, y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        y = layers.Dense(width)(y)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    outputs = layers.Dense(NUM_CLASSES)(x)
    model = keras.Model(inputs, outputs, name="transformer")
    data = np.random.default_rng(0).normal(size=(num_rows, length, width))
    return model, data.astype("float32"), np.arange(num_rows) % NUM_CLASSES


def _images(num_rows, size):
    """Blotches: of white noise, all images have the same features."""
    small = np.random.default_rng(0).normal(size=(num_rows, 6, 6, 3))
    return small.repeat(size // 6, 1).repeat(size // 6, 2).astype("float32")


MODELS = {
    "ResNet50": resnet50,
    "DenseNet121": densenet121,
    "U-Net": unet,
    "transformer": transformer,
    "EfficientNetV2B0": efficientnetv2b0,
}
