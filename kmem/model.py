"""`fit` with memory options: `Model`, `wrap`, and what they share."""

import functools
import inspect
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import keras

# A dependency of TensorFlow's.
from typing_extensions import Unpack

from kmem import callbacks
from kmem.base import private_keras
from kmem.base.checks import must_be
from kmem.base.patching import in_place_of_keras
from kmem.base.patching import parameters
from kmem.budget import planner
from kmem.budget.inference import BudgetedInference
from kmem.budget.report import MemoryReport
from kmem.budget.training import BudgetedSession
from kmem.fit import pipeline
from kmem.fit import requirements
from kmem.fit.session import Session
from kmem.options import MemoryArguments
from kmem.options import MemoryOptions
from kmem.options import split_options
from kmem.sharding import training
from kmem.sharding.agreeing import in_processes
from kmem.step import batches

_SESSION = "_kmem_session"


class FitArguments(MemoryArguments, total=False):
    """The arguments of `fit`: Keras's, and the memory options."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: int | Literal["auto"]
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | Sequence[int]


class MemoryFit:
    """The methods of a model that takes memory options."""

    # `MemoryOptions` that `train_on_batch` follows, or `None`.
    memory_options: MemoryOptions | None = None
    # `kmem.budget.report.MemoryReport` of the last `memory_budget`, or `None`.
    memory_report: MemoryReport | None = None

    def fit(
        self, *args: Any, **kwargs: Unpack[FitArguments]
    ) -> keras.callbacks.History:
        """Keras's `fit`, which takes memory options as well.

        Args:
            *args: As in `keras.Model.fit`.
            **kwargs: As in `keras.Model.fit`, and any of:
                memory_budget: The device's peak during a step, with everything
                    in it: bytes, `"8GB"`, or a share of the device in (0, 1].
                    kmem chooses the fastest option that stays within it and
                    changes no number, or else the fewest micro-batches;
                    `model.memory_report` tells which. A step that fits as it
                    is stays as it is. Under `sharding` the budget is that of
                    each process.
                allow: What `memory_budget` may choose besides:
                    `"mixed_precision"` and `"batch_statistics"`, which change
                    the numbers, and `"sharding"`, if several processes train.
                microbatches: The number of micro-batches that every batch is
                    split into, for one update of the whole batch.
                gradient_accumulation_steps: The number of batches that one
                    update is made for, that of their union.
                mixed_precision: `"bfloat16"`, `"float16"` or
                    `kmem.MixedPrecision(...)`. This changes the numbers.
                remat: Activation checkpointing by a plan: `"auto"`, a peak in
                    bytes or as `"2GB"`, a share in (0, 1] of the peak without
                    a plan, a `kmem.Plan`, its path, or `kmem.Remat(...)`.
                dtr: Evict tensors when memory runs short, and recompute
                    them when they are read: `True`, a threshold such as
                    `"5GB"`, or `kmem.DTR(...)`. Training runs eagerly.
                sharding: Each process of TF_CONFIG holds one shard of the
                    optimizer's variables (`"optimizer"`, ZeRO-1), also of the
                    weights and gradients (`"gradients"`, ZeRO-2), or gathers
                    weights again for the backward pass (`"full"`, ZeRO-3); or
                    `kmem.Sharding(...)`. All processes get the same data.
                chunked_loss: Compute the last layer's logits, their
                    cross-entropy and metrics for some tokens at a time, so
                    that the logits of all never exist: `True`.
                chunked_attention: Compute attention for some queries at a
                    time, so that the scores of all never exist: `True`.

        Returns:
            Keras's `History`.

        Raises:
            TypeError: If an argument is not known.
            ValueError: If an option is not of one of its forms, or cannot
                work with this model. Nothing has been changed then.
        """
        return _fit(self, super().fit, args, kwargs)

    def train_on_batch(self, *args, **kwargs):
        """Keras's `train_on_batch`, under `self.memory_options`.

        With `gradient_accumulation_steps` a call that does not complete its
        group makes no update.
        """
        return _train_on_batch(self, super().train_on_batch, args, kwargs)

    def evaluate(self, *args, **kwargs):
        """Keras's `evaluate`, within `memory_budget`.

        A batch that does not fit in it is computed in equal parts; losses and
        metrics are those of the whole batch.

        Args:
            *args: As in `keras.Model.evaluate`.
            **kwargs: As in `keras.Model.evaluate`, and `memory_budget` as in
                `fit`, which is that of `self.memory_options` by default.

        Raises:
            ValueError: If nothing stays within the budget, or a batch has to
                be split for it and what is computed of an example depends on
                others.
        """
        return _evaluate(self, super().evaluate, args, kwargs)

    def predict(self, *args, **kwargs):
        """Keras's `predict`, within `memory_budget`; see `evaluate`.

        Outputs are kept in host memory then, and callbacks get them as NumPy
        arrays.
        """
        return _predict(self, super().predict, args, kwargs)


class _ModelType(type):
    """Makes `kmem.Model(inputs, outputs)` a plain Functional model.

    Keras turns the bases of a `Model` subclass into `Functional` when it is
    called with inputs and outputs, and so for all of its subclasses. So
    `Model` itself is never a base: whoever subclasses it gets its methods
    and `keras.Model`.
    """

    def __call__(cls, *args, **kwargs):
        if cls is Model:
            return wrap(keras.Model(*args, **kwargs))
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance):
        if cls is Model:
            return _is_wrapped(instance)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass):
        if cls is Model:
            return issubclass(subclass, MemoryFit)
        return super().__subclasscheck__(subclass)


class Model(MemoryFit, keras.Model, metaclass=_ModelType):
    """A `keras.Model` whose `fit` takes memory options.

    It is made and subclassed like `keras.Model`, and is saved as one: a
    functional model loads without kmem.

    Example:

    ```python
    import keras

    import kmem

    inputs = keras.Input((8,))
    model = kmem.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    x, y = keras.random.normal((64, 8)), keras.random.normal((64, 1))
    model.fit(x, y, batch_size=32, microbatches=4, verbose=0)
    ```
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        bases = []
        for base in cls.__bases__:
            bases += [MemoryFit, keras.Model] if base is Model else [base]
        cls.__bases__ = tuple(bases)


def wrap(model: keras.Model) -> Model:
    """Adds the memory options to the `fit` of a model that exists.

    Args:
        model: Any `keras.Model`: Functional, Sequential or subclassed, built
            or not, compiled or not. It is changed in place: `fit` and
            `train_on_batch` take memory options from now on, `evaluate` and
            `predict` a budget. Without options they are Keras's.

    Returns:
        The same object.

    Raises:
        ValueError: If `model` is not a `keras.Model`.

    Example:

    ```python
    import keras

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = keras.random.normal((64, 8)), keras.random.normal((64, 1))
    kmem.wrap(model).fit(x, y, batch_size=32, microbatches=4, verbose=0)
    ```
    """
    must_be(isinstance(model, keras.Model), model, "model", "a `keras.Model`")
    wrapped: Any = model
    if _is_wrapped(model):
        return wrapped
    # Instance attributes, not another class: the class is what Keras saves.
    methods = {
        "fit": _fit,
        "train_on_batch": _train_on_batch,
        "evaluate": _evaluate,
        "predict": _predict,
    }
    for name, method in methods.items():
        call = _wrapped_method(model, getattr(model, name), method)
        object.__setattr__(model, name, call)
    wrapped.memory_options = wrapped.memory_report = None
    return wrapped


def _is_wrapped(instance) -> bool:
    is_model = isinstance(instance, keras.Model)
    return is_model and hasattr(instance, "memory_options")


def _wrapped_method(model, plain, method):
    @functools.wraps(plain)
    def call(*args, **kwargs):
        return method(model, plain, args, kwargs)

    return call


def _fit(model, own_fit, args, kwargs):
    """A model's own `fit`, with the memory options among `kwargs`."""
    options = in_processes(split_options(kwargs, parameters(own_fit)))
    _end_train_on_batch(model)
    callbacks.end_earlier(model)
    # Shards that an error has left: nobody could plan for them.
    plans = options.remat is not None or options.memory_budget is not None
    if options.sharding is None or plans:
        training.make_whole(model)
    if options.sharding is None:
        training.check_whole(model)
    if not options:
        return own_fit(*args, **kwargs)
    fit = functools.partial(_fit_under, model, options)
    return in_place_of_keras(model, "fit", own_fit, fit, args, kwargs)


def _fit_under(model, options: MemoryOptions, keras_fit, args, kwargs):
    bound = inspect.signature(keras_fit).bind(*args, **kwargs)
    _check(model, options, lambda: pipeline.fit_batch(bound.arguments))
    requirements.check_batch(bound.arguments, options)
    session = _session(model, options, bound.arguments)
    given = bound.arguments.get("callbacks")
    own = callbacks.EndOfGroup(session)
    with callbacks.put_first(given, own) as bound.arguments["callbacks"]:
        try:
            session.install()
            history = keras_fit(*bound.args, **bound.kwargs)
        except BaseException:
            session.remove(failed=True)
            raise
        session.remove()
    return history


def _check(model, options: MemoryOptions, batch: Callable[[], Any]) -> None:
    """Checks; what is to be cut into shards is built first, if it can be."""
    if options.sharding is not None and model.compiled:
        if not private_keras.is_built(model) and (specs := batch()) is not None:
            planner.build(model, specs)
    requirements.check(model, options)


def _session(model, options: MemoryOptions, arguments):
    """What trains under the options, with what they leave open decided."""
    verbose = _verbose(arguments)
    if options.memory_budget is None and options.remat is None:
        return Session.of(model, options)
    batch = pipeline.fit_batch(arguments)
    spec = batch and pipeline.graph_spec(arguments, batch)
    reused = pipeline.keeps_traces(arguments)
    reserved = 0 if batch is None else pipeline.held_bytes(arguments, batch)
    if options.memory_budget is None:
        return planner.session_for(
            model, options, batch, spec, reserved, verbose, reused
        )
    session = BudgetedSession.of(model, options, verbose)
    if batch is not None:
        session.prepare(batch, spec, reserved, reused)
        validation = pipeline.validation_batch(arguments)
        if validation is not None:
            examples = pipeline.first_examples(arguments, count=3)
            reserved += pipeline.ready_bytes(validation)
            session.prepare_validation(validation, examples, reserved)
    return session


def _train_on_batch(model, own, args, kwargs):
    """A model's own `train_on_batch`, under `model.memory_options`."""
    if not model.memory_options:
        _end_train_on_batch(model)
        return own(*args, **kwargs)
    train = functools.partial(_train_on_batch_under, model)
    return in_place_of_keras(model, "train_on_batch", own, train, args, kwargs)


def _train_on_batch_under(model, keras_train_on_batch, args, kwargs):
    options = model.memory_options
    asked, session = vars(model).get(_SESSION, (None, None))
    if asked != options or not session.trains():
        _end_train_on_batch(model)
        bound = inspect.signature(keras_train_on_batch).bind(*args, **kwargs)
        rows = batches.num_rows(bound.arguments.get("x"))
        given = {**bound.arguments, "batch_size": rows}
        batch = functools.partial(pipeline.fit_batch, given)
        _check(model, options, batch)
        if options.memory_budget is not None:
            session = BudgetedSession.of(model, options)
        elif options.remat is None:
            session = Session.of(model, options)
        else:
            session = planner.session_for(model, options, batch())
        session.install(test_step=False)
        object.__setattr__(model, _SESSION, (options, session))
    return keras_train_on_batch(*args, **kwargs)


def _evaluate(model, own_evaluate, args, kwargs):
    """A model's own `evaluate`, within a budget."""
    # `fit` has its own.
    if kwargs.get(private_keras.WITHIN_FIT):
        return own_evaluate(*args, **kwargs)
    return _infer("evaluate", "test", model, own_evaluate, args, kwargs)


def _infer(name, kind, model, method, args, kwargs):
    given = kwargs.pop("memory_budget", None)
    if given is None and model.memory_options:
        given = model.memory_options.memory_budget
    if given is None:
        return method(*args, **kwargs)
    options = MemoryOptions(memory_budget=given)

    def infer(keras_method, args, kwargs):
        bound = inspect.signature(keras_method).bind(*args, **kwargs)
        requirements.check_inference(model, options, bound.arguments)
        verbose = _verbose(bound.arguments)
        inference = BudgetedInference.of(model, options, verbose)
        with inference.installed(kind):
            return keras_method(*args, **kwargs)

    return in_place_of_keras(model, name, method, infer, args, kwargs)


_predict = functools.partial(_infer, "predict", "predict")


def _verbose(arguments) -> int:
    return 0 if arguments.get("verbose", "auto") in (0, 2) else 1


def _end_train_on_batch(model) -> None:
    _, session = vars(model).pop(_SESSION, (None, None))
    if session is not None:
        session.remove()
