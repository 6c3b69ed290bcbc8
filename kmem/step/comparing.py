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
import re
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.graph import releasing
from kmem.step import batches
from kmem.step import capture
from kmem.step import examples
from kmem.step.loss_terms import Loss
from kmem.step.loss_terms import LossTerms
from kmem.step.loss_terms import recording
from kmem.step.metrics import reached_from
from kmem.step.multiples import RANDOM

_OF_SHAPES = frozenset({"OnesLike", "ZerosLike", "Shape", "Size", "Rank"})
# By how much sums in another order may differ, of the largest number: they do
# by 1e-7 in the nets of `keras.applications`.
_ROUNDING, _ROUNDING_OF_16_BITS = 1e-5, 5e-2
# Whose layers compute every example by itself, but for normalization.
_KNOWN = frozenset({"keras", "keras_hub", "kmem"})
# Those of `tf.random`, with which Keras draws too.
_DRAWS = ("normal", "uniform", "truncated_normal", "gamma", "binomial")
_AXES = "axis", "axes"
_ONE_ROW = "one_row_for_all"
_FAILED = "which could not be tried on random examples"
# Operations that are seen to have run.
_CHANGING = re.compile("Assign|Print|PyFunc|ResourceScatter")


@contextlib.contextmanager
def looking() -> Iterator[dict[str, bool | None]]:
    """Tells, for the losses that this thread computes within, by name: whether
    it compares examples; `None` of one that takes no random numbers, or that
    is more than its `call`."""
    found: dict[str, bool | None] = {}

    def note(loss, compares: bool | None) -> None:
        # Several may have one name, and one may have several outputs.
        verdicts = found.get(loss.name, False), compares
        found[loss.name] = max(verdicts, key=(False, None, True).index)

    def call(compute, loss, y_true, y_pred, *args, **kwargs):
        is_weighted = any(w is not None for w in (*args, *kwargs.values()))
        note(loss, _compares(loss, y_true, y_pred, is_weighted))
        return compute(loss, y_true, y_pred, *args, **kwargs)

    def own_call(compute, loss, *args, **kwargs):
        note(loss, None)
        return compute(loss, *args, **kwargs)

    base = keras.losses.Loss
    changes = [patching.method(base, "__call__", call)]
    changes += [
        patching.method(kind, "__call__", own_call)
        for kind in _with_own_call(base)
    ]
    with patching.together(changes):
        yield found


def _with_own_call(kind: type) -> Iterator[type]:
    """The classes below one, other than Keras's, that replace `__call__`."""
    for each in kind.__subclasses__():
        if "__call__" in vars(each) and _is_foreign(each):
            yield each
        yield from _with_own_call(each)


def names(model, loss: Loss, take_step: Callable, specs) -> list[str]:
    """The losses that compare the examples of a batch, as far as that is known:
    those of a `keras.Loss`, or all of a model's, once a step was tried.

    Args:
        loss: What is known of it so far.
        take_step: Takes a batch as far as its loss; returns the `Update`.
        specs: A batch of any number of rows, as `tf.TypeSpec`s.
    """
    is_known = loss.only_terms and not loss.may_compare and not may_mix(model)
    if loss.comparing or is_known:
        return loss.comparing
    # A trace would leave symbolic tensors with what was made to run eagerly.
    is_one = tf.distribute.get_strategy().num_replicas_in_sync == 1
    if not is_one or model.run_eagerly:
        return []
    layers = private_keras.all_layers(model)
    # What differs by itself in training rests, or all if that tells nothing.
    resting = list(filter(private_keras.own_state, layers)), layers
    told = _Told.FAILED
    vocabularies = examples.vocabularies(layers, batches.leaves(specs))
    for at_rest, vocabulary in itertools.product(resting, vocabularies):
        told = _tell(model, loss, take_step, specs, at_rest, vocabulary)
        if told is not _Told.FAILED:
            break
    if told is _Told.FAILED:
        return [f"perhaps the loss of {model.name}, {_FAILED}"]
    return [f"the loss of {model.name}"] if told is _Told.ANOTHER else []


class _Told(enum.Enum):
    """What a trial tells of a batch's loss beside that of its parts; one that
    may be seen, by what it leaves or takes, fails before it is made."""

    SAME, ANOTHER, FAILED = range(3)


def may_mix(model) -> bool:
    """Whether a layer, or an operation between layers, may compute an example
    of the others; batch normalization, which does, is told of by its state."""
    return any(
        _is_foreign(type(each))
        or isinstance(each, keras.layers.Lambda)
        or not isinstance(each, keras.layers.Layer)
        # An activation of one's own, say. A model has its losses.
        or any(
            callable(value) and _is_foreign(value)
            for value in vars(each).values()
            if not isinstance(each, keras.Model)
        )
        or any(_may_be_of_examples(getattr(each, name, ())) for name in _AXES)
        for layer in private_keras.all_layers(model)
        for each in (layer, *getattr(layer, "operations", ()))
    )


def _is_foreign(thing: Any) -> bool:
    """Whether a class, a function or what can be called is not Keras's."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0] not in _KNOWN


def _may_be_of_examples(axes: Any) -> bool:
    """Whether axes, as a layer has them, may be that of a batch."""
    axes = axes if isinstance(axes, tuple | list) else [axes]
    return any(isinstance(a, int) and (a == 0 or a < -1) for a in axes)


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

    def run(arrays, rows, totals, share=1.0):
        share = tf.constant(share, tf.float64)
        taken = map(functools.partial(examples.taken, rows), given, arrays)
        value, found = trace(share, totals, *taken)
        return float(value), found

    def tell(arrays, ways) -> _Told:
        totals = dict.fromkeys(loss.counted, tf.constant(1, tf.float64))
        if totals:
            _, totals = run(arrays, examples.ALL, totals)
        together, _ = run(arrays, examples.ALL, totals)
        apart = [
            [run(arrays, rows, totals, 0.5)[0] for rows in halves]
            for halves in ways
        ]
        difference = np.abs(np.sum(apart, 1) - together).max()
        if difference <= tolerance * max(abs(together), np.abs(apart).max()):
            return _Told.SAME
        return _Told.ANOTHER if np.isfinite(difference) else _Told.FAILED

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
            return _Told.FAILED
        with tf.init_scope():
            arrays = examples.random(given, **vocabulary)
            told = tell(arrays, examples.HALVES)
            if told is not _Told.SAME:
                return told
            labels = examples.labels(specs)
            for others in itertools.chain(
                examples.scaled(arrays, labels, layers),
                examples.marked(arrays, labels),
            ):
                # Of numbers that mean nothing to it, a step may say no.
                with contextlib.suppress(Exception):
                    if tell(others, examples.HALVES[:1]) is _Told.ANOTHER:
                        return _Told.ANOTHER
            return told
    except Exception:
        # A step of one's own may need other numbers, and raise anything.
        return _Told.FAILED
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(rounding)


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

    def drop(dropout, x, rate, seed, rng_alg="auto_select", noise_shape=None):
        sizes = tf.shape(x) if noise_shape is None else noise_shape
        with tf.name_scope(_ONE_ROW):
            return dropout(x, rate, seed, rng_alg, [1, *tf.unstack(sizes)[1:]])

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
            if hasattr(tf.random, name):
                yield patching.method(tf.random, name, replacement)
        dropping = tf.nn.experimental
        yield patching.method(dropping, "stateless_dropout", drop)

    return patching.together(changes())


def _compares(loss, y_true, y_pred, is_weighted: bool) -> bool | None:
    """Whether a loss compares examples; `None` if it takes no numbers."""
    function = getattr(loss, "fn", loss)
    is_known = not (_is_foreign(type(loss)) or _is_foreign(function))
    told = None
    with tf.init_scope():
        draws = examples.several([y_true, y_pred])
        for arrays in itertools.islice(draws, 1 if is_known else None):
            compares = _compares_in(arrays, loss, is_weighted)
            if compares:
                return True
            told = told if compares is None else False
    return told


def _compares_in(arrays: list, loss, is_weighted: bool) -> bool | None:
    """Whether a loss compares some examples; `None` if it cannot take them."""

    def value(rows):
        return np.asarray(loss.call(*(array[rows] for array in arrays)))

    try:
        together = value(examples.ALL)
        apart = [list(map(value, halves)) for halves in examples.HALVES]
    except Exception:
        # A loss of one's own may need other numbers, and raise anything.
        return None
    if not np.all(np.isfinite(together)):
        return None
    if is_weighted and not together.ndim:
        return True  # Keras multiplies it by all of the weights.
    tolerance = _ROUNDING * np.abs(together).max(initial=0)
    for halves, parts in zip(examples.HALVES, apart, strict=True):
        if together.ndim:
            whole = np.concatenate([together[rows] for rows in halves])
            joined = np.concatenate(parts)
        else:
            whole, joined = together, np.mean(parts)
        if whole.shape != joined.shape or not np.allclose(
            whole, joined, rtol=0, atol=tolerance
        ):
            return True
    return False
