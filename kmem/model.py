"""`fit` with memory options: `Model`, `wrap`, and what they share."""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

import keras

# A dependency of TensorFlow's.
from typing_extensions import Unpack

from kmem.base import patching
from kmem.budget import planner
from kmem.budget.report import MemoryReport
from kmem.budget.training import BudgetedSession
from kmem.budget.training import in_processes
from kmem.callbacks import EndOfGroup
from kmem.fit import pipeline
from kmem.fit.requirements import check
from kmem.fit.requirements import check_batch
from kmem.fit.session import Session
from kmem.options import MemoryArguments
from kmem.options import MemoryOptions
from kmem.options import split_options
from kmem.sharding import training
from kmem.step import batches

_SESSION = "_kmem_session"
# Not as they are when they are replaced; see `_in_place_of_keras`.
_KERAS_METHODS = {
    name: getattr(keras.Model, name) for name in ("fit", "train_on_batch")
}


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
                    The fastest of what stays within it and changes no number
                    (recomputation, micro-batches) is chosen, or else the
                    fewest micro-batches, and told in `model.memory_report`;
                    nothing is if the step fits as it is. Under `sharding`,
                    each process's.
                allow: What `memory_budget` may choose besides:
                    `"mixed_precision"` and `"batch_statistics"`, which change
                    the numbers, and `"sharding"`, where several processes
                    train.
                microbatches: Split every batch into this many micro-batches;
                    one update, of the whole batch.
                gradient_accumulation_steps: One update for this many batches,
                    of their union.
                mixed_precision: `"bfloat16"`, `"float16"` or
                    `kmem.MixedPrecision(...)`. This one changes the numbers.
                remat: Keep part of the forward pass, recompute the rest:
                    `"auto"`, a budget in bytes or as `"2GB"`, a share of the
                    unplanned peak, a `kmem.Plan`, the path of one, or
                    `kmem.Remat(...)`.
                dtr: Evict tensors when memory runs short, and recompute
                    them when they are read: `True`, a threshold such as
                    `"5GB"`, or `kmem.DTR(...)`. Training runs eagerly.
                sharding: Each of the processes that TF_CONFIG names holds
                    one shard of the optimizer's variables (`"optimizer"`),
                    and of the weights (`"gradients"`), which are gathered
                    again for the backward pass (`"full"`), or
                    `kmem.Sharding(...)`. Give every process the same data.
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
    """Lets a model that exists take memory options in `fit`.

    Args:
        model: Any `keras.Model`: Functional, Sequential or subclassed, built
            or not, compiled or not. It is changed in place: its `fit` and
            `train_on_batch` follow memory options from now on, and without
            one they are Keras's.

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
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a `keras.Model`. Received: model={model!r}"
        )
    wrapped: Any = model
    if _is_wrapped(model):
        return wrapped
    # Instance attributes, not another class: the class is what Keras saves.
    methods = {"fit": _fit, "train_on_batch": _train_on_batch}
    for name, method in methods.items():
        call = _wrapped_method(model, getattr(model, name), method)
        object.__setattr__(model, name, call)
    wrapped.memory_options = wrapped.memory_report = None
    return wrapped


def _is_wrapped(instance) -> bool:
    return isinstance(instance, keras.Model) and hasattr(
        instance, "memory_options"
    )


def _wrapped_method(model, plain, method):
    @functools.wraps(plain)
    def call(*args, **kwargs):
        return method(model, plain, args, kwargs)

    return call


def _fit(model, own_fit, args, kwargs):
    """A model's own `fit`, with the memory options among `kwargs`."""
    options = in_processes(split_options(kwargs, _parameters(own_fit)))
    _end_train_on_batch(model)
    # Shards that an error has left: nobody could plan for them.
    plans = options.remat is not None or options.memory_budget is not None
    if options.sharding is None or plans:
        training.make_whole(model)
    if options.sharding is None:
        training.check_whole(model)
    if not options:
        return own_fit(*args, **kwargs)
    fit = functools.partial(_fit_under, model, options)
    return _in_place_of_keras(model, "fit", own_fit, fit, args, kwargs)


def _fit_under(model, options: MemoryOptions, keras_fit, args, kwargs):
    bound = inspect.signature(keras_fit).bind(*args, **kwargs)
    check(model, options)
    check_batch(bound.arguments, options)
    session = _session(model, options, bound.arguments)
    given = bound.arguments.get("callbacks")
    with _with_callback(given, EndOfGroup(session)) as callbacks:
        bound.arguments["callbacks"] = callbacks
        try:
            session.install()
            history = keras_fit(*bound.args, **bound.kwargs)
        except BaseException:
            session.remove(failed=True)
            raise
        session.remove()
    return history


def _parameters(method) -> set[str] | None:
    """The names of a method's parameters; `None` if it takes any."""
    parameters = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return None if inspect.Parameter.VAR_KEYWORD in kinds else {*parameters}


def _in_place_of_keras(model, name, method, replacement, args, kwargs):
    """Calls a model's own method, with `replacement` in the place of Keras's.

    A model may override `fit`, prepare what it is given, and hand it on to
    Keras: it is what Keras is given that the model trains on.

    Args:
        model: The model.
        name: The method's name.
        method: The model's own, bound.
        replacement: Takes Keras's method, bound, and its `args` and `kwargs`.
        args: What the model's own method is given.
        kwargs: The same.
    """
    if getattr(method, "__func__", None) is _KERAS_METHODS[name]:
        return replacement(method, args, kwargs)
    was_called = False

    def replaced(keras_method):
        @functools.wraps(keras_method)
        def call(self, *args, **kwargs):
            nonlocal was_called
            bound = functools.partial(keras_method, self)
            if self is not model:
                return bound(*args, **kwargs)
            was_called = True
            return replacement(bound, args, kwargs)

        return call

    with patching.method(keras.Model, name, replaced):
        result = method(*args, **kwargs)
    if not was_called:
        warnings.warn(
            f"Memory options had no effect: `{type(model).__name__}.{name}` "
            f"did not call Keras's `{name}`. Call `super().{name}(...)` in it, "
            "or train with `kmem.callbacks.MemoryOptions`.",
            stacklevel=4,
        )
    return result


def _session(model, options: MemoryOptions, arguments):
    """What trains under the options, with what they leave open decided."""
    verbose = 0 if arguments.get("verbose", "auto") in (0, 2) else 1
    if options.memory_budget is None and options.remat is None:
        return Session.of(model, options)
    batch = pipeline.fit_batch(arguments)
    reserved = 0 if batch is None else pipeline.held_bytes(arguments, batch)
    if options.memory_budget is None:
        plan = planner.plan_for(model, options, batch, reserved, verbose)
        return Session.of(model, options, plan)
    session = BudgetedSession.of(model, options, verbose)
    if batch is not None:
        session.prepare(batch, reserved)
    return session


def _train_on_batch(model, own_train_on_batch, args, kwargs):
    """A model's own `train_on_batch`, under `model.memory_options`."""
    if not model.memory_options:
        _end_train_on_batch(model)
        return own_train_on_batch(*args, **kwargs)
    train = functools.partial(_train_on_batch_under, model)
    name, own = "train_on_batch", own_train_on_batch
    return _in_place_of_keras(model, name, own, train, args, kwargs)


def _train_on_batch_under(model, keras_train_on_batch, args, kwargs):
    options = model.memory_options
    asked, session = vars(model).get(_SESSION, (None, None))
    if asked != options or not session.trains():
        _end_train_on_batch(model)
        check(model, options)
        plan = None
        if options.remat is not None:
            given = inspect.signature(keras_train_on_batch)
            given = given.bind(*args, **kwargs).arguments
            names = ("x", "y", "sample_weight")
            data = keras.utils.pack_x_y_sample_weight(*map(given.get, names))
            plan = planner.plan_for(model, options, batches.specs_of(data))
        if options.memory_budget is None:
            session = Session.of(model, options, plan)
        else:
            session = BudgetedSession.of(model, options)
        session.install(test_step=False)
        object.__setattr__(model, _SESSION, (options, session))
    return keras_train_on_batch(*args, **kwargs)


def _end_train_on_batch(model) -> None:
    _, session = vars(model).pop(_SESSION, (None, None))
    if session is not None:
        session.remove()


@contextlib.contextmanager
def _with_callback(callbacks, callback):
    """Puts `callback` first, so that the others see a finished epoch.

    A `CallbackList` is the caller's: it is given back as it was.
    """
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield [callback, *keras.tree.flatten(callbacks or [])]
        return
    callbacks.callbacks.insert(0, callback)
    try:
        yield callbacks
    finally:
        callbacks.callbacks.remove(callback)
