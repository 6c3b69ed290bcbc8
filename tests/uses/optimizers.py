"""One use for each of Keras's optimizers, and of their arguments."""

import cases
import keras

from uses.arrays import dense
from uses.arrays import regression


def _use(make):
    def use(trainer):
        model = dense(optimizer=make())
        # Ahead of the trace, in which Keras would lose what ScheduleFreeAdamW
        # assigns to its momentum.
        model.optimizer.build(model.trainable_variables)
        trainer.fit(model, *regression())
        return model

    return use


OPTIMIZERS = {
    f"optimizer_{name}": _use(make) for name, make in cases.OPTIMIZERS.items()
} | {
    "optimizer_that_accumulates": _use(
        lambda: keras.optimizers.SGD(1e-2, gradient_accumulation_steps=2)
    )
}
