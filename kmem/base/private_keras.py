"""What kmem takes of Keras that is not public; nothing else does.

Keras has no public function that does what these do. Each says what it is
for, and which test fails when it moves (from 3.12 on it is here). Names are
those of methods and attributes that are replaced for a while.
"""

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer

# Where `Loss.__call__` looks up what reduces its values, and what divides
# their mean by the number of replicas.
# step/test_loss_terms.py, multilevel/test_multilevel_mirrored.py
from keras.src.losses import loss as loss
from keras.src.trainers.data_adapters import array_slicing

from kmem.base import patching

# What Keras keeps for the time of a layer's call: `training`, and the dtype
# that variables are cast to. remat/test_remat.py
_AROUND_A_CALL = ("current_call_ctx", "autocast_scope")


def around_call() -> dict[str, Any]:
    """What is around the layer that is being called; see `_AROUND_A_CALL`."""
    return {
        name: global_state.get_global_attribute(name) for name in _AROUND_A_CALL
    }


def set_around_call(values: dict[str, Any]) -> None:
    """Sets what is around the layers that are called next."""
    for name, value in values.items():
        global_state.set_global_attribute(name, value)


def stateless_scope() -> keras.StatelessScope | None:
    """The scope through which variables are read and assigned, if there is
    one. remat/test_remat.py"""
    return global_state.get_global_attribute("stateless_scope")


# Layers and models.

# What a Functional model runs its operations with. keras_graph/test_opening.py
RUN_THROUGH_GRAPH = "_run_through_graph"
# A layer's policy, past the public setter, which edits the map of policies
# that layers may share. precision/test_precision.py
DTYPE_POLICY = "_dtype_policy"
# What adds a penalty of activations to a model's loss.
# precision/test_precision.py
ADD_PENALTY = "_aggregate_additional_loss"


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A layer, or a model, and all layers inside it, at any depth: the public
    `layers` does not reach into a layer, such as the two halves of a
    `Bidirectional`. step/test_capture.py"""
    return layer._flatten_layers()


def is_built(layer: keras.layers.Layer) -> bool:
    """Whether a layer, or a model, has all its variables. What has no `build`
    of its own makes none; others make those inside. remat/test_own_steps.py"""
    if type(layer).build is not keras.layers.Layer.build:
        return layer.built
    inside = layer._flatten_layers(recursive=False, include_self=False)
    return all(map(is_built, inside))


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The weights of a layer itself that are trained unless it is frozen.
    sharding/test_sharding.py"""
    return layer._trainable_variables


def own_state(layer: keras.layers.Layer) -> list:
    """A layer's own statistics and seeds. step/test_steps_that_compare.py"""
    return layer._non_trainable_variables + layer._seed_generators


def global_seeds() -> list[keras.random.SeedGenerator]:
    """What `keras.random` draws with, once it has. dtr/test_dtr_fit.py"""
    found = global_state.get_global_attribute("global_seed_generator")
    return [] if found is None else [found]


def own_losses(layer: keras.layers.Layer) -> list:
    """The list in which a layer keeps its losses. remat/test_remat.py"""
    return layer._losses


def forget_loss(layer: keras.layers.Layer, loss: Any) -> None:
    """Takes a loss from a layer, which else would take a later tensor with
    the same `id` for its own. remat/test_remat.py"""
    layer._loss_ids.discard(id(loss))


def functional_of(model: keras.Model) -> Any:
    """The model that has the graph of operations, which a `Sequential` keeps
    inside once it is built; `None` of a subclassed one.
    keras_graph/test_opening.py"""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if hasattr(model, RUN_THROUGH_GRAPH) else None


def nodes_of(functional: Any) -> list:
    """The calls of a Functional model's operations, in the order in which
    Keras runs them. keras_graph/test_opening.py"""
    by_depth = functional._nodes_by_depth
    return [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation and not node.is_input
    ]


def loss_tracker(model: keras.Model) -> Any:
    """What `compile` makes anew each time. test_model.py"""
    return model._loss_tracker


def build_metrics(model: Any, batch: Any) -> None:
    """Makes the variables of a compiled model's losses and metrics, as `fit`
    does before it trains under a strategy, for a batch of `tf.TensorSpec`s.
    budget/test_estimate.py"""
    model._symbolic_build(data_batch=batch)


def compiles_by_default(model: Any) -> bool:
    """Whether `compile(jit_compile="auto")` means XLA here; Keras does not
    keep what was asked for. fit/test_xla_by_default.py"""
    return model._resolve_auto_jit_compile()


# What `fit` gives to `evaluate`. budget/test_inference.py
WITHIN_FIT = "_use_cached_eval_dataset"


def outputs_in_host_memory() -> patching.Context:
    """Within, `predict` puts NumPy arrays together where they are. Keras does
    so on the device, with all outputs twice. budget/test_inference.py"""

    def are_arrays(arrays: Any) -> bool:
        return all(isinstance(array, np.ndarray) for array in arrays)

    def joined(keras_join, arrays):
        shapes = {np.shape(a)[1:] for a in arrays if are_arrays(arrays)}
        if len(shapes) != 1:
            return keras_join(arrays)
        is_scalar = np.ndim(arrays[0]) == 0
        return (np.stack if is_scalar else np.concatenate)(arrays)

    def converted(keras_convert, x):
        return x if are_arrays([x]) else keras_convert(x)

    join, convert = "potentially_ragged_concat", "convert_to_np_if_not_ragged"
    changes = (
        patching.method(trainer, join, joined),
        patching.method(trainer, convert, converted),
    )
    return patching.together(changes)


def as_array(data: Any) -> Any:
    """What `fit` makes of a DataFrame, or of another library's array.
    fit/test_pipeline.py"""
    return array_slicing.convert_to_sliceable(data, "tensorflow")


def begin_at(model: Any, epoch: int | None) -> None:
    """Has `fit` begin at an epoch, as `BackupAndRestore` does.
    sharding/test_resuming.py"""
    model._initial_epoch = epoch


# A tensor's mask. remat/test_remat.py, dtr/test_dtr_blocks.py
MASK = "_keras_mask"


def mask_of(tensor: Any) -> Any:
    """The mask that Keras has put on a tensor, or `None`."""
    return getattr(tensor, MASK, None)


# Optimizers.

# What makes gradients smaller that are too large.
# sharding/test_sharding_fit.py, multilevel/test_multilevel_program.py
CLIP = "_clip_gradients"
# Whether a weight decays, by its name and shape. The same tests.
USE_WEIGHT_DECAY = "_use_weight_decay"
# A learning rate, which may be a schedule. budget/test_traces.py
LEARNING_RATE = "_learning_rate"
# What optimizers find a variable's own ones by. The same tests, and
# optimizers/test_adamw8bit.py.
INDEX = "_get_variable_index"
# What makes the weights that decay smaller. step/test_updates.py
DECAY = "_apply_weight_decay"
# What optimizers with a step of their own around all variables override.
ALL_STEPS = "_backend_update_step"
# What adds gradients up over replicas, after each has clipped its own.
# step/test_mirrored.py, step/test_updates.py
ADD_UP_OVER_REPLICAS = "_all_reduce_sum_gradients"


# Variables.

# Through which every assignment goes. sharding/test_sharding.py
ASSIGN = "_direct_assign"


def tf_variable(variable: keras.Variable) -> Any:
    """TensorFlow's variable behind Keras's, whatever scope is open; `None` if
    it has none yet. step/test_capture.py"""
    return variable._value


def assign(variable: keras.Variable, value: Any) -> None:
    """Assigns a variable, whatever scope is open. remat/test_remat.py"""
    variable._direct_assign(value)


def set_path(variable: keras.Variable, path: str) -> None:
    """Names a variable as another one. sharding/test_checkpoint.py"""
    variable._path = path


class Variable(keras.Variable):
    """A variable whose subclass says what it is at any time.

    A `keras.Variable` that exists may be given this class; see `whole_of`.
    sharding/test_sharding_variables.py
    """

    # What is there in its place now, the shape of that, and what assigns it.
    held: Any
    held_shape: tuple[int, ...]
    put: Callable[[Any], None]

    def autocast_value(self, value: Any) -> Any:
        """A value in the dtype that the layer around computes in."""
        return self._maybe_autocast(value)

    @property
    def _value(self):  # type: ignore[override]
        return self.held

    @property
    def _shape(self):  # type: ignore[override]
        return self.held_shape

    @property
    def _ndim(self):  # type: ignore[override]
        return len(self.held_shape)

    def _direct_assign(self, value):
        self.put(value)


def whole_of(variable: keras.Variable) -> Any:
    """The TensorFlow variable that Keras made, whatever class `variable` has
    now: its name and shape, if not its values.
    sharding/test_sharding_variables.py"""
    return vars(variable)["_value"]


def replace_whole(variable: keras.Variable, whole: tf.Variable) -> None:
    """Puts another one in the place of that."""
    shape = tuple(whole.shape)
    vars(variable).update(_value=whole, _shape=shape, _ndim=len(shape))


# What `compile` was given, resolved.


def compiled_loss(model: keras.Model) -> Any:
    """What computes the loss that `compile` was given; `None` without one.
    losses/test_chunked_loss.py"""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> Any:
    """What updates the metrics that `compile` was given; `None` without any.
    losses/test_chunked_loss.py"""
    return model._compile_metrics


def asked_metrics(model: Any) -> list:
    """What `compile` was given as metrics: names, functions or metrics.
    budget/test_memory_budget.py"""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    given = compiled._user_metrics, compiled._user_weighted_metrics
    return keras.tree.flatten(given)


def given_metrics(model: Any) -> list[keras.metrics.Metric]:
    """The metric objects among `asked_metrics`; before `compiled_metrics` is
    built its own list is empty. budget/test_no_trace.py"""
    metric = keras.metrics.Metric
    return [x for x in asked_metrics(model) if isinstance(x, metric)]


def losses_of(compiled: Any) -> list:
    """The losses of the outputs, once `compiled_loss` was built.
    losses/test_chunked_loss.py"""
    return [each.loss for each in compiled._flat_losses]


# The function that a metric is the mean of. losses/test_chunked_loss.py
METRIC_FUNCTION = "_fn"
# The loss of which KerasHub's `Perplexity` is made. The same test.
PERPLEXITY_LOSS = "_crossentropy"


def function_of(wrapper: Any) -> tuple[Any, dict]:
    """The function of a loss, or a metric, that wraps one, and its keyword
    arguments; `None` of another. losses/test_chunked_loss.py"""
    function = getattr(wrapper, "fn", getattr(wrapper, METRIC_FUNCTION, None))
    return function, getattr(wrapper, "_fn_kwargs", {})


# Attention. attention/test_chunked_attention.py

# Where `keras.ops` looks attention up.
backend_nn = backend.nn
# What makes one mask of a layer's masks, and what attends.
ATTENTION_MASK = "_compute_attention_mask"
COMPUTE_ATTENTION = "_compute_attention"


# KerasHub's: the function, of a layer's module, and the method that tell it to
# call `keras.ops.dot_product_attention`. losses/test_language_models.py
_FUSED_FUNCTION = "fused_attention_op_available"
_FUSED_METHOD = "_use_fused_attention_op"


def fused_attention(layer: Any) -> tuple[Any, str] | None:
    """What to replace, and by which name, so that a layer of KerasHub's leaves
    attention to Keras; `None` if it does not, or would compute another one."""
    slides = getattr(layer, "sliding_window_size", None)
    slides = getattr(layer, "use_sliding_window_attention", slides)
    capped = getattr(layer, "logit_soft_cap", None)
    if slides or capped:
        return None
    if hasattr(layer, _FUSED_METHOD):
        return None if layer.dropout else (layer, _FUSED_METHOD)
    module = sys.modules.get(type(layer).__module__)
    is_there = hasattr(module, _FUSED_FUNCTION)
    return (module, _FUSED_FUNCTION) if is_there else None


def attention_scale(layer: Any) -> float:
    """What an attention layer multiplies its scores by."""
    scale = getattr(layer, "_inverse_sqrt_key_dim", None)
    return layer._inverse_sqrt_head_dim if scale is None else scale


def attention_dropout(layer: Any) -> Any:
    """The layer that drops scores, within an attention layer."""
    return layer._dropout_layer


def gives_scores(layer: Any) -> bool:
    """Whether a `GroupQueryAttention` is asked for its scores right now."""
    return bool(getattr(layer, "_return_attention_scores", False))


def sliding_window(layer: Any) -> Any:
    """How far an attention layer looks, or `None`."""
    own = getattr(layer, "_sliding_window", None)
    return getattr(layer, "sliding_window", own)
