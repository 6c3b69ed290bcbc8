"""Which losses compare the examples of a batch.

A mean over examples can be put together of the means of parts; what a loss
such as `keras.losses.Dice()` or `Circle` makes of all examples cannot, nor a
sum made by hand. A loss does not say which it is, so it is tried: on a few
random examples, together and in two parts. So is a whole step with a loss that
is made by hand, or a layer that may mix examples. What this module does not do:
tell what layers with statistics mix, or what random numbers change.
"""

import contextlib
import enum
import functools
import inspect
import itertools
import math
import re
import string
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.graph import releasing
from kmem.step import batches
from kmem.step import capture
from kmem.step.loss_terms import Loss
from kmem.step.loss_terms import LossTerms
from kmem.step.loss_terms import recording
from kmem.step.metrics import reached_from
from kmem.step.multiples import RANDOM

# Two halves, in two ways, as one may be the same by chance; not of one row, of
# which an axis may be left out.
_ROWS, _ALL = 4, slice(None)
_HALVES = ((slice(0, 2), slice(2, 4)), (slice(0, 4, 2), slice(1, 4, 2)))
# A size that is not known, and the largest that is tried where all are many.
_UNKNOWN, _SMALL = 2, 8
# Of rows of unequal length: a half may be shorter than the whole.
_LENGTHS = np.array([1, 1, 2, 2])
_MANY = 2**20
_OF_SHAPES = frozenset({"OnesLike", "ZerosLike", "Shape", "Size", "Rank"})
# By how much sums in another order may differ, of the largest number: they do
# by 1e-7 in the nets of `keras.applications`.
_ROUNDING, _ROUNDING_OF_16_BITS = 1e-5, 5e-2
# Whose layers compute every example by itself, but for normalization.
_KNOWN = frozenset({"keras", "keras_hub", "kmem"})
# Those of `tf.random`, with which Keras draws too.
_DRAWS = ("normal", "uniform", "truncated_normal")
_ONE_ROW = "one_row_for_all"
_FAILED = "which could not be tried on random examples"
# Operations that are seen to have run.
_CHANGING = re.compile("Assign|Print|PyFunc|ResourceScatter")


@contextlib.contextmanager
def looking() -> Iterator[dict[str, bool | None]]:
    """Tells, for the losses that this thread computes within, by name: whether
    it compares examples; `None` of one that takes no random numbers."""
    found: dict[str, bool | None] = {}

    def call(compute, loss, y_true, y_pred, *args, **kwargs):
        found[loss.name] = _compares(loss, y_true, y_pred)
        return compute(loss, y_true, y_pred, *args, **kwargs)

    with patching.method(keras.losses.Loss, "__call__", call):
        yield found


def names(model, loss: Loss, take_step: Callable, specs) -> list[str]:
    """The losses that compare the examples of a batch, as far as that is known:
    those of a `keras.Loss`, or all of a model's, once a step was tried.

    Args:
        loss: What is known of it so far.
        take_step: Takes a batch as far as its loss; returns the `Update`.
        specs: A batch of any number of rows, as `tf.TypeSpec`s.
    """
    is_known = loss.only_terms and not loss.may_compare and not _may_mix(model)
    if loss.comparing or is_known:
        return loss.comparing
    # A trace would leave symbolic tensors with what was made to run eagerly.
    is_one = tf.distribute.get_strategy().num_replicas_in_sync == 1
    if not is_one or model.run_eagerly:
        return []
    layers = private_keras.all_layers(model)
    # What differs by itself in training rests, or all if that tells nothing.
    resting = list(filter(private_keras.own_state, layers)), layers
    told = _Told.NOT_TRIED
    vocabularies = list(_vocabularies(layers, batches.leaves(specs)))
    for at_rest in resting:
        for vocabulary in vocabularies:
            told = _tell(model, loss, take_step, specs, at_rest, vocabulary)
            if told is not _Told.FAILED:
                break
        if told in (_Told.SAME, _Told.ANOTHER):
            break
    if told is _Told.FAILED:
        return [f"perhaps the loss of {model.name}, {_FAILED}"]
    return [f"the loss of {model.name}"] if told is _Told.ANOTHER else []


class _Told(enum.Enum):
    """What a trial tells of a batch's loss beside that of its parts; one that
    may be seen, by what it leaves or takes, is not made."""

    SAME, ANOTHER, FAILED, NOT_TRIED = range(4)


def _vocabularies(layers: list, specs: list) -> Iterator[dict[str, list]]:
    """What random words, and integers, may be: those that layers look up, since
    to them all others are the same; then any integers."""
    known: list = []
    if not all(spec.dtype.is_floating for spec in specs):
        for layer in layers:
            # One of one's own may be anything of that name.
            with contextlib.suppress(Exception), tf.init_scope():
                known += layer.get_vocabulary()
    words = [term for term in known if isinstance(term, str)]
    integers = [term for term in known if not isinstance(term, str)]
    words = words or list(string.ascii_letters)
    # Zeros may be a mask, of which Keras refuses some on a GPU.
    for numbers in filter(None, (integers, [0, 1], [1, 2])):
        yield {"words": words, "integers": numbers}


def _may_mix(model) -> bool:
    """Whether a layer, or an operation between layers, may compute an example
    of the others; batch normalization, which does, is told of by its state."""
    kinds = {
        type(each)
        for layer in private_keras.all_layers(model)
        for each in (layer, *getattr(layer, "operations", ()))
    }
    return any(
        kind.__module__.split(".")[0] not in _KNOWN
        or kind is keras.layers.Lambda
        or not issubclass(kind, keras.layers.Layer)
        for kind in kinds
    )


def warn(names: list[str]) -> None:
    """Says that losses see the examples of a part together."""
    warnings.warn(
        "Losses that compare the examples of a batch see one part of it at a "
        "time, so that their gradients are not those of the whole batch: see "
        '"What differs" in docs/accumulation.md. A sum over the examples has '
        f'to be told by `reduction="sum"`. Received: {", ".join(names)}',
        stacklevel=2,
    )


def check_masks(model, denominators: list, weights: list) -> None:
    """Refuses losses whose denominators depend on weights that are unknown."""
    reached = reached_from(weights, without=_OF_SHAPES)
    if reached.isdisjoint(map(id, denominators)):
        return
    raise ValueError(
        "`sharding` needs losses whose masks do not depend on predictions, as "
        "`keras.losses.Circle`'s does: what a loss is divided by is counted "
        "before weights are gathered. Take another loss, or "
        f'`sharding="optimizer"`. Received: model={model.name}'
    )


def _tell(
    model, loss: Loss, take_step: Callable, specs, resting: list, vocabulary
) -> _Told:
    """Whether a batch's loss is another than that of its parts, where some
    layers do what they do in inference."""
    layers = private_keras.all_layers(model)
    is_coarse = any("16" in str(layer.compute_dtype) for layer in layers)
    tolerance = _ROUNDING_OF_16_BITS if is_coarse else _ROUNDING
    given = batches.leaves(specs)

    def loss_of(share, totals, *rows):
        terms = LossTerms(share, totals)
        with (
            capture.DiscardedState(),
            recording(terms, layers),
            _at_rest(resting),
            tf.summary.record_if(False),
        ):
            update = batches.of_leaves(take_step, specs)(*rows)
        losses = [tf.cast(x, share.dtype) for x in tf.nest.flatten(update.loss)]
        value = tf.add_n([tf.reduce_sum(x) for x in losses])
        return value if update.sums_rows else value * share, {
            group: tf.cast(terms.denominators[group], share.dtype)
            for group in loss.counted
        }

    def run(rows, totals, share=1.0):
        share = tf.constant(share, tf.float64)
        taken = map(functools.partial(_taken, rows), given, arrays)
        value, found = trace(share, totals, *taken)
        return float(value), found

    # GPUs would round numbers to fewer bits.
    rounding = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        number = tf.TensorSpec((), tf.float64)
        totals = dict.fromkeys(loss.counted, number)
        trace = releasing.function(loss_of)
        # Not within `init_scope`, which stops all tapes.
        trace = trace.get_concrete_function(number, totals, *given)
        if _leaves_traces(trace.graph):
            return _Told.NOT_TRIED
        with tf.init_scope():
            arrays = _random(given, **vocabulary)
            whole = tf.constant(1, tf.float64)
            _, totals = run(_ALL, dict.fromkeys(loss.counted, whole))
            together, _ = run(_ALL, totals)
            apart = [
                [run(rows, totals, 0.5)[0] for rows in halves]
                for halves in _HALVES
            ]
    except tf.errors.ResourceExhaustedError:
        return _Told.NOT_TRIED
    except Exception:
        # A step of one's own may need other numbers, and raise anything.
        return _Told.FAILED
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(rounding)
    difference = np.abs(np.sum(apart, 1) - together).max()
    if difference <= tolerance * max(abs(together), np.abs(apart).max()):
        return _Told.SAME
    return _Told.ANOTHER if np.isfinite(difference) else _Told.FAILED


def _leaves_traces(graph: tf.Graph) -> bool:
    """Whether a graph assigns to what is no variable of Keras's, prints, calls
    Python, or draws other numbers for each row."""
    nodes = graph.as_graph_def()
    functions = (function.node_def for function in nodes.library.function)
    return any(
        _CHANGING.search(node.op)
        or (RANDOM.search(node.op) and _ONE_ROW not in node.name)
        for node in itertools.chain(nodes.node, *functions)
    )


def _at_rest(layers: list) -> patching.Context:
    """Within, layers compute as they do in inference, and what draws numbers
    draws the same for every row."""

    def infer(call, *args, **kwargs):
        given = inspect.signature(call).bind(*args, **kwargs)
        given.arguments["training"] = False
        return call(*given.args, **given.kwargs)

    def draw(random, shape, *args, **kwargs):
        sizes = tf.unstack(shape) if tf.is_tensor(shape) else tuple(shape)
        with tf.name_scope(_ONE_ROW):
            if not sizes:
                return random(shape, *args, **kwargs)
            row = random((1, *sizes[1:]), *args, **kwargs)
            return tf.repeat(row, sizes[0], axis=0)

    seeds = itertools.count()

    def seeded(name, _, shape, *args, seed=None, **kwargs):
        random = getattr(tf.random, f"stateless_{name}")
        return random(shape, (0, next(seeds)), *args, **kwargs)

    def changes():
        for layer in layers:
            name = patching.call_of(layer)
            if "training" in (patching.parameters(getattr(layer, name)) or ()):
                yield patching.method(layer, name, infer)
        for name in _DRAWS:
            yield patching.method(tf.random, f"stateless_{name}", draw)
            replacement = functools.partial(seeded, name)
            yield patching.method(tf.random, name, replacement)

    return patching.together(changes())


def _compares(loss, y_true, y_pred) -> bool | None:
    try:
        with tf.init_scope():
            arrays = _random([y_true, y_pred], "float32")
            together, *parts = (
                np.asarray(loss.call(*(array[rows] for array in arrays)))
                for rows in (_ALL, *_HALVES[0])
            )
            apart = np.concatenate(parts) if together.ndim else np.mean(parts)
    except Exception:
        # A loss of one's own may need other numbers, and raise anything.
        return None
    if not np.all(np.isfinite(together)):
        return None
    tolerance = _ROUNDING * np.abs(together).max(initial=0)
    return together.shape != apart.shape or not np.allclose(
        together, apart, rtol=0, atol=tolerance
    )


def _taken(rows: slice, spec, array: tf.Tensor):
    """Some rows of numbers, in the form that a spec tells of."""
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.sparse.from_dense(array[rows])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(
            array[rows],
            lengths=_LENGTHS[rows] if spec.ragged_rank == 1 else None,
            ragged_rank=spec.ragged_rank,
            row_splits_dtype=spec.row_splits_dtype,
        )
    return array[rows] if array.shape.rank else array


def _random(
    tensors: list,
    dtype: str | None = None,
    words: Sequence[str] = (),
    integers: Sequence[int] = (0, 1),
) -> list[tf.Tensor]:
    """Numbers between 0 and 1, or some of those given, in the place of tensors:
    in their dtypes, or in another one and of fewer if they are many."""
    # What one does not know of an axis, such as a length, another may.
    axes = itertools.zip_longest(*(tensor.shape[1:] for tensor in tensors))
    usual = [next(filter(None, sizes), _UNKNOWN) for sizes in axes]
    known = [
        [_ROWS, *(size or usual[i] for i, size in enumerate(tensor.shape[1:]))]
        if tensor.shape.rank != 0
        else []
        for tensor in tensors
    ]
    if dtype and max(map(math.prod, known)) > _MANY:
        known = [[min(size, _SMALL) for size in shape] for shape in known]
    rng = np.random.default_rng(0)
    arrays = []
    for tensor, shape in zip(tensors, known, strict=True):
        own = tf.as_dtype(tensor.dtype)
        if own == tf.string:
            array = rng.choice(words, shape)
        elif own.is_floating:
            array = rng.uniform(0.1, 0.9, shape)
        else:
            array = rng.choice(integers, shape)
        arrays.append(tf.cast(array, dtype or own))
    return arrays
