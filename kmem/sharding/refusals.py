"""What cannot be trained in shards, and is refused before anything changes."""

import keras
import tensorflow as tf

from kmem.capture import all_layers
from kmem.options import MemoryOptions
from kmem.sharding.engine import engine
from kmem.sharding.variables import ShardedVariable

# Their updates look at one number of a variable at a time.
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
_CONSTRAINTS = (type(None), keras.constraints.NonNeg)


def check(model: keras.Model, options: MemoryOptions) -> None:
    """Checks whether a model can be trained in shards.

    Raises:
        ValueError: If it cannot.
    """
    _check_setting(model)
    if any(isinstance(v, ShardedVariable) for v in model.weights):
        _check_in_shards(model, options)
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    updates = [kind.update_step for kind in _ELEMENTWISE]
    if type(inner).update_step not in updates:
        names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise ValueError(
            "`sharding` needs an optimizer that updates every number by "
            f"itself: {names}. Received: optimizer={type(inner).__name__}"
        )
    for variable in model.trainable_variables:
        if not isinstance(variable.constraint, _CONSTRAINTS):
            raise ValueError(
                "`sharding` needs constraints that look at every number by "
                "itself, which `NonNeg` does. Received: constraint="
                f"{variable.constraint!r} of {variable.path}"
            )


def _check_setting(model) -> None:
    if not all(layer.built for layer in all_layers(model)):
        raise ValueError(
            "`sharding` needs a model that is built: call `model.build()` "
            "with the shape of its input, or call the model, first. "
            f"Received: model={model.name}, which is not"
        )
    config = model.get_compile_config() if model.jit_compile else {}
    if config.get("jit_compile") is True:
        raise ValueError(
            "`sharding` sends weights while a step runs, and XLA cannot: "
            "call `model.compile(jit_compile=False)`. "
            "Received: jit_compile=True"
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "`sharding` and `keras.distribution` exclude each other: call "
            "`keras.distribution.set_distribution(None)`. Received: "
            f"{keras.distribution.distribution()}"
        )
    strategy = model.distribute_strategy
    if strategy is not tf.distribute.get_strategy():
        raise ValueError(
            "`sharding` and the strategies of `tf.distribute` exclude each "
            "other: make the model outside of a strategy's scope. Received: "
            f"{type(strategy).__name__}"
        )


def _check_in_shards(model, options: MemoryOptions) -> None:
    """Checks what a model that was built in shards cannot do."""
    if options.sharding.stage == "optimizer":
        raise ValueError(
            '`sharding="optimizer"` needs whole weights: take "gradients" for '
            "a model that was built under `kmem.ShardedStrategy`. "
            f"Received: model={model.name}"
        )
    if options.memory_budget is not None:
        raise ValueError(
            "`memory_budget` needs a model that each process can have whole "
            "between the steps, to measure it: give `microbatches` and a "
            "`kmem.Plan` as `remat` to one that was built under "
            "`kmem.ShardedStrategy`. Received: "
            f"memory_budget={options.memory_budget}"
        )
    plans = options.remat is not None and not options.remat.plan
    if plans and engine().size > 1:
        raise ValueError(
            "`remat` must be a `kmem.Plan`, or the path of one, for a model "
            "that is in shards, which no process can measure by itself: make "
            "one with `kmem.plan` of a model like it before. "
            f"Received: remat={options.remat}"
        )
