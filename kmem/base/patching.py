"""Replaces attributes of objects for a while, whatever threads do meanwhile.

The replicas of a strategy run one step in threads of their own, on the same
model and optimizer, and enter and leave a block in any order. So what an
attribute was is written down once, by who replaces it first, and comes back
when the last one leaves.

What this module does not do: know that one thread works for another. A method
that a thread replaces is the old one in the threads that it starts.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras

Context = contextlib.AbstractContextManager[Any]

_MISSING = object()
_lock = threading.RLock()
# By the instance's id and the attribute's name, as long as it is replaced:
# what it was, and the values that are set, each in a list of its own.
_values: dict[tuple[int, str], list[list]] = {}
# Of a method what it was, and what threads call instead.
_methods: dict[tuple[int, str], tuple[Callable, dict[int, list]]] = {}
# Not as they are when they are replaced.
_KERAS_METHODS = {
    name: getattr(keras.Model, name)
    for name in ("fit", "train_on_batch", "evaluate", "predict")
}


@contextlib.contextmanager
def attribute(instance, name: str, value) -> Iterator[None]:
    """Sets an attribute of an object, or a class, for a while, past Keras's own
    tracking. Afterwards it has, or lacks, what it did. All threads see the
    latest of the values that are still set."""
    key, entry = (id(instance), name), [value]
    with _lock:
        before = vars(instance).get(name, _MISSING)
        values = _values.setdefault(key, [[before]])
        values.append(entry)
        _set(instance, name, value)
    try:
        yield
    finally:
        with _lock:
            values[:] = [each for each in values if each is not entry]
            _set(instance, name, values[-1][0])
            if len(values) == 1:
                del _values[key]


@contextlib.contextmanager
def method(
    instance, name: str, replacement: Callable[..., Any]
) -> Iterator[None]:
    """Replaces a method for a while, for this thread only, by a function whose
    first argument is what this thread called so far. Other threads call what
    the object had, or their own replacement."""
    key, thread = (id(instance), name), threading.get_ident()
    with contextlib.ExitStack() as stack:
        with _lock:
            known = _methods.setdefault(key, (getattr(instance, name), {}))
            plain, calls = known
            own = calls.setdefault(thread, [plain])
            replaced = functools.partial(replacement, own[-1])
            own.append(functools.update_wrapper(replaced, own[-1]))

            @functools.wraps(plain)
            def call(*args: Any, **kwargs: Any) -> Any:
                latest = calls.get(threading.get_ident(), [plain])[-1]
                return latest(*args, **kwargs)

            stack.enter_context(attribute(instance, name, call))
        try:
            yield
        finally:
            with _lock:
                own.pop()
                if len(own) == 1:
                    del calls[thread]
                if not calls:
                    del _methods[key]


@contextlib.contextmanager
def member(instance, name: str, value) -> Iterator[None]:
    """As `attribute`, of what keeps no dictionary of its own, or sets it by a
    property; not by several threads."""
    before = getattr(instance, name)
    setattr(instance, name, value)
    try:
        yield
    finally:
        setattr(instance, name, before)


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar, value) -> Iterator[None]:
    """Within, a context variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def together(contexts: Iterable[Context]) -> Iterator[None]:
    """Enters contexts, each made when those before it are entered."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def call_of(layer) -> str:
    """The name of the method that Keras computes a layer with."""
    quantized = getattr(layer, "quantization_mode", None)
    return "quantized_call" if quantized else "call"


def parameters(method) -> set[str] | None:
    """The names of a method's parameters; `None` if it takes any."""
    given = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in given.values()}
    return None if inspect.Parameter.VAR_KEYWORD in kinds else {*given}


def in_place_of_keras(model, name, own, replacement, args, kwargs):
    """Calls a model's own method, with `replacement` in the place of Keras's.

    A model may override `fit`, prepare what it is given, and hand it on to
    Keras: it is what Keras is given that the model trains on.

    Args:
        model: The model.
        name: The method's name.
        own: The model's own, bound.
        replacement: Takes Keras's method, bound, and its `args` and `kwargs`.
        args: What the model's own method is given.
        kwargs: The same.
    """
    if getattr(own, "__func__", None) is _KERAS_METHODS[name]:
        return replacement(own, args, kwargs)
    was_called = False

    def call(keras_method, self, /, *args, **kwargs):
        nonlocal was_called
        bound = functools.partial(keras_method, self)
        if self is not model:
            return bound(*args, **kwargs)
        was_called = True
        return replacement(bound, args, kwargs)

    with method(keras.Model, name, call):
        result = own(*args, **kwargs)
    if not was_called:
        warnings.warn(
            f"Memory options had no effect: `{type(model).__name__}.{name}` "
            f"did not call Keras's `{name}`. Call `super().{name}(...)` in it, "
            "or train with `kmem.callbacks.MemoryOptions`.",
            stacklevel=4,
        )
    return result


def _set(instance, name: str, value) -> None:
    """Sets an attribute, past what its class makes of that."""
    kinds: Any = type, types.ModuleType, object
    own = next(kind for kind in kinds if isinstance(instance, kind))
    if value is _MISSING:
        own.__delattr__(instance, name)
    else:
        own.__setattr__(instance, name, value)


@dataclasses.dataclass(frozen=True)
class _Kept:
    """In the place of a model's `make_train_function`."""

    model: Any
    plain: Callable

    def __call__(self, force=False):
        if force:
            raise ValueError(
                "A callback must not call `make_train_function(force=True)`, "
                "which takes memory options off: change the model between "
                f"two calls of `fit`. Received: model={self.model.name}"
            )
        # One of the model's own may make it anew all the same.
        if self.model.train_function is None:
            self.plain()
        return self.model.train_function


def kept(model) -> Context:
    """Within, a model's train function is not made anew by others."""
    name = "make_train_function"
    return attribute(model, name, _Kept(model, maker(model, name)))


def maker(model, name: str) -> Callable:
    """The model's own method that makes one of its functions."""
    make = getattr(model, name)
    return make.plain if isinstance(make, _Kept) else make


def taking(session, function: Callable) -> Callable:
    """A train function that must take the session's step."""

    def train(iterator):
        logs = function(iterator)
        if not session.is_traced:
            raise ValueError(
                "A `make_train_function` of one's own must read "
                "`self.train_step` when it is called, as Keras's does: "
                "`step = self.train_step`, then `tf.function(lambda iterator: "
                "step(next(iterator)))`. Else memory options have no effect. "
                f"Received: model={session.model.name}"
            )
        return logs

    return train


def guarded(session, name: str, function: Callable) -> Callable:
    """A function that takes its session off by itself.

    It does when it raises, or is called in a later `fit`.
    """
    model = session.model
    history = model.history

    def call(iterator):
        # Every `fit` has a history of its own.
        if model.history is not history:
            session.remove()
            # A session that was put on twice does not know it any more.
            if getattr(model, name) is call:
                setattr(model, name, None)
            getattr(model, f"make_{name}")()
            return getattr(model, name)(iterator)
        try:
            return function(iterator)
        except StopIteration:
            raise
        except BaseException:
            session.remove(failed=True)
            raise

    return call
