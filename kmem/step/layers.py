"""What lies inside a model: layers, optimizers and what a step changes."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from kmem.base.private_keras import all_layers


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers directly inside a layer, or a model."""
    inside = all_layers(layer)[1:]
    deeper = {id(x) for each in inside for x in all_layers(each)[1:]}
    return [each for each in inside if id(each) not in deeper]


def changed_variables(model, optimizer) -> list:
    """What a model's step may change.

    Args:
        model: The model.
        optimizer: What the step sees as `model.optimizer`.
    """
    found = [model, optimizer, *optimizers(model), *model.metrics]
    known = {id(v): v for each in found for v in each.variables}
    # Some are not among `variables`, such as the states of recurrent layers.
    for layer in all_layers(model):
        for value in vars(layer).values():
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, keras.Variable | tf.Variable):
                    known[id(each)] = each
    return list(known.values())


def has_default_step(model) -> bool:
    """Whether the model's `train_step` is Keras's own."""
    step = getattr(model.train_step, "__func__", None)
    return step is keras.Model.train_step


def optimizers(model) -> Iterator[keras.optimizers.Optimizer]:
    for value in vars(model).values():
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list | tuple):
            value = [value]
        for item in value:
            if isinstance(item, keras.optimizers.Optimizer):
                yield item
