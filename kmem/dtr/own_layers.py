"""Which layers of the user's own may be traced: what their Python does depends
on nothing but what a trace is made for.

A layer whose `call` counts its calls, draws a number or looks at the clock
does something else each time. So the source of `call` is read, and of the
functions and methods that it calls, and everything in it has to be known:
expressions of local names, what is in Keras, TensorFlow and `math`, layers
and variables of `self`, and constants. Constants of `self` and of the module
are part of what a call is traced for.

What it does not do: follow a decorator, a closure, `super()`, `with` or
`try`. Where it is in doubt, a layer runs operator by operator.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
from typing import Any

import keras

PLAIN = (type(None), bool, int, float, str)

_MODULES = ("keras", "tensorflow", "math")
_BUILTINS = frozenset(
    "abs all any bool dict enumerate float int isinstance len list max min "
    "range reversed round slice sorted str sum tuple zip ValueError "
    "TypeError".split()
)
# In a graph these do something else, or in another order.
_ELSEWHERE = frozenset(
    "Variable GradientTape associative_scan case cond custom_gradient "
    "executing_eagerly executing_eagerly_outside_functions fori_loop function "
    "get_static_value init_scope inside_function is_symbolic_tensor map "
    "map_fn numpy_function py_function recompute_grad remat scan switch "
    "switch_case vectorized_map while_loop".split()
)
_UNKNOWN = (
    *(ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Delete),
    *(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Yield, ast.YieldFrom),
    *(ast.Await, ast.With, ast.AsyncWith, ast.AsyncFor),
    *(ast.Try, getattr(ast, "TryStar", ast.Try)),  # From Python 3.11 on.
)
# What a class may have of its own: a step calls none of it but `call`.
_REPLACEABLE = frozenset(
    "__doc__ __firstlineno__ __init__ __module__ build build_from_config call "
    "compute_output_shape compute_output_spec from_config get_build_config "
    "get_config load_own_variables save_own_variables".split()
)
_PARTS = (keras.layers.Layer, keras.Variable, keras.random.SeedGenerator)


class _Unknown(Exception):
    """Something that may be different at every call."""


@dataclasses.dataclass
class Reads:
    """What a layer's Python reads that may change between two calls.

    Attributes:
        attributes: Names of the layer's attributes.
        constants: `(module's names, name)` of constants.
    """

    attributes: set[str] = dataclasses.field(default_factory=set)
    constants: list[tuple[dict, str]] = dataclasses.field(default_factory=list)

    def key(self, layer: keras.layers.Layer) -> Any:
        """What a trace is made for; `None` if one cannot be."""
        values = [getattr(layer, name, None) for name in self.attributes]
        values += [names.get(name) for names, name in self.constants]
        keys = tuple(map(_key, values))
        return None if None in keys else keys


def find_reads(layer: keras.layers.Layer) -> Reads | None:
    """What the `call` of a layer of the user's own reads.

    Args:
        layer: The layer.

    Returns:
        `Reads`; `None` if its Python may do anything.
    """
    try:
        _check_class(layer)
        reads = Reads()
        _Function(layer, reads, set()).read(type(layer).call)
    except _Unknown:
        return None
    return reads


def _check_class(layer) -> None:
    """What Keras calls around `call` must be its own."""
    names = [
        name
        for name, value in vars(layer).items()
        if inspect.isfunction(value) and not _is_known(value)
    ]
    for parent in type(layer).__mro__:
        if not _is_known(parent) and parent is not object:
            names += [n for n in vars(parent) if hasattr(keras.layers.Layer, n)]
    if not _REPLACEABLE.issuperset(names):
        raise _Unknown


class _Function:
    """Reads a function, and what it calls."""

    def __init__(self, layer, reads: Reads, seen: set):
        self._layer = layer
        self._reads = reads
        self._seen = seen

    def read(self, function, is_method: bool = True) -> None:
        if function in self._seen:
            return
        self._seen.add(function)
        if not inspect.isfunction(function) or function.__closure__:
            raise _Unknown
        defaults = (function.__defaults__, function.__kwdefaults__)
        if not all(isinstance(value, PLAIN) for value in _values(*defaults)):
            raise _Unknown  # A list would last from one call to the next.
        definition = _parse(function)
        nodes = list(ast.walk(definition))
        arguments = [node.arg for node in nodes if isinstance(node, ast.arg)]
        assigned = [
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        self._self = arguments[0] if is_method and arguments else ""
        self._names = function.__globals__
        self._locals = {*arguments, *assigned}
        if [*arguments, *assigned].count(self._self) > 1:
            raise _Unknown
        for statement in definition.body:
            self._visit(statement)

    def _visit(self, node) -> None:
        if isinstance(node, _UNKNOWN):
            raise _Unknown
        if isinstance(node, ast.Attribute | ast.Subscript):
            if not isinstance(node.ctx, ast.Load):
                raise _Unknown
        if isinstance(node, ast.Attribute):
            if node.attr in _ELSEWHERE:
                raise _Unknown
            if isinstance(node.value, ast.Name) and node.value.id == self._self:
                self._visit_attribute(node.attr)
                return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self._visit_name(node.id)
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _visit_attribute(self, name: str) -> None:
        found = inspect.getattr_static(type(self._layer), name, None)
        if inspect.isfunction(found):
            if _is_known(found):
                raise _Unknown
            inner = _Function(self._layer, self._reads, self._seen)
            inner.read(found)
        elif isinstance(found, property) and not _is_known(found.fget):
            raise _Unknown
        else:
            self._reads.attributes.add(name)

    def _visit_name(self, name: str) -> None:
        if name == self._self:
            raise _Unknown
        if name in self._locals:
            return
        if name not in self._names:
            if name not in _BUILTINS:
                raise _Unknown
            return
        found = self._names[name]
        if isinstance(found, PLAIN):
            self._reads.constants.append((self._names, name))
        elif inspect.isfunction(found) and not _is_known(found):
            inner = _Function(self._layer, self._reads, self._seen)
            inner.read(found, is_method=False)
        else:
            # An object, such as a tensor, has no name.
            own_name = getattr(found, "__name__", None)
            elsewhere = own_name is None or own_name in _ELSEWHERE
            if elsewhere or not _is_known(found):
                raise _Unknown


def _parse(function) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        [definition] = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise _Unknown from error
    is_plain = isinstance(definition, ast.FunctionDef)
    if not is_plain or definition.decorator_list:
        raise _Unknown
    return definition


def _values(defaults: tuple | None, by_name: dict | None) -> list:
    return [*(defaults or ()), *(by_name or {}).values()]


def _is_known(value) -> bool:
    """Whether it is a part of Keras, TensorFlow or `math`."""
    is_module = isinstance(value, types.ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", None)
    return str(name).split(".")[0] in _MODULES


class _Identity:
    """An object that is equal to itself alone."""

    def __init__(self, value):
        self._value = value

    def __eq__(self, other):
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self):
        return id(self._value)


def _key(value) -> Any:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, _PARTS) or (
        inspect.isfunction(value) and _is_known(value)
    ):
        return _Identity(value)
    if not isinstance(value, list | tuple):
        return None
    layers_only = all(isinstance(v, keras.layers.Layer) for v in value)
    if isinstance(value, list) and not layers_only:
        return None
    keys = tuple(map(_key, value))
    return None if None in keys else keys
