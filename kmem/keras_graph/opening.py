"""Runs a Keras model part by part, without changing it.

A model is opened: while it is called, each of its parts (a layer, or an
operation such as `+`) comes to a visitor, which runs it. A `Functional` or
`Sequential` model is a line: its parts are known beforehand, so that several
in a row can be run as one function. Of a subclassed model only its calls of
layers are seen, one at a time. Models inside models are opened as well; other
layers are not.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras

from kmem.base import patching
from kmem.base import private_keras
from kmem.base.private_keras import all_layers


@dataclasses.dataclass(frozen=True)
class Part:
    """One call in a line.

    Attributes:
        operation: The layer, model or operation.
        reads: The line's values that it takes, by key.
        makes: The values that it gives.
        arguments: Turns `{key: tensor}` into its positional and keyword
            arguments.
    """

    operation: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    arguments: Callable[[dict], tuple[tuple, dict]]


@dataclasses.dataclass(frozen=True)
class Line:
    """A Functional model's parts, in the order in which Keras runs them."""

    parts: tuple[Part, ...]
    outputs: tuple[int, ...]

    @functools.cached_property
    def last_reads(self) -> dict[int, int]:
        """Value -> the last part that reads it; outputs are read after all."""
        last = {
            key: position
            for position, part in enumerate(self.parts)
            for key in part.reads
        }
        return last | dict.fromkeys(self.outputs, len(self.parts))


class Visitor:
    """What runs the parts of an opened model; this one just runs them."""

    def run_line(
        self,
        model: keras.Model,
        line: Line,
        values: dict[int, Any],
        bind: Callable[[Any], Callable],
    ) -> None:
        """Runs a line's parts.

        Args:
            values: The values so far, to be completed with the outputs.
            bind: Gives the function that calls an operation, with what Keras
                hands down (`training`).
        """
        for part in line.parts:
            run_part(part, values, bind(part.operation))

    def run_tree(self, model, call: Callable, /, *args, **kwargs):
        """Runs a subclassed model's `call`."""
        return call(*args, **kwargs)

    def run_child(self, layer, call: Callable, /, *args, **kwargs):
        """Runs the `call` of a layer that a subclassed model calls."""
        return call(*args, **kwargs)


def run_part(part: Part, values: dict[int, Any], function: Callable) -> None:
    """Runs one part of a line, and stores what it makes in `values`."""
    args, kwargs = part.arguments(values)
    outputs = keras.tree.flatten(function(*args, **kwargs))
    values.update(zip(part.makes, outputs, strict=True))


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers directly inside a layer, or a model."""
    inside = all_layers(layer)[1:]
    deeper = {id(x) for each in inside for x in all_layers(each)[1:]}
    return [each for each in inside if id(each) not in deeper]


def opened(
    model: keras.Model, visitor: Visitor, in_step: bool = False
) -> patching.Context:
    """Lets a visitor run the parts of a model that is called within; `in_step`,
    also calls of the model itself, and of its layers by others, as those that
    a `train_step` calls."""

    def changes():
        seen = [model, *children(model)] if in_step else []
        inside = {id(layer): layer for layer in seen}
        models = [x for x in all_layers(model) if isinstance(x, keras.Model)]
        for each in models:
            functional = private_keras.functional_of(each)
            if functional is not None:
                run = functools.partial(
                    _run_line, each, functional, _read_line(functional), visitor
                )
                name = private_keras.RUN_THROUGH_GRAPH
                yield patching.method(functional, name, run)
                continue
            tree = functools.partial(visitor.run_tree, each)
            yield patching.method(each, "call", tree)
            inside |= {id(layer): layer for layer in children(each)}
        for layer in inside.values():
            child = functools.partial(visitor.run_child, layer)
            yield patching.method(layer, patching.call_of(layer), child)

    return patching.together(changes())


def _run_line(
    model,
    functional,
    line: Line,
    visitor: Visitor,
    plain: Callable,
    inputs,
    operation_fn=lambda operation: operation,
    call_fn=None,
):
    flat = keras.tree.flatten(inputs)
    if call_fn is not None or any(keras.utils.is_keras_tensor(x) for x in flat):
        return plain(inputs, operation_fn=operation_fn, call_fn=call_fn)
    keys = [id(x) for x in functional.inputs]
    values = dict(zip(keys, flat, strict=True))
    visitor.run_line(model, line, values, operation_fn)
    outputs = [values[key] for key in line.outputs]
    return keras.tree.pack_sequence_as(functional.output, outputs)


def _read_line(functional) -> Line:
    parts = tuple(
        Part(
            operation=node.operation,
            reads=tuple(dict.fromkeys(id(x) for x in node.input_tensors)),
            makes=tuple(id(x) for x in node.outputs),
            arguments=node.arguments.fill_in,
        )
        for node in private_keras.nodes_of(functional)
    )
    return Line(parts, tuple(id(x) for x in functional.outputs))
