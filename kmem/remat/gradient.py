"""The forward pass, the recomputation, and the gradient between them."""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kmem.remat import dependencies
from kmem.remat import purity
from kmem.remat import state
from kmem.remat.structure import Structure
from kmem.remat.structure import is_differentiable

_FIRST, _SECOND = 1, 2
_running = contextvars.ContextVar("running", default=0)


def recompute(fn: Callable) -> Callable:
    """Lets a function keep only its arguments for its gradient.

    The gradient runs `fn` again, with the same random numbers, the same
    variables, masks and `training` as before. What `fn` assigns to Keras's
    variables, and the losses its layers add, count once. May be nested, and
    differentiated twice.

    Args:
        fn: A function of tensors, which may be nested in its arguments among
            anything else, that calls Keras layers. It gets no gradient for
            tensors that it closes over.

    Returns:
        A function with the arguments and results of `fn`. It raises a
        `NotRecomputable`, which is a `ValueError`, if `fn` does what cannot
        be done twice: random numbers that are not Keras's, assignments to
        variables that are not Keras's, calls of Python. In eager mode this is
        looked for once, in a trace before the first call.

    Example:

    ```python
    import keras
    import tensorflow as tf

    from kmem import remat

    block = keras.Sequential(
        [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.5)]
    )
    x = tf.random.normal((8, 64))
    with tf.GradientTape() as tape:
        y = remat.recompute(block)(x, training=True)
    gradients = tape.gradient(y, block.trainable_weights)
    ```
    """
    checked = False

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal checked
        # Within a forward pass that is not kept there is nothing to leave out.
        if _running.get() == _FIRST:
            return fn(*args, **kwargs)
        segment = _Segment(fn, Structure((args, kwargs)))
        # Graphs are looked at as they are made, and a function within
        # another one with that one.
        if tf.executing_eagerly() and not _running.get() and not checked:
            segment.check()
            checked = True
        return segment()

    return call


class _Segment:
    """One call of a function, and what its gradient needs."""

    def __init__(self, fn, arguments: Structure):
        self._fn = fn
        self._arguments = arguments
        self._ambient = state.ambient()

    def check(self) -> None:
        """Traces the function by itself, to look at its operations."""

        def trace(*tensors):
            with state.restored(self._ambient, []):
                self._first_run(self._arguments.join(list(tensors)))

        # Traced by Keras's rules, in which layers are plain Python.
        trace = tf.function(trace, autograph=False)
        specs = map(tf.type_spec_from_value, self._arguments.tensors)
        trace.get_concrete_function(*specs)

    def __call__(self):
        tensors = [state.untracked(t) for t in self._arguments.tensors]
        run, results = self._first_run(self._arguments.join(tensors))
        if run.unbuilt:
            # Initial values were drawn that no variable has: once more.
            run, results = self._first_run(self._arguments.join(tensors))
        if run.unbuilt:
            reason = "calls a layer that is not built yet"
            raise purity.NotRecomputable(self._fn, reason)
        run.commit()
        layers, losses = run.take_losses()
        results = Structure((results, losses))
        self._variables = run.entry
        self._trained = [
            (variable, value)
            for variable, value in run.entry
            if variable.trainable and is_differentiable(value)
        ]
        self._raw = run.raw
        self._layers = layers
        tensors = list(results.tensors)
        indices = [i for i, t in enumerate(tensors) if is_differentiable(t)]
        outputs = self._linked([tensors[i] for i in indices])
        for index, output in zip(indices, outputs, strict=True):
            tensors[index] = output
        results, losses = results.join(tensors)
        for layer, loss in zip(layers, losses, strict=True):
            # Not a method that a subclass may have: that was called before.
            keras.layers.Layer.add_loss(layer, loss)
        return results

    def _first_run(self, arguments):
        args, kwargs = arguments
        before = _num_operations()
        with self._explained(), _as(_FIRST), state.FirstRun() as run:
            results = self._fn(*args, **kwargs)
        if before is not None:
            graph = tf.compat.v1.get_default_graph()
            found = purity.effects(graph.get_operations()[before:])
            if found:
                reason = f"contains {', '.join(found)}"
                raise purity.NotRecomputable(self._fn, reason)
        return run, results

    def _linked(self, outputs: list) -> list:
        """The outputs, with the recomputation as their gradient."""
        sources = [t for t in self._arguments.tensors if is_differentiable(t)]
        sources += [value for _, value in self._trained]
        sources += [tf.convert_to_tensor(variable) for variable in self._raw]
        if not sources or not outputs:
            return outputs

        link: Any = tf.custom_gradient(lambda *_: (outputs, self._gradient))
        return link(*sources)

    def _gradient(self, *gradients):
        """The gradients of the sources, from those of the outputs."""
        known = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        num_tensors = len(self._arguments.tensors)
        starts = list(self._arguments.tensors)
        seeds, weights = [], []
        for variable, value in self._variables:
            kind = weights if is_differentiable(value) else seeds
            kind.append((variable, value))
        starts += [value for _, value in seeds]
        starts, values = dependencies.after(
            known, starts, [value for _, value in weights]
        )
        tensors, values = starts[:num_tensors], starts[num_tensors:] + values
        variables = [variable for variable, _ in (*seeds, *weights)]
        values = list(zip(variables, values, strict=True))
        value_of = {id(variable): value for variable, value in values}
        inputs = [t for t in tensors if is_differentiable(t)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(inputs)
            tape.watch([value_of[id(v)] for v, _ in self._trained])
            tape.watch(self._raw)
            run = state.SecondRun(values, tape)
            args, kwargs = self._arguments.join(tensors)
            ambient = state.restored(self._ambient, self._layers)
            with self._explained(), _as(_SECOND), ambient, run:
                results = self._fn(*args, **kwargs)
        _, losses = run.take_losses()
        outputs = [
            t
            for t in Structure((results, losses)).tensors
            if is_differentiable(t)
        ]
        del results, losses
        outputs = [
            o for o, g in zip(outputs, gradients, strict=True) if g is not None
        ]
        leaves = [
            [value_of[id(v)], *run.assigned.get(id(v), [])]
            for v, _ in self._trained
        ]
        found: Any = tape.gradient(
            outputs, [inputs, leaves, self._raw], output_gradients=known
        )
        of_inputs, of_leaves, of_raw = found
        of_variables = [*map(_sum, of_leaves), *of_raw]
        of_inputs = dependencies.before(of_variables, of_inputs)
        return [*of_inputs, *of_variables]

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except state.CannotRepeat as error:
            raise purity.NotRecomputable(self._fn, str(error)) from None


@contextlib.contextmanager
def _as(run: int):
    token = _running.set(run)
    try:
        yield
    finally:
        _running.reset(token)


def _sum(gradients: list):
    """The sum of gradients that may be `None`; a single one as it is."""
    present = [g for g in gradients if g is not None]
    if len(present) < 2:
        return present[0] if present else None
    return tf.add_n([tf.convert_to_tensor(g) for g in present])


def _num_operations() -> int | None:
    if tf.executing_eagerly():
        return None
    return len(tf.compat.v1.get_default_graph().get_operations())
