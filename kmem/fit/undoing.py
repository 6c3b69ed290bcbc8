"""What the steps of a model change, and the undo of steps that fail.

Memory may run out between two updates of a step: an update needs some itself,
and an early one does not wait to see whether all of its step succeeds. A step
leaves all of its updates, or none. What this costs is a copy of weights and
optimizer to host memory for each step.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from kmem.base.private_keras import all_layers
from kmem.graph import releasing
from kmem.sharding.training import stored
from kmem.step import snapshot
from kmem.step.accumulation import build_optimizer
from kmem.step.capture import changed_variables
from kmem.step.capture import optimizers
from kmem.step.mechanism import Mechanism


class Changes:
    """What a model's steps change.

    Args:
        optimizer: What its steps see as `model.optimizer`.
    """

    def __init__(self, model: keras.Model, optimizer):
        self._model = model
        self._optimizer = optimizer
        self._train_step = model.train_step

    @property
    def variables(self) -> list:
        """The variables that a step may change."""
        return stored(changed_variables(self._model, self._optimizer))

    def reader(self, earlier: snapshot.Reader | None) -> snapshot.Reader:
        """Reads these variables; `earlier`, if it reads no others."""
        variables = self.variables
        if earlier is not None and earlier.reads(variables):
            return earlier
        return snapshot.Reader(variables)

    def undone(self):
        """A context that gives back what steps change within."""
        return snapshot.unchanged(self.variables, self._model.metrics)

    @property
    def layers_are_built(self) -> bool:
        """Whether all variables exist but for those of optimizers."""
        return all(layer.built for layer in all_layers(self._model))

    def build(self, batch=None) -> None:
        """Makes the variables that the first step would make.

        Args:
            batch: What the step gets, as `tf.TensorSpec`s. It is traced for
                the optimizers that a `train_step` has besides the model's.
        """
        strategy = self._model.distribute_strategy
        with strategy.scope():
            build_optimizer(self._optimizer, self._model.trainable_variables)
        others = optimizers(self._model)
        if batch is not None and not all(each.built for each in others):
            step = self._train_step
            releasing.function(
                lambda data: strategy.run(step, args=(data,))
            ).get_concrete_function(batch)


class Undoing(Mechanism):
    """Keeps what a step changes outside of the device until it is done.

    It changes nothing else. Once a step is done all variables exist, and are
    not looked for again while the model trains.
    """

    def __init__(self, model: keras.Model, changes: Changes):
        self._model = model
        self._changes = changes
        self._reader: snapshot.Reader | None = None

    def start(self) -> None:
        if self._changes.layers_are_built:
            self._changes.build()

    def stop(self, failed: bool = False) -> None:
        # With the memory that it reads into.
        self._reader = None

    def wrapped(self, function: Callable) -> Callable:
        def train(iterator):
            reader = self._reader or self._changes.reader(None)
            before = snapshot.State(reader, self._model.metrics)
            try:
                logs = function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                # The data ended. Steps that were taken before are done.
                raise
            except BaseException:
                before.restore()
                raise
            self._reader = self._reader or self._changes.reader(reader)
            return logs

        return train
