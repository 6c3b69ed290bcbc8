"""Whether memory options can work with a model, and with each other.

Asked before anything is changed: an option that cannot work is refused with
an error that says what to do instead.
"""

from collections.abc import MutableMapping
from typing import Any

import keras
import tensorflow as tf

from kmem.base import private_keras
from kmem.fit import pipeline
from kmem.losses import chunked_loss
from kmem.options import MemoryOptions
from kmem.sharding import refusals

_TRACED_APART = (
    "microbatches gradient_accumulation_steps remat memory_budget".split()
)
_SPLITTING = ("microbatches", "memory_budget", "sharding")
_NOT_DENSE = (
    *(tf.RaggedTensor, tf.RaggedTensorSpec),
    *(tf.SparseTensor, tf.SparseTensorSpec),
)
_ADDING_UP = (*_SPLITTING, "gradient_accumulation_steps")


def check(model, options: MemoryOptions) -> None:
    """Checks whether the options can work with a model."""
    if not model.compiled:
        raise ValueError(
            "The model must be compiled before it is trained: call "
            f"`model.compile()` first. Received: model={model.name}"
        )
    own_steps = getattr(model.optimizer, "gradient_accumulation_steps", None)
    if options.gradient_accumulation_steps is not None and own_steps:
        raise ValueError(
            "Gradients must be accumulated by kmem or by the optimizer, not by "
            "both: make the optimizer without `gradient_accumulation_steps`. "
            f"Received: optimizer.gradient_accumulation_steps={own_steps}"
        )
    if not options.allows_xla:
        _check_xla(model, options)
    replicas = model.distribute_strategy.num_replicas_in_sync
    if options.dtr is not None and replicas > 1:
        raise ValueError(
            "`dtr` must have one replica in a process. "
            f"Received: {replicas} replicas"
        )
    if options.sharding is not None:
        refusals.check(model, options)
    if replicas > 1:
        _check_replicas(model, options)
    _check_layers(model, options)
    if options.chunked_loss:
        chunked_loss.check(model)


def _check_layers(model, options: MemoryOptions) -> None:
    splitting, adding_up = (
        next((n for n in names if getattr(options, n) is not None), None)
        for names in (_SPLITTING, _ADDING_UP)
    )
    for layer in private_keras.all_layers(model) if splitting else []:
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"`{splitting}` splits batches, and cannot be used with "
                "layers that keep a state for each example of a batch: make "
                "them with `stateful=False`, or use `remat` or `dtr`. "
                f"Received: layer={layer.name} with stateful=True"
            )
    for variable in model.trainable_variables if adding_up else []:
        # The largest of the batches' would be right, and not their sum.
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"`{adding_up}` adds up gradients, which a model that is "
                "quantized to float8 cannot have: its scales are overwritten "
                "by their gradients. Use `remat` or `dtr`. Received: "
                f"overwrite_with_gradient=True of {variable.path}"
            )


def _check_replicas(model, options: MemoryOptions) -> None:
    strategy = model.distribute_strategy
    if options.memory_budget is not None and not isinstance(
        strategy, tf.distribute.MirroredStrategy
    ):
        raise ValueError(
            "`memory_budget` must have all replicas in one process: use a "
            "`MirroredStrategy`, or give `microbatches` or `remat` instead. "
            f"Received: {type(strategy).__name__}"
        )
    # What replicas compute together cannot be traced by itself, as a loop's
    # body, a denominator or a recomputation is.
    used = (n for n in _TRACED_APART if getattr(options, n) is not None)
    name = next(used, None)
    for layer in private_keras.all_layers(model) if name else []:
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"`{name}` cannot be used with layers that synchronize their "
                "replicas: make them with `synchronized=False`. "
                f"Received: layer={layer.name}"
            )


def _check_xla(model, options: MemoryOptions) -> None:
    """Refuses XLA where it was asked for, and not where it is the default."""
    if not model.jit_compile or private_keras.compiles_by_default(model):
        return
    reason = "`sharding` sends weights between operators, and XLA makes"
    if options.dtr is not None:
        reason = "`dtr` evicts tensors between operators, and XLA makes"
    raise ValueError(
        f"{reason} one program of all: call "
        "`model.compile(jit_compile=False)`, or use `remat`. "
        "Received: jit_compile=True"
    )


def _check_is_dense(arguments: MutableMapping[str, Any], name: str) -> None:
    x = arguments.get("x")
    given = [getattr(x, "element_spec", x), arguments.get("y")]
    for leaf in keras.tree.flatten(given):
        # Keras makes sparse tensors of SciPy's matrices.
        kind = type(leaf)
        if isinstance(leaf, _NOT_DENSE) or kind.__module__.startswith("scipy"):
            raise ValueError(
                f"`{name}` plans for batches of a fixed shape: give `fit` "
                "dense tensors, or use `microbatches` or `dtr`. Received: "
                f"{kind.__name__}"
            )


def check_inference(
    model, options: MemoryOptions, arguments: MutableMapping[str, Any]
) -> None:
    """Checks whether a model can evaluate, or predict, within a budget."""
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            "`memory_budget` must have one replica where it evaluates or "
            "predicts: leave it out, and give a smaller `batch_size`. "
            f"Received: {replicas} replicas"
        )
    _check_layers(model, options)
    _check_is_dense(arguments, "memory_budget")


def check_batch(
    arguments: MutableMapping[str, Any], options: MemoryOptions
) -> None:
    """Checks what `fit` is given against the options, before it starts: its
    batches, as far as they are known, and its callbacks."""
    for name in ("remat", "memory_budget"):
        if getattr(options, name) is not None:
            _check_is_dense(arguments, name)
    if options.sharding is not None:
        refusals.check_callbacks(arguments.get("callbacks"))
    if options.microbatches is None:
        return
    rows = pipeline.batch_rows(arguments)
    if rows is not None and rows < options.microbatches.count:
        raise ValueError(
            "`microbatches` must not be larger than the batch size. Received: "
            f"microbatches={options.microbatches.count} for batches of "
            f"{rows} examples"
        )
