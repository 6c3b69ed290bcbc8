"""What cannot be trained in shards, and is refused before anything changes."""

import inspect
import os

import keras
import tensorflow as tf

from kmem.base.private_keras import USE_WEIGHT_DECAY
from kmem.base.private_keras import is_built
from kmem.launching.cluster import Cluster
from kmem.options import MemoryOptions
from kmem.sharding.engine import Engine
from kmem.sharding.engine import engine
from kmem.sharding.variables import ShardedVariable

# Their updates look at one number of a variable at a time.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in (
        "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax Nadam Ftrl Lion".split()
    )
)
# What of an optimizer may be a user's own: it sees no numbers, or, of
# `USE_WEIGHT_DECAY`, a whole variable; see `kmem.sharding.updating`.
_MAY_DIFFER = ("__init__", "get_config", USE_WEIGHT_DECAY)


def check(model: keras.Model, options: MemoryOptions) -> None:
    """Checks whether a model can be trained in shards."""
    _check_setting(model)
    if any(isinstance(v, ShardedVariable) for v in model.weights):
        _check_in_shards(model, options)
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is not inner:
        _check_update(optimizer, (keras.optimizers.LossScaleOptimizer,))
    _check_update(inner, _ELEMENTWISE)
    known = keras.constraints.NonNeg.__call__
    for variable in model.trainable_variables:
        kind = type(variable.constraint)
        if variable.constraint is not None and kind.__call__ is not known:
            raise ValueError(
                "`sharding` needs constraints that look at every number by "
                "itself, which `NonNeg` does. Received: constraint="
                f"{variable.constraint!r} of {variable.path}"
            )


def check_callbacks(callbacks) -> None:
    """Refuses `SwapEMAWeights`, which takes each weight for one variable."""
    callbacks = getattr(callbacks, "callbacks", callbacks)
    for callback in keras.tree.flatten(callbacks or []):
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise ValueError(
                "`sharding` cannot be used with `SwapEMAWeights`, which swaps "
                "weights that are in shards: leave it out, and evaluate the "
                "averages after `fit`, which `use_ema` leaves in the model. "
                f"Received: callbacks={callbacks}"
            )


def can_be_offloaded(model: keras.Model, options: MemoryOptions) -> bool:
    """Whether a compiled model with variables can keep its state outside of its
    device under these options."""
    # Several processes would have to do it together.
    config = os.environ.get("TF_CONFIG")
    if options.sharding is not None or (config and Cluster(config).size > 1):
        return False
    host = Engine().host
    if all(v.value.device.endswith(host) for v in model.trainable_variables):
        return False
    try:
        check(model, options)
    except ValueError:
        return False
    return True


def _check_update(optimizer, kinds: tuple) -> None:
    kind = type(optimizer)
    base = next((k for k in kind.__mro__ if k in kinds), None)
    names = ", ".join(each.__name__ for each in kinds)
    if base is None:
        raise ValueError(
            "`sharding` needs an optimizer that updates every number by "
            f"itself: {names}. Received: optimizer={kind.__name__}"
        )
    for name, method in inspect.getmembers(base, inspect.isfunction):
        if getattr(kind, name) is not method and name not in _MAY_DIFFER:
            raise ValueError(
                "`sharding` gives an optimizer shards of the weights, so that "
                f"it must be one of Keras's own: {names}, or a subclass that "
                f"leaves what they compute as it is. Received: optimizer="
                f"{kind.__name__}, whose `{name}` is its own"
            )


def _check_setting(model) -> None:
    if not is_built(model):
        raise ValueError(
            "`sharding` needs a model that is built: call `model.build()` "
            "with the shape of its input, or call the model, first. "
            f"Received: model={model.name}, which is not"
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
    if options.sharding and options.sharding.stage == "optimizer":
        raise ValueError(
            '`sharding="optimizer"` needs whole weights: take "gradients" for '
            "a model that was built under `kmem.ShardedStrategy`. "
            f"Received: model={model.name}"
        )
    if options.memory_budget is not None:
        raise ValueError(
            "`memory_budget` measures the whole model in each process, and "
            "cannot measure one that was built under `kmem.ShardedStrategy`: "
            "give `microbatches`, and a `kmem.Plan` as `remat`, instead. "
            f"Received: memory_budget={options.memory_budget}"
        )
    plans = options.remat is not None and not options.remat.plan
    if plans and engine().size > 1:
        raise ValueError(
            "`remat` must be a `kmem.Plan`, or the path of one, for a model "
            "that is in shards, which no process can measure alone: make the "
            "plan with `kmem.plan`, of the same model outside of the strategy. "
            f"Received: remat={options.remat}"
        )
