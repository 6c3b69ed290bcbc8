"""`mixed_precision`: layers compute in 16 bits, in validation as well."""

import keras

from kmem import precision
from kmem.options import MixedPrecision
from kmem.step.mechanism import Context
from kmem.step.mechanism import Mechanism


class Mixed(Mechanism):
    """Changes the layers' policies while they are called.

    Attributes:
        optimizer: The model's, or one around it that scales the loss.
    """

    kinds = ("train", "test")

    def __init__(self, model: keras.Model, option: MixedPrecision):
        self._model = model
        self._option = option
        self.optimizer = precision.loss_scaled(model, option)

    def start(self) -> None:
        precision.recall_scale(self.optimizer)

    def stop(self, failed: bool = False) -> None:
        precision.remember_scale(self.optimizer)

    def computing(self, training: bool) -> Context:
        return precision.applied(self._model, self._option)
