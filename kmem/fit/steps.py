"""How a step is taken: by the model as a whole, or in two.

`microbatches` and `gradient_accumulation_steps` take a step in two, and so do
options that have to be between a gradient and its update.
"""

import keras

from kmem.graph import ordering
from kmem.options import MemoryOptions
from kmem.step import microbatch
from kmem.step.accumulation import Updater
from kmem.step.mechanism import Mechanism
from kmem.step.microbatch import BatchGradient
from kmem.step.microbatch import GradientStep
from kmem.step.parts import Alone


class WholeStep(Mechanism):
    """The model's own step, which computes a gradient and applies it.

    Attributes:
        layers_that_see_parts: As in `GradientStep`.
    """

    layers_that_see_parts: list[keras.layers.Layer] = []

    def __init__(self, model: keras.Model):
        self._train_step = model.train_step

    def compute(self, data):
        """Computes what `update` takes."""
        return ordering.one_by_one(self._train_step, data)

    def update(self, computed):
        """Applies it, and returns the logs."""
        return computed

    def end_group(self) -> None:
        """Applies the last, incomplete group of batches."""

    def warn_of_parts(self) -> None:
        """Says which layers see one micro-batch at a time, if any do."""


class SplitStep(WholeStep):
    """The gradient of a batch, then one update of one or several batches.

    Args:
        model: The model.
        optimizer: What applies gradients.
        options: The options.
        processes: Those that compute a batch together.
        ordered: As in `GradientStep`.
        early: As in `Updater`.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer,
        options: MemoryOptions,
        processes: Alone,
        ordered: bool,
        early: bool,
    ):
        super().__init__(model)
        strategy, steps = model.distribute_strategy, options.num_batches
        self._updater = Updater(optimizer, steps, strategy, processes, early)
        self._gradient = GradientStep(
            model,
            self._train_step,
            optimizer,
            num_parts=options.num_parts,
            by_group=steps > 1 or strategy.num_replicas_in_sync > 1,
            ordered=ordered,
            processes=processes,
        )
        self._compute = self._gradient
        # Only the gradient is compiled when updates are rarer than batches:
        # a branch inside XLA copies all that it may assign.
        self.allows_xla = steps == 1
        if not self.allows_xla and model.jit_compile and not model.run_eagerly:
            self._compute = microbatch.compiled(self._gradient)

    @property
    def layers_that_see_parts(self) -> list[keras.layers.Layer]:
        return self._gradient.layers_that_see_parts

    def start(self) -> None:
        self._updater.start()

    def stop(self, failed: bool = False) -> None:
        self._updater.stop()

    def compute(self, data) -> BatchGradient:
        return self._compute(data)

    def update(self, computed: BatchGradient):
        self._updater.add(computed)
        return computed.logs

    def end_group(self) -> None:
        self._updater.flush()

    def warn_of_parts(self) -> None:
        self._gradient.warn_of_parts()
