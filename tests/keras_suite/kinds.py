"""What tells one `fit` of Keras's tests from another, to memory options.

A `fit` whose model, compiled settings and arguments are of the same kinds as
those of an earlier one says nothing new of them: other numbers of units, of
epochs or of steps do not reach what they do in a step.
"""

import inspect
import json

import keras


def kind(model, args, kwargs) -> str:
    """The kind of a `fit` that is about to begin."""
    bound = inspect.signature(keras.Model.fit).bind(model, *args, **kwargs)
    given = {k: _form(v) for k, v in bound.arguments.items() if k != "self"}
    compiled = getattr(model, "_compile_config", None)
    config = {} if compiled is None else compiled.config
    parts = {
        "model": type(model).__qualname__,
        "layers": sorted({type(x).__name__ for x in model._flatten_layers()}),
        "inputs": _form(getattr(model, "_inputs_struct", None)),
        "outputs": _form(getattr(model, "_outputs_struct", None)),
        "policy": model.dtype_policy.name,
        "compiled": {k: _form(v) for k, v in config.items()},
        "eager": model.run_eagerly,
        "xla": model.jit_compile,
        "executed": model.steps_per_execution > 1,
        "given": given,
    }
    return json.dumps(parts, sort_keys=True, default=str)


def _form(value):
    """A value without its numbers."""
    if isinstance(value, dict):
        return {str(k): _form(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        forms = [_form(each) for each in value]
        same = forms[:1] if all(f == forms[0] for f in forms) else forms
        return [type(value).__name__, *same]
    if value is None or isinstance(value, bool | str):
        return value
    return type(value).__name__


def with_new(results: dict[str, dict]) -> list[str]:
    """The tests with a `fit` of a kind that those before them have not."""
    seen, chosen = set(), []
    for test, result in results.items():
        if result["outcome"] == "passed" and not seen.issuperset(
            result["kinds"]
        ):
            seen.update(result["kinds"])
            chosen.append(test)
    return chosen
