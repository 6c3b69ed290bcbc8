"""Keeps ids exact in 16 bits, and names the layers whose code is in the way.

Integers survive in 16 bits only up to 256 (bfloat16) or 2048 (float16), and
Keras casts the float inputs of a layer. Ids that arrive as floats therefore
reach their layer uncast, or an error names the layer: `_watch` follows rounded
inputs through the forward pass, up to the cast that makes them integers.

What this module does not do: repair a layer's own code, or follow a tensor
through `tf.py_function` and variables.
"""

import contextlib
import functools
import threading
import warnings
import weakref

import keras
import tensorflow as tf

from kmem.base.patching import attribute
from kmem.base.private_keras import all_layers
from kmem.base.private_tf import op_callbacks
from kmem.graph.names import current_graph

_SIXTEEN_BITS = ("bfloat16", "float16")
# Keras casts their inputs to integers, or compares them with others.
_TAKE_IDS = (
    keras.layers.Embedding,
    keras.layers.CategoryEncoding,
    keras.layers.Discretization,
    keras.layers.Hashing,
    keras.layers.HashedCrossing,
    keras.layers.IntegerLookup,
)
# What comes out of these is computed: no longer an input that was rounded.
_COMPUTE = frozenset(
    "BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D DepthwiseConv2dNative Einsum "
    "MatMul".split()
)
# Set on a tensor that was rounded to 16 bits, or made from one: a weak
# reference to the tensor before the rounding, or None. It is weak, to keep no
# memory: Keras holds a layer's arguments while the layer runs.
_ROUNDED_FROM = "_kmem_rounded_from"

# What is to be said of layers, or nothing where it was said.
_promoting: "weakref.WeakKeyDictionary[keras.layers.Layer, str]"
_promoting = weakref.WeakKeyDictionary()
_thread = threading.local()


def mark_rounded(converted, x) -> None:
    """Notes that `converted` is `x`, or `x` rounded to 16 bits."""
    if converted is x:
        return
    rounded = _sixteen_bit_tensors(converted)
    for tensor in rounded:
        setattr(tensor, _ROUNDED_FROM, None)
    if rounded and tf.is_tensor(x):
        setattr(converted, _ROUNDED_FROM, weakref.ref(x))


def concern(layer) -> bool:
    """Whether what computes a layer is to be replaced by a `guarded` one."""
    quantized = layer.quantization_mode is not None
    return quantized or _is_custom(layer) or _takes_exact(layer)


def guarded(layer, name: str, option, left_out: bool):
    """Returns a method of the layer that computes it, with exact inputs and
    errors that name it."""
    call = getattr(layer, name)
    takes_exact = left_out or _takes_exact(layer)
    takes_ids = layer.quantization_mode and isinstance(layer, _TAKE_IDS)
    is_custom = _is_custom(layer)

    @functools.wraps(call)
    def guarded_call(*args, **kwargs):
        # Hidden states are no ids.
        if takes_exact and (left_out or not kwargs.get("reverse")):
            args = keras.tree.map_structure(_exact, args)
            kwargs = keras.tree.map_structure(_exact, kwargs)
            rounded = takes_ids and _sixteen_bit_tensors(args)
            if rounded:
                raise _rounded_ids(layer, rounded[0])
        try:
            with _watching(layer), _scale_as_called(layer):
                outputs = call(*args, **kwargs)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            if is_custom and _is_about_dtypes(error):
                raise ValueError(
                    f"Layer '{layer.name}' must compute in the dtype of its "
                    "inputs: cast its constants with `tf.cast(constant, "
                    "x.dtype)`, or keep it in float32 with "
                    f"`{_leave_out(layer, option)}`. Received: {error}"
                ) from error
            raise
        if is_custom and layer.compute_dtype in _SIXTEEN_BITS:
            _note_if_promoted(layer, option, (args, kwargs), outputs)
        return outputs

    return guarded_call


def _is_custom(layer) -> bool:
    """Whether a user's own code computes the layer's output."""
    module = getattr(type(layer).call, "__module__", "")
    of_keras = module.startswith("keras.")
    return not of_keras or isinstance(layer, keras.layers.Lambda)


def _takes_exact(layer) -> bool:
    # Functional and Sequential models cast to the dtype of their inputs.
    if isinstance(layer, keras.Model):
        return not _is_custom(layer)
    return isinstance(layer, _TAKE_IDS)


def _exact(x):
    origin = getattr(x, _ROUNDED_FROM, None)
    original = None if origin is None else origin()
    return x if original is None else original


def _float_tensors(structure) -> list:
    leaves: list = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in leaves if tf.is_tensor(t) and t.dtype.is_floating]


def _sixteen_bit_tensors(structure) -> list:
    floats = _float_tensors(structure)
    return [t for t in floats if t.dtype.name in _SIXTEEN_BITS]


def _is_about_dtypes(error) -> bool:
    text = str(error)
    # A layer inside has been named. Not by a class of its own: autograph
    # passes on an error's text, and its type only if it is Python's.
    if "kmem.MixedPrecision(" in text:
        return False
    # "half" when an operation runs, "float16" when it is traced.
    return "half" in text or "float16" in text


def _leave_out(layer, option) -> str:
    return f"kmem.MixedPrecision('{option.dtype}', exclude=('{layer.name}',))"


def _rounded_ids(layer, tensor):
    return ValueError(
        f"Layer '{layer.name}' must get ids as integers, because 16-bit floats "
        "cannot hold them. Pass an integer array, and declare the input with "
        '`keras.Input(..., dtype="int32")`. If they are no ids, keep the layer '
        f"in float32 with `kmem.MixedPrecision(..., exclude=('{layer.name}',))`"
        f". Received: {tensor.dtype.name} of shape {tensor.shape}"
    )


def _note_if_promoted(layer, option, inputs, outputs):
    if not _sixteen_bit_tensors(inputs):
        return
    if not any(t.dtype == tf.float32 for t in _float_tensors(outputs)):
        return
    # Perhaps by a layer inside that was left out, or has been named.
    for inner in all_layers(layer):
        if inner in _promoting or inner.compute_dtype == "float32":
            return
    _promoting[layer] = (
        f"Layer '{layer.name}' computes in float32 although its inputs are "
        f"{option.dtype}: `tf.matmul` and others promote to the dtype of a "
        "float32 constant. Cast its constants with "
        "`tf.cast(constant, x.dtype)` or, if this is meant, say so with "
        f"`{_leave_out(layer, option)}`."
    )


def warn(model: keras.Model) -> None:
    """Says, once, which layers of a model compute in float32 all the same."""
    for layer in all_layers(model):
        if text := _promoting.get(layer):
            _promoting[layer] = ""
            warnings.warn(text, stacklevel=2)


def _scale_as_called(layer):
    """Gives a quantized layer's gradient the scale that its call has: Keras
    lets it read the variable again, in 32 bits, where it runs eagerly."""
    scale = getattr(layer, "kernel_scale", None)
    if scale is None or not tf.executing_eagerly():
        return contextlib.nullcontext()
    return attribute(layer, "kernel_scale", tf.convert_to_tensor(scale))


@contextlib.contextmanager
def _watching(layer):
    """Lets `_watch` see what a layer computes."""
    running = vars(_thread).setdefault("running", [])
    if not running:
        _thread.graph = current_graph()
    running.append(layer)
    # Each time, since replicas that come back from an all-reduce have lost it.
    # Nothing happens if it is there.
    op_callbacks.add_op_callback(_watch)
    try:
        yield
    finally:
        running.pop()
        op_callbacks.add_op_callback(_watch)
        if not running:
            op_callbacks.remove_op_callback(_watch)
            _thread.graph = None


def _watch(op_type, inputs, attrs, outputs, op_name=None, graph=None):
    """Follows rounded tensors, and refuses to make integers of them."""
    # Empty in a replica's thread that computes what none of its layers does.
    running = vars(_thread).get("running")
    # A quantized layer makes integers of what is none.
    if not running or op_type in _COMPUTE or running[-1].quantization_mode:
        return
    rounded = any(hasattr(tensor, _ROUNDED_FROM) for tensor in inputs)
    if op_type == "AsString" or (
        op_type == "Cast" and outputs[0].dtype.is_integer
    ):
        layer = running[-1]
        # Nothing is known of a tensor inside of a loop or a function, which
        # has a graph of its own. There, and in a layer that takes ids, all
        # 16-bit floats count.
        strict = graph is not _thread.graph or isinstance(layer, _TAKE_IDS)
        if rounded or (strict and inputs[0].dtype.name in _SIXTEEN_BITS):
            raise _rounded_ids(layer, inputs[0])
    if rounded:
        # A second cast changes nothing about where a tensor comes from.
        is_cast = op_type == "Cast"
        origin = getattr(inputs[0], _ROUNDED_FROM) if is_cast else None
        for tensor in outputs:
            if tensor.dtype.is_floating or tensor.dtype == tf.variant:
                setattr(tensor, _ROUNDED_FROM, origin)
