"""The models of `headline.py` in PyTorch, of the same sizes.

ResNet50 is torchvision's, written out: its wheel is for PyTorch with CUDA.
"""

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_CLASSES = 10


class Bottleneck(nn.Module):
    """A residual block, with its stride where torchvision has it.

    `convolve` makes the layers of a convolution and of what normalizes it.
    """

    def __init__(self, num_inputs, width, stride, convolve):
        super().__init__()
        self.main = nn.Sequential(
            *convolve(num_inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolve(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolve(width, 4 * width, 1),
        )
        self.skip = nn.Sequential()
        if num_inputs != 4 * width or stride > 1:
            self.skip.extend(convolve(num_inputs, 4 * width, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.main(x) + self.skip(x))


class Layer(nn.Module):
    """A transformer's layer, normalized before each of its two halves."""

    def __init__(self, width):
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(
            width, num_heads=4, dropout=0.1, batch_first=True
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        y = self.first_norm(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + self.dropout(y)
        return x + self.mlp(x)


class Mean(nn.Module):
    """The mean over the positions of a sequence."""

    def forward(self, x):
        return x.mean(1)


class Checkpointed(nn.Module):
    """Layers in a row, of which residual ones keep their input only."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            if isinstance(layer, (Bottleneck, Layer)):
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def resnet50(num_classes=NUM_CLASSES):
    layers = [
        *_convolution(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    num_inputs = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            stride = 2 if width > 64 and block == 0 else 1
            layers.append(Bottleneck(num_inputs, width, stride, _convolution))
            # As in Goyal et al. (2017): else rounding grows fast in training.
            nn.init.zeros_(layers[-1].main[-1].weight)
            num_inputs = 4 * width
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(num_inputs, num_classes),
    )


def images(num_rows):
    """Blotches: of white noise, all images have the same features."""
    small = np.random.default_rng(0).normal(size=(num_rows, 3, 6, 6))
    return _batch(small.repeat(16, 2).repeat(16, 3))


def transformer(num_layers=12, width=128):
    return nn.Sequential(
        *(Layer(width) for _ in range(num_layers)),
        nn.LayerNorm(width),
        Mean(),
        nn.Linear(width, NUM_CLASSES),
    )


def sequences(num_rows):
    return _batch(np.random.default_rng(0).normal(size=(num_rows, 128, 128)))


def _convolution(num_inputs, num_outputs, size, stride=1):
    """A convolution and its batch norm."""
    return (
        nn.Conv2d(num_inputs, num_outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(num_outputs),
    )


def _batch(x):
    x = torch.tensor(x, dtype=torch.float32)
    return x, torch.arange(len(x)) % NUM_CLASSES


MODELS = {
    "ResNet50": (resnet50, images),
    "transformer": (transformer, sequences),
}
