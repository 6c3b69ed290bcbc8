"""When variables are updated: in turn, and early where that can be.

An update needs workspace, and uses a gradient up. If each variable is updated
as soon as its gradient is there, the gradients of all variables are never in
memory together; the few largest wait for the others. What this does not do:
change what an update computes, so that an optimizer that looks at all gradients
first, to clip them by their common norm or to scale a loss, updates at the end.
"""

import contextlib
import math

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.base import private_tf
from kmem.graph import fusion
from kmem.graph.names import current_graph
from kmem.graph.ordering import AnyOrder
from kmem.options import MemoryOptions
from kmem.step import batches
from kmem.step.capture import has_default_step
from kmem.step.capture import optimizer_config

# How many arrays of a variable's size an update takes at most: its gradient,
# and what Adam computes from it.
_NUM_ARRAYS = 4


def are_early(model: keras.Model, options: MemoryOptions) -> bool:
    """Whether a planned step updates variables when their gradients are there.

    Args:
        options: The options, other than `remat`.
    """
    optimizer = model.optimizer if model.compiled else None
    precision = options.mixed_precision
    variables = model.trainable_variables
    most = early_bytes(variables)
    return (
        optimizer is not None
        and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        and not optimizer.global_clipnorm
        and not optimizer.gradient_accumulation_steps
        and any(batches.num_bytes(v) <= most for v in variables)
        and has_default_step(model)
        and not (model.run_eagerly or model.jit_compile)
        and model.distribute_strategy.num_replicas_in_sync == 1
        and options.microbatches is None
        and options.gradient_accumulation_steps is None
        and options.sharding is None
        and not (precision is not None and precision.dtype == "float16")
    )


def squares_rows(optimizer) -> bool:
    """Whether an update by several rows of a gradient for one place, as of an
    id that occurs again, is another than by their sum: Adam squares each.

    It is tried; one that cannot be made again is taken to.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    shape = tf.constant([1, 1])
    rows = tf.IndexedSlices(tf.ones([2, 1]), tf.zeros([2], tf.int32), shape)

    def updated(gradient) -> float:
        variable = keras.Variable([[1.0]], name="row")
        config = optimizer_config(inner)
        config["learning_rate"] = 0.5
        type(inner).from_config(config).apply([gradient], [variable])
        return float(variable.numpy()[0, 0])

    try:
        by_sum = updated(2 * tf.ones([1, 1]))
        return not math.isclose(updated(rows), by_sum, rel_tol=1e-6)
    except Exception:
        return True


def early_bytes(variables: list) -> float:
    """Of variables, the size of the largest that is updated early.

    The update of a larger one would take more than the gradients of all, and
    when the backward pass begins, all activations are still there.
    """
    return batches.num_bytes(variables) / _NUM_ARRAYS


def turns(variables: list) -> list[int]:
    """In which order variables are updated early: the last layer's first, as
    a backward pass makes their gradients, and the largest last of all."""
    most = early_bytes(variables)
    is_large = [batches.num_bytes(v) > most for v in variables]
    return sorted(range(len(variables))[::-1], key=is_large.__getitem__)


def in_turn(
    optimizer, gradients: list, order: AnyOrder | None = None
) -> patching.Context:
    """Within, an optimizer updates its variables one after another.

    Else it would prepare all of its updates at once, and some of them, such
    as those of momenta, before the backward pass.

    Args:
        optimizer: A `keras.optimizers.Optimizer`.
        gradients: Tensors, `IndexedSlices` or `None`, to wait for.
        order: That of a backward pass that waits for updates.
    """
    graph = current_graph()
    if graph is None:
        return contextlib.nullcontext()
    before = [
        op
        for gradient in gradients
        if gradient is not None
        for op in fusion.known_before(fusion.maker(gradient))
    ]
    # By variable what makes it smaller, if it decays: Keras begins with that.
    decays: dict[int, list[tf.Operation]] = {}
    index = getattr(optimizer, private_keras.INDEX)

    def traced(function, *args, **kwargs) -> list[tf.Operation]:
        num_before = len(graph.get_operations())
        function(*args, **kwargs)
        return graph.get_operations()[num_before:]

    def decay(plain, variables):
        for variable in variables:
            decays[index(variable)] = traced(plain, [variable])

    def update_step(update, gradient, variable, *args, **kwargs):
        with tf.control_dependencies(before):
            new = traced(update, gradient, variable, *args, **kwargs)
        # Before that the backward pass reads it, and it would be copied.
        ready = fusion.known_before(fusion.maker(gradient))
        for op in decays.get(index(variable), []):
            # TensorFlow puts factors in another order where none of them waits.
            if any(t.dtype == tf.resource for t in op.inputs):
                private_tf.wait_for(op, before + ready)
        before[:] = [op for op in new if not op.outputs] or before
        if order is not None:
            order.finish(new)

    decaying = patching.method(optimizer, private_keras.DECAY, decay)
    updating = patching.method(optimizer, "update_step", update_step)
    return patching.together((decaying, updating))
