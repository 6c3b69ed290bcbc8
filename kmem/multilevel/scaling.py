"""Loss scales of levels that compute in float16.

A level's update is made of passes through its own loss and through those of
the levels below, and all of them are scaled by that level's scale: if any of
them overflows, the update is skipped and the scale that did it is halved.
"""

from typing import Any

import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from kmem import precision
from kmem.multilevel.edges import Edges
from kmem.multilevel.edges import passed
from kmem.multilevel.edges import paths
from kmem.multilevel.level import Level


def optimizers(levels: list[Level], edges: Edges) -> list:
    """The levels' optimizers, built, with loss scales where they need one."""
    return [
        _optimizer(level, [level, *(levels[i] for i in below)])
        for level, below in zip(
            levels,
            (passed(paths(edges, number)) for number in range(len(levels))),
            strict=True,
        )
    ]


def scale(optimizer) -> tf.Tensor | None:
    """What an optimizer divides gradients by, if by anything."""
    scales = isinstance(optimizer, LossScaleOptimizer)
    if not scales and optimizer.loss_scale_factor is None:
        return None
    found: Any = optimizer.scale_loss(tf.ones([]))
    return found


def _optimizer(level: Level, on_path: list[Level]):
    optimizer = level.optimizer
    if not optimizer.built:
        optimizer.build(level.variables)
    options = [each.options.mixed_precision for each in on_path]
    half = [o for o in options if o is not None and o.dtype == "float16"]
    own_scale = isinstance(optimizer, LossScaleOptimizer)
    if not half or own_scale or optimizer.loss_scale_factor is not None:
        return optimizer
    return precision.around(optimizer, level.variables, half[0])
