"""Everyday uses of Keras, each of which is tried under every option."""

from uses import changes
from uses import data
from uses import models
from uses import training
from uses.optimizers import OPTIMIZERS

USES = {
    function.__name__: function
    for module in (models, training, data, changes)
    for function in module.USES
} | OPTIMIZERS
