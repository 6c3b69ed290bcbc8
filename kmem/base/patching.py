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
# By the instance's id and the attribute's name, as long as it is replaced.
_attributes: "dict[tuple[int, str], _Attribute]" = {}
_methods: "dict[tuple[int, str], _Method]" = {}
# Not as they are when they are replaced.
_KERAS_METHODS = {
    name: getattr(keras.Model, name)
    for name in ("fit", "train_on_batch", "evaluate", "predict")
}


@contextlib.contextmanager
def attribute(instance, name: str, value) -> Iterator[None]:
    """Sets an attribute for a while, past Keras's own tracking.

    All threads see it. If several have set it, they see the latest of the
    values that are still set.

    Args:
        instance: The object, or a class. Afterwards it has, or lacks, what it
            did.
    """
    key = id(instance), name
    with _lock:
        if key not in _attributes:
            before = vars(instance).get(name, _MISSING)
            _attributes[key] = _Attribute(instance, name, before)
        replaced = _attributes[key]
        entry = replaced.enter(value)
    try:
        yield
    finally:
        with _lock:
            if not replaced.leave(entry):
                del _attributes[key]


@contextlib.contextmanager
def method(
    instance, name: str, replacement: Callable[..., Any]
) -> Iterator[None]:
    """Replaces a method for a while, for this thread only.

    Other threads call what the object had, or their own replacement.

    Args:
        replacement: What this thread calls within. Its first argument is what
            it called so far, the others are those of the call.
    """
    key = id(instance), name
    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:
        with _lock:
            replaced = _methods.get(key) or _Method(getattr(instance, name))
            replaced.enter(thread, replacement)
            _methods[key] = replaced
            stack.enter_context(attribute(instance, name, replaced.call))
        try:
            yield
        finally:
            with _lock:
                if not replaced.leave(thread):
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


class _Attribute:
    """An attribute that is replaced, and what it was."""

    def __init__(self, instance, name: str, before):
        self._instance = instance
        self._name = name
        self._before = before
        self._entries: list[list] = []
        # What sets an attribute past what its class makes of that.
        kinds = type, types.ModuleType, object
        self._own = next(kind for kind in kinds if isinstance(instance, kind))

    def enter(self, value) -> list:
        entry = [value]
        self._entries.append(entry)
        self._own.__setattr__(self._instance, self._name, value)
        return entry

    def leave(self, entry: list) -> bool:
        """Takes a value off; whether others are left."""
        self._entries = [each for each in self._entries if each is not entry]
        value = self._entries[-1][0] if self._entries else self._before
        if value is _MISSING:
            self._own.__delattr__(self._instance, self._name)
        else:
            self._own.__setattr__(self._instance, self._name, value)
        return bool(self._entries)


class _Method:
    """A method that threads replace, and what each of them calls instead."""

    def __init__(self, plain: Callable):
        self._plain = plain
        self._calls: dict[int, list[Callable]] = {}

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._current(threading.get_ident())(*args, **kwargs)

        self.call = call

    def enter(self, thread: int, replacement: Callable) -> None:
        before = self._current(thread)
        call = functools.partial(replacement, before)
        functools.update_wrapper(call, before)
        self._calls.setdefault(thread, []).append(call)

    def leave(self, thread: int) -> bool:
        """Takes the thread's latest replacement off; whether any is left."""
        self._calls[thread].pop()
        if not self._calls[thread]:
            del self._calls[thread]
        return bool(self._calls)

    def _current(self, thread: int) -> Callable:
        calls = self._calls.get(thread)
        return calls[-1] if calls else self._plain
