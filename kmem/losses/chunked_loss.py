"""`chunked_loss`: the loss and the metrics of `compile`, in chunks of tokens.

While a step runs the model gives hidden states in the place of its logits
(heads), within something that cannot be read: `Predictions`. What `compile`
made of the loss is handed on to Keras, which weighs, masks and reduces zeros;
what each of them counts is what the loss of a token counts (chunks), whatever
scales it by then, such as a micro-batch's share. The numbers that metrics are
the means of are computed along with it, by the metrics' own functions.

What this module does not do: other losses and metrics, several outputs, a
`train_step` that looks at predictions. They are refused.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_keras
from kmem.losses import chunks
from kmem.losses import heads
from kmem.step.mechanism import Mechanism

_SPARSE = keras.losses.sparse_categorical_crossentropy
_DENSE = keras.losses.categorical_crossentropy
# What makes one number of the labels and the predictions of each token.
_METRICS = (
    *(_SPARSE, _DENSE),
    keras.metrics.sparse_categorical_accuracy,
    keras.metrics.categorical_accuracy,
    keras.metrics.sparse_top_k_categorical_accuracy,
    keras.metrics.top_k_categorical_accuracy,
)
_map = keras.tree.map_structure
_WRAPPED_CALL = keras.losses.SparseCategoricalCrossentropy.call


def check(model: keras.Model) -> None:
    """Checks whether a model's loss can be computed in chunks."""
    head = heads.of(model)
    flat = keras.tree.flatten(model.loss)
    if len(flat) != 1:
        raise ValueError(
            "`chunked_loss` needs one loss on the model's one output: add the "
            f"others in a layer, with `add_loss`. Received: loss={model.loss!r}"
        )
    (loss,) = flat
    if isinstance(loss, str) and loss.lower() in ("crossentropy", "ce"):
        raise ValueError(
            "`chunked_loss` needs to know which cross-entropy it is: compile "
            'with "sparse_categorical_crossentropy" or its class. Received: '
            f"loss={loss!r}"
        )
    loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        _form(head, loss)
    elif loss not in (_SPARSE, _DENSE):
        _refuse_loss(loss)
    elif not head.is_softmax:
        _refuse_logits(head)
    compiled = private_keras.compiled_metrics(model)
    for metric in compiled.metrics if compiled is not None else []:
        _check_metric(metric)


class Predictions:
    """What a model gives while its loss is computed in chunks.

    Its logits are not there: what asks for them is an error.

    Attributes:
        head: What makes logits of hidden states.
        hidden: What the logits are made of.
        shape: That of the logits.
        dtype: Theirs.
        computed: For each metric, by its `id`, a number for each token; and
            the loss itself has been computed, if it is not `None`.
    """

    def __init__(self, head: heads.Head, hidden: tf.Tensor):
        self.head = head
        self.hidden = hidden
        self.shape = tf.TensorShape([*hidden.shape[:-1], head.num_classes])
        self.dtype = (head.after or [head.layer])[-1].compute_dtype
        self.computed: dict[int, tf.Tensor] | None = None
        setattr(self, private_keras.MASK, private_keras.mask_of(hidden))

    def refuse(self, *_, **__):
        """Says that there is nothing to read."""
        raise ValueError(
            "Under `chunked_loss` predictions must go to `compute_loss` and "
            "`compute_metrics` alone: the logits of all tokens never exist. "
            "Leave `chunked_loss` out, or compute what you need with "
            "`kmem.losses.LinearCrossEntropy`. Received: a step, or a loss, "
            "that reads `y_pred`"
        )

    __tf_tensor__ = __array__ = __getitem__ = __iter__ = __len__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = refuse
    __truediv__ = __rtruediv__ = __neg__ = __bool__ = __float__ = refuse


def tensors_of(y_pred):
    """What a model gave, with hidden states in the place of predictions."""
    return _map(lambda each: getattr(each, "hidden", each), y_pred)


def around(y_pred, tensors):
    """What a model would have given, had these been its `tensors_of`."""

    def made(each, tensor):
        is_hidden = isinstance(each, Predictions)
        return Predictions(each.head, tensor) if is_hidden else tensor

    return _map(made, y_pred, tensors)


class ChunkedLoss(Mechanism):
    """Changes what a model gives, and what makes a loss of it."""

    kinds = ("train", "test")

    def __init__(self, model: keras.Model):
        self._model = model
        self._head = heads.of(model)

    def computing(self, training: bool) -> patching.Context:
        return patching.together(self._changes(training))

    def _changes(self, training: bool) -> Iterator[patching.Context]:
        model = self._model
        yield self._head.passed()
        yield patching.method(model, "call", self._hiding)
        loss = functools.partial(self._loss, training)
        compiled = private_keras.compiled_loss(model)
        yield patching.method(compiled, "call", loss)
        metrics = private_keras.compiled_metrics(model)
        if metrics is not None:
            yield patching.method(metrics, "update_state", self._updating)

    def _hiding(self, call: Callable, /, *args, **kwargs):
        predictions = functools.partial(Predictions, self._head)
        return _map(predictions, call(*args, **kwargs))

    def _loss(
        self, training: bool, call: Callable, y_true, y_pred, sample_weight=None
    ):
        """Stands for the `call` of what computes the compiled loss."""
        predictions = _only(y_pred)
        model, head = self._model, self._head
        compiled = private_keras.compiled_loss(model)
        spec = _map(
            lambda p: keras.KerasTensor(tuple(p.shape), p.dtype), y_pred
        )
        if not compiled.built:
            compiled.build(y_true, spec)
        (loss,) = private_keras.losses_of(compiled)
        form = _form(head, loss)
        reduce = _Reduction(call, loss, y_true, y_pred, sample_weight)
        coefficients = chunks.coefficients_of(
            reduce, predictions.hidden, form.loss_dtype
        )
        if coefficients.shape.rank != predictions.shape.rank - 1:
            raise ValueError(
                "`chunked_loss` needs a label for each token. Received: "
                f"labels of shape {reduce.labels.shape} for logits of "
                f"shape {predictions.shape}"
            )
        hidden, labels = predictions.hidden, reduce.labels
        # A weight that is in shards is whole from now on.
        with tf.control_dependencies([hidden]):
            weights, product = head.weights()
        flat = chunks.Tokens(
            tf.reshape(hidden, [-1, hidden.shape[-1]]),
            tf.reshape(
                labels, [-1, head.num_classes] if reduce.is_dense else [-1]
            ),
            tf.reshape(coefficients, [-1]),
        )
        metrics = self._metrics(y_true, spec)
        total, found = chunks.weighted_sum(
            *(flat, weights, dataclasses.replace(form, **product)),
            metrics=[_of_tokens(head, each) for each in metrics],
            differentiate=training,
        )
        predictions.computed = {
            id(metric): tf.reshape(each, tf.shape(hidden)[:-1])
            for metric, each in zip(metrics, found, strict=True)
        }
        return total

    def _metrics(self, y_true, spec) -> list:
        """The metrics of `compile`, made if they are not yet."""
        compiled = private_keras.compiled_metrics(self._model)
        if compiled is None:
            return []
        if not compiled.built:
            compiled.build(y_true, spec)
        for metric in compiled.metrics:
            _check_metric(metric)
        return compiled.metrics

    def _updating(self, update: Callable, y_true, y_pred, sample_weight=None):
        """Stands for what updates the metrics of `compile`."""
        predictions = _only(y_pred)
        if predictions.computed is None:
            raise ValueError(
                "Under `chunked_loss` a step must call `compute_loss` "
                "before `compute_metrics`, with the same predictions. "
                "Received: predictions without a loss"
            )
        metrics = private_keras.compiled_metrics(self._model).metrics
        found = predictions.computed
        with patching.together(
            _giving(metric, found[id(metric)]) for metric in metrics
        ):
            update(y_true, _map(_hidden, y_pred), sample_weight)


class _Reduction:
    """What Keras makes of losses.

    Attributes:
        labels: Those that the loss was given.
        is_dense: Whether they are a number for each class.
    """

    def __init__(self, call, loss, y_true, y_pred, sample_weight):
        self._call = call
        self._loss = loss
        self._arguments = y_true, _map(_hidden, y_pred), sample_weight
        function, keywords = private_keras.function_of(loss)
        self.is_dense = function is _DENSE
        self._ignored = keywords.get("ignore_class")
        self.labels: Any = None

    def __call__(self, losses):
        def call(_, labels, y_pred):
            self.labels = labels if self.is_dense else tf.cast(labels, tf.int64)
            if self._ignored is None:
                return losses
            valid = tf.not_equal(self.labels, self._ignored)
            valid = tf.reshape(valid, tf.shape(losses))
            counted = tf.where(valid, losses, 0)
            setattr(counted, private_keras.MASK, valid)
            return counted

        with patching.method(self._loss, "call", call):
            return self._call(*self._arguments)


def _of_tokens(head: heads.Head, metric):
    """A function of the labels and logits of a chunk."""
    function, keywords = private_keras.function_of(metric)
    if function is None:  # A `Perplexity`.
        loss = getattr(metric, private_keras.PERPLEXITY_LOSS)

        def compute(labels, logits):
            labels = tf.cast(labels, metric.dtype)
            outputs = keras.ops.cast(head.outputs(logits), metric.dtype)
            return loss.call(labels, outputs)

        return compute
    return lambda labels, logits: function(
        labels, head.outputs(logits), **keywords
    )


def _giving(metric, values) -> patching.Context:
    """Within, a metric has these values of the tokens it is given."""
    function, _ = private_keras.function_of(metric)
    if function is not None:
        return patching.attribute(
            metric, private_keras.METRIC_FUNCTION, lambda *_, **__: values
        )
    loss = getattr(metric, private_keras.PERPLEXITY_LOSS)
    return patching.method(loss, "call", lambda *_: values)


def _form(head: heads.Head, loss) -> chunks.Form:
    function, keywords = private_keras.function_of(loss)
    wraps = type(loss).call is _WRAPPED_CALL
    if not wraps or function not in (_SPARSE, _DENSE):
        _refuse_loss(loss)
    if loss.reduction in (None, "none"):
        raise ValueError(
            "`chunked_loss` needs a loss that is one number: compile with "
            '`reduction="sum_over_batch_size"`. Received: '
            f"reduction={loss.reduction!r}"
        )
    if bool(keywords.get("from_logits")) == head.is_softmax:
        _refuse_logits(head)
    if keywords.get("axis", -1) != -1:
        raise ValueError(
            "`chunked_loss` needs a loss over the last axis. Received: "
            f"axis={keywords['axis']}"
        )
    return chunks.Form(
        num_classes=head.num_classes,
        biased=getattr(head.layer, "bias", None) is not None,
        compute_dtype=head.compute_dtype,
        loss_dtype=loss.dtype,
        label_smoothing=keywords.get("label_smoothing", 0.0),
        soft_cap=getattr(head.layer, "logit_soft_cap", None),
    )


def _refuse_loss(loss):
    raise ValueError(
        "`chunked_loss` needs Keras's own categorical or sparse categorical "
        "cross-entropy. Leave `chunked_loss` out with another loss. Received: "
        f"loss={loss!r}"
    )


def _refuse_logits(head: heads.Head):
    name = (head.after or [head.layer])[-1].name
    gives = "probabilities" if head.is_softmax else "logits"
    raise ValueError(
        "`chunked_loss` needs a loss of what the model gives: "
        "`from_logits=True` of logits, False after a softmax. Received: "
        f"from_logits={head.is_softmax} for the {gives} of layer {name}"
    )


def _check_metric(metric) -> None:
    function, keywords = private_keras.function_of(metric)
    own_update = type(metric).update_state
    if own_update is keras.metrics.MeanMetricWrapper.update_state:
        known = function in _METRICS and not keywords.get("ignore_class")
        if known and keywords.get("axis", -1) == -1:
            return
    loss = getattr(metric, private_keras.PERPLEXITY_LOSS, None)
    if loss is not None and private_keras.function_of(loss)[0] is _SPARSE:
        return
    raise ValueError(
        "`chunked_loss` computes Keras's categorical accuracies, top-k "
        "accuracies and cross-entropies, and KerasHub's `Perplexity`. Leave "
        "other metrics to `evaluate`, or leave `chunked_loss` out. Received: "
        f"metric={metric.name} ({type(metric).__name__})"
    )


def _only(y_pred) -> Predictions:
    (predictions,) = keras.tree.flatten(y_pred)
    if not isinstance(predictions, Predictions):
        raise ValueError(
            "Under `chunked_loss` a loss must be given the model's own "
            f"predictions, as they are. Received: y_pred={y_pred}"
        )
    return predictions


def _hidden(predictions: Predictions) -> tf.Tensor:
    """Hidden states with the mask of the predictions."""
    mask = private_keras.mask_of(predictions)
    if mask is None:
        return predictions.hidden
    hidden = tf.identity(predictions.hidden)
    setattr(hidden, private_keras.MASK, mask)
    return hidden
