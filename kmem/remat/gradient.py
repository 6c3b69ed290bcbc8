"""The forward pass, the recomputation, and the gradient between them."""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmem.base import private_tf
from kmem.base.patching import setting
from kmem.graph import control
from kmem.graph import fusion
from kmem.graph import host
from kmem.graph import names
from kmem.graph import ordering
from kmem.graph import repeats
from kmem.remat import purity
from kmem.remat import state
from kmem.remat import uses
from kmem.remat.structure import Structure
from kmem.remat.structure import is_differentiable
from kmem.remat.structure import summed
from kmem.remat.structure import untracked

_FIRST, _SECOND = 1, 2
_running = contextvars.ContextVar("running", default=0)


def recompute(
    fn: Callable,
    check: bool = True,
    keep_residuals: bool = False,
    cpu_offload: bool = False,
) -> Callable:
    """Lets a function keep only its arguments for its gradient.

    The gradient runs `fn` again, with the same random numbers, the same
    variables, masks and `training` as before. What `fn` assigns to Keras's
    variables, and the losses its layers add, count once. May be nested, and
    differentiated twice.

    Args:
        fn: A function of tensors, which may be nested in its arguments among
            anything else, that calls Keras layers. It gets no gradient for
            tensors that it closes over.
        check: Whether to call `why_not_recomputable` before the first call
            in eager mode. Graphs are looked at as they are made.
        keep_residuals: Whether to keep, in a graph, what is computed from the
            arguments, and run again only what is computed from variables.
        cpu_offload: Whether the arguments wait in host memory, in a graph that
            is not XLA's; they stay for a gradient that is differentiated.

    Returns:
        A function with the arguments and results of `fn`. It raises a
        `NotRecomputable`, which is a `ValueError`, if `fn` does what cannot
        be done twice: random numbers that are not Keras's, assignments to
        variables that are not Keras's, calls of Python.

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
    unchecked, repeated = check, False

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal unchecked, repeated
        # Within a forward pass that is not kept there is nothing to leave out.
        if _running.get() == _FIRST:
            return fn(*args, **kwargs)
        arguments = Structure((args, kwargs), whole=True)
        segment = Segment(fn, arguments, keep_residuals, cpu_offload)
        # As `keras.remat` first runs what it is going to run again.
        segment.repeated = repeated = repeated or private_tf.tapes_are_stopped()
        # A function within another one was looked at with that one.
        if unchecked and tf.executing_eagerly() and not _running.get():
            segment.check()
            unchecked = False
        return segment()

    return call


def why_not_recomputable(fn: Callable, *args, **kwargs) -> str | None:
    """Tells whether a function, or a layer, may be given to `recompute`.

    It is traced, and changes nothing but that its layers are built.

    Args:
        fn: The function.
        *args: Its arguments; a `tf.TensorSpec` stands for a tensor.
        **kwargs: The same.

    Returns:
        The text of the error that `recompute` would raise, or `None`.

    Example:

    ```python
    import keras
    import tensorflow as tf

    from kmem import remat

    layer = keras.layers.Lambda(tf.random.shuffle)
    print(remat.why_not_recomputable(layer, tf.TensorSpec((8, 64))))
    # ... which contains RandomShuffle ...
    ```
    """
    try:
        Segment(fn, Structure((args, kwargs))).check()
    except purity.NotRecomputable as error:
        return str(error)
    return None


def is_running() -> bool:
    """Whether a function runs that is recomputed, for the first time or the
    second."""
    return bool(_running.get())


def is_repeating() -> bool:
    """Whether a function runs for the second time, for its gradient."""
    return _running.get() == _SECOND


def is_watched(*groups: list) -> bool:
    """Whether somebody differentiates what is computed from some tensors."""
    return private_tf.record.should_record_backprop(sum(groups, []))


class Segment:
    """One call of a function, and what its gradient needs."""

    # Whether TensorFlow runs the function again, and what is around it.
    repeated = False
    # Whether both runs are to be joined alike with what reads their results.
    is_compared = True

    def __init__(self, fn, arguments: Structure, keep=False, offload=False):
        self._fn = fn
        self._keep_residuals = keep
        # Before the first run, which lets go of what only it reads.
        self._sent = host.sent(arguments.tensors) if offload else []
        self._arguments = arguments
        self._ambient = state.ambient()
        self._scopes = names.Scopes()
        self._noted_outputs: set[int] = set()

    def check(self) -> None:
        """Traces the function by itself, to look at its operations."""

        def trace(*tensors):
            with state.restored(self._ambient):
                run, _ = self.first_run(list(tensors))
                run.take_left()[0].put_back()

        tensors = self._arguments.tensors
        try:
            # As Keras does it: layers are plain Python.
            tf.function(trace, autograph=False).get_concrete_function(*tensors)
        except purity.NotRecomputable:
            raise
        except Exception as error:
            reason = f"cannot be traced: {error}"
            raise purity.not_recomputable(self._fn, reason) from error

    def __call__(self):
        run, results = self.first_run(self._arguments.tensors)
        if run.unbuilt:
            # Initial values were drawn that no variable has: once more.
            run, results = self.first_run(self._arguments.tensors)
        if run.unbuilt:
            reason = "calls a layer that is not built yet"
            raise purity.not_recomputable(self._fn, reason)
        results = Structure((results, self.take(run)), whole=True)
        results, left = results.join(self._linked(results.tensors))
        self._left.give(left)
        return results

    def take(self, run: state.FirstRun) -> list:
        """Takes what the first run read; returns what it left on layers."""
        run.commit()
        self._left, left = run.take_left()
        self._values = run.entry
        self._trained = [
            (variable, value)
            for variable, value in run.entry
            if variable.trainable and is_differentiable(value)
        ]
        self._raw = run.raw
        return left

    def first_run(self, tensors):
        given = list(map(untracked, tensors))
        args, kwargs = self._arguments.join(given)
        self._scopes = names.Scopes()
        before = len(names.operations())
        with (
            self._explained(),
            setting(_running, _FIRST),
            self._scopes.recorded(),
            state.FirstRun() as run,
        ):
            results = self._fn(*args, **kwargs)
        made = names.operations()[before:]
        if effects := purity.effects(made):
            reason = f"contains {', '.join(effects)}"
            raise purity.not_recomputable(self._fn, reason)
        if self.is_compared:
            self._first, self._given = made, given
        return run, results

    def _linked(self, tensors: list) -> list:
        """The results, with the recomputation as their gradient."""
        sources = [t for t in self._arguments.tensors if is_differentiable(t)]
        sources += [value for _, value in self._trained]
        sources += [tf.convert_to_tensor(variable) for variable in self._raw]
        outputs = [t for t in tensors if is_differentiable(t)]
        if not sources or not outputs:
            return tensors
        link: Any = tf.custom_gradient(lambda *_: (outputs, self._gradient))
        scopes = [names.after(t) for t in outputs]
        with names.after(outputs[0]):
            linked = link(*sources)
        # `custom_gradient` holds on to the list, for its length alone.
        outputs[:] = [None] * len(outputs)
        if len(linked) > 1:
            linked = [
                self._noted(i, t, scope)
                for i, (t, scope) in enumerate(zip(linked, scopes, strict=True))
            ]
        linked = iter(linked)
        return [next(linked) if is_differentiable(t) else t for t in tensors]

    def _noted(self, index: int, output: tf.Tensor, scope) -> tf.Tensor:
        """Notes that an output has a gradient: one that has none gets zeros.

        They would turn gradients that are `None` into zeros.
        """

        def gradient(upstream):
            self._noted_outputs.add(index)
            return upstream

        def noted(tensor):
            with scope:
                return fusion.lasting(tf.identity(tensor)), gradient

        note: Any = tf.custom_gradient(noted)
        return note(output)

    def _gradient(self, *gradients):
        """The gradients of the sources, from those of the outputs."""
        # TensorFlow cannot trace these in the gradient of a loop.
        if (self._raw or self.repeated) and names.in_gradient_of_loop():
            reason = (
                "is in a loop that `keras.remat` or another custom gradient "
                "runs again: use `recompute` there, too"
            )
            if self._raw:
                reason = (
                    f"reads the `tf.Variable` '{self._raw[0].name}' in a loop: "
                    "make it a `keras.Variable`, or recompute the whole loop"
                )
            raise purity.not_recomputable(self._fn, reason)
        wanted = sorted(self._noted_outputs or range(len(gradients)))
        self._noted_outputs = set()
        upstream = [tf.convert_to_tensor(gradients[i]) for i in wanted]
        tensors = self._arguments.tensors
        values = [value for _, value in self._values]
        find = functools.partial(self.found, wanted)
        if not is_watched(upstream, tensors, values):
            tensors = host.fetched(self._sent, tensors, upstream)
            return find(upstream, tensors, values)

        def find_dense(upstream, tensors, values):
            return [
                None if g is None else tf.convert_to_tensor(g)
                for g in find(upstream, tensors, values)
            ]

        # Somebody differentiates it: that is done by running it again, too.
        arguments = Structure(((upstream, tensors, values), {}))
        return Segment(find_dense, arguments)()

    def found(
        self, wanted: list[int], upstream: list, tensors: list, values: list
    ) -> list:
        """The gradients, computed from what they depend on."""
        tensors, delayed = self._delayed(upstream, tensors, values)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            inputs = [t for t in tensors if is_differentiable(t)]
            tape.watch([inputs, self._raw])
            trained = [variable for variable, _ in self._trained]
            run = state.SecondRun(delayed, trained, tape)
            before = len(names.operations())
            outputs = self._second_run(tensors, run)
            after = len(names.operations())
        outputs = [outputs[i] for i in wanted]
        sources = [inputs, run.watched, self._raw]
        # What runs again within the function has its part of the gradient
        # there: of the same values.
        with (
            self._explained(),
            setting(_running, _SECOND),
            state.Substituted(run.trained),
        ):
            results: Any = tape.gradient(
                outputs, sources, output_gradients=upstream
            )
        # Not what is differentiated: that would be needed as it was, too.
        if not (private_tf.in_xla() or is_watched(upstream, tensors, values)):
            needed = ordering.needed_of(names.operations()[after:], results)
            results = tf.nest.map_structure(repeats.once(needed), results)
        of_inputs, of_values, of_raw = results
        of_variables = [*map(summed, of_values), *of_raw]
        made = names.operations()
        second, gradient, readers = made[before:after], made[after:], []
        if self.is_compared and not self._keep_residuals:
            # Not held back, as what they read would be.
            with ordering.unordered():
                arguments = list(zip(self._given, tensors, strict=True))
                readers = uses.shown(self._first, second, gradient, arguments)
        elif self._keep_residuals and gradient:
            given = [*self._given, *state.seeds(self._values)]
            first = uses.computed(self._first, given)
            again = uses.computed(second, [*tensors, *state.seeds(delayed)])
            uses.keep_residuals(first, again, gradient)
        of_inputs = control.before(of_variables, of_inputs)
        # Nobody may want those of the inputs, such as that of a batch.
        results = control.kept(readers, [*of_variables, *of_inputs])
        count = len(of_variables)
        return [*results[count:], *results[:count]]

    def _delayed(
        self, gradients: list, arguments: list, values: list
    ) -> tuple[list, list]:
        """What the second run starts from, there after the gradients."""
        variables = [variable for variable, _ in self._values]
        held = list(zip(variables, values, strict=True))
        # Seeds come before weights.
        held.sort(key=lambda pair: is_differentiable(pair[1]))
        seeds = state.seeds(held)
        weights = [value for _, value in held[len(seeds) :]]
        tensors, weights = control.after(
            gradients, [*arguments, *seeds], weights
        )
        count = len(arguments)
        pairs = zip(held, [*tensors[count:], *weights], strict=True)
        return tensors[:count], [(pair[0], value) for pair, value in pairs]

    def _second_run(self, tensors: list, run: state.SecondRun) -> list:
        """The differentiable results, in the order of the first run."""
        args, kwargs = self._arguments.join(tensors)
        ambient = state.restored(self._ambient, self._left)
        repeated = self._scopes.repeated()
        with (
            ordering.unordered(),
            self._explained(),
            setting(_running, _SECOND),
            ambient,
            repeated,
            run,
        ):
            results = self._fn(*args, **kwargs)
            # Before the first run's are put back.
            _, left = run.take_left(self._left)
        tensors = Structure((results, left), whole=True).tensors
        return list(filter(is_differentiable, tensors))

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except state.CannotRepeat as error:
            raise purity.not_recomputable(self._fn, str(error)) from None
