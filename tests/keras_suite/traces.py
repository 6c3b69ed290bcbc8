"""What a `fit` under memory options must not leave behind."""

import functools
import types

import keras

# A function that a step calls, as kmem would put one in place of another.
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Traced by Keras, and those of kmem kept for the next `fit`.
_TRACED = {"train_function", "test_function", "predict_function"}
_SETTINGS = ("optimizer", "jit_compile", "run_eagerly", "steps_per_execution")


def _functions(instance) -> dict:
    """The functions among an instance's own attributes."""
    return {
        name: value
        for name, value in vars(instance).items()
        if isinstance(value, _FUNCTIONS) and name not in _TRACED
    }


def _optimizers(model) -> list:
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", None)
    return [each for each in (optimizer, inner) if each is not None]


class Traces:
    """A model, its layers and its optimizer, as they are before a `fit`.

    Args:
        model: The model.
    """

    def __init__(self, model):
        self._model = model
        self._layers = model._flatten_layers()
        self._optimizers = _optimizers(model)
        self._functions = self._see_functions()
        self._policies = [each.dtype_policy for each in self._layers]
        self._settings = self._see_settings()
        self._global = keras.config.dtype_policy()
        self._classes = self._see_classes()

    def _instances(self) -> list:
        return [*self._layers, *self._optimizers]

    def _see_functions(self) -> list[dict]:
        return [_functions(each) for each in self._instances()]

    def _see_settings(self) -> dict:
        return {n: getattr(self._model, n, None) for n in _SETTINGS}

    def _see_classes(self) -> dict:
        kinds = {k for each in self._instances() for k in type(each).__mro__}
        kinds |= {keras.Variable}
        return {
            kind: {n: v for n, v in vars(kind).items() if callable(v)}
            for kind in kinds
            if kind.__module__.startswith("keras")
        }

    def check(self) -> None:
        """Raises `AssertionError` if something was left."""
        instances = self._instances()
        for instance, before, after in zip(
            instances, self._functions, self._see_functions(), strict=True
        ):
            names = before.keys() | after.keys()
            # A bound method is made anew whenever it is read.
            left = [n for n in names if before.get(n) != after.get(n)]
            assert not left, f"functions left on {instance}: {left}"
        policies = [each.dtype_policy for each in self._layers]
        assert all(
            a is b for a, b in zip(policies, self._policies, strict=True)
        ), f"policies left: {policies}"
        settings = self._see_settings()
        left = {k: v for k, v in settings.items() if v is not self._settings[k]}
        assert not left, f"settings left: {left}"
        assert keras.config.dtype_policy() is self._global, "global policy"
        for kind, functions in self._see_classes().items():
            for name, value in functions.items():
                before = self._classes.get(kind, functions).get(name)
                assert value is before, f"{kind}.{name} was left changed"
