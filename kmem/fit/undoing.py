"""What the steps of a model change, and the undo of steps that fail.

Memory may run out between two updates of a step: an update needs some itself,
and an early one does not wait to see whether all of its step succeeds. A step
leaves all of its updates, or none. What this costs is a copy of weights and
optimizer to host memory for each step.
"""

import contextlib
import gc
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kmem.base import patching
from kmem.base import private_tf
from kmem.base.private_keras import is_built
from kmem.graph import releasing
from kmem.graph.names import current_graph
from kmem.sharding.training import stored
from kmem.sharding.variables import holders
from kmem.step import capture
from kmem.step.accumulation import build_optimizer
from kmem.step.mechanism import Mechanism

_RESTORE_ATTEMPTS = 3
# What leaves a variable as it is.
_READING = frozenset("ReadVariableOp ResourceGather VariableShape".split())


class Reader:
    """Reads variables again and again, in the end all of them in one call."""

    def __init__(self, variables: list):
        self.variables = variables
        self._num_reads = 0
        self._read: Any = lambda: list(map(tf.convert_to_tensor, variables))
        self._arrays: list[np.ndarray] = []

    def read(self) -> list[np.ndarray]:
        """Their values, outside of the device, until they are read again.

        In the same arrays: new memory would take longer than to copy.
        """
        self._num_reads += 1
        # To make a function takes longer than a few reads, one by one.
        if self._num_reads == 20:
            self._read = releasing.function(self._read, input_signature=[])
        tensors = self._read()
        if not self._arrays:
            # Of a number `numpy` gives no array.
            self._arrays = [np.array(tensor.numpy()) for tensor in tensors]
            return self._arrays
        for array, tensor in zip(self._arrays, tensors, strict=True):
            plain = array.dtype.isbuiltin == 1 and not array.dtype.hasobject
            if plain and array.size:
                # Without a copy in between.
                source = np.frombuffer(memoryview(tensor), array.dtype)
                array.reshape(-1)[:] = source
            else:
                array[...] = tensor.numpy()
        return self._arrays


class State:
    """What steps change, as it is now, kept outside of the device: variables,
    or what reads them, metrics that may make variables of their own, and what
    `tf.random` has drawn."""

    def __init__(self, variables: list | Reader, metrics: list):
        if isinstance(variables, Reader):
            values = zip(variables.variables, variables.read(), strict=True)
        else:
            values = ((v, v.numpy()) for v in variables)
        self._values = list(values)
        # Of variables that the step makes, what they begin with.
        self._made: list[tuple[tf.Variable, np.ndarray]] = []
        self._metrics = metrics
        self._draws = private_tf.state_of_draws()

    def add(self, variables: list) -> None:
        """Adds variables that the graph which is being made will change."""
        with tf.init_scope():
            self._values += [(v, v.numpy()) for v in variables]

    def make(self, make: Callable, **arguments):
        """Makes a variable, to which its initial value is given back: such as
        an optimizer's, which may be assigned before the step fails."""
        variable = make(**arguments)
        if tf.executing_eagerly() and not tf.distribute.has_strategy():
            self._made.append((variable, variable.numpy()))
        return variable

    def restore(self) -> None:
        """Gives it back. That takes memory as well, which may be short for a
        moment."""
        private_tf.restore_draws(self._draws)
        for _ in range(_RESTORE_ATTEMPTS - 1):
            try:
                return self._restore()
            except tf.errors.ResourceExhaustedError:
                gc.collect()
        self._restore()

    def _restore(self) -> None:
        # Some are empty by now: shards have taken their place.
        made = [(v, x) for v, x in self._made if v.numpy().shape == x.shape]
        values = [*self._values, *made]
        identities = {id(variable) for variable, _ in values}
        for variable, value in values:
            try:
                # Not the array itself: a variable may take over its memory,
                # which is not the device's.
                variable.assign(tf.raw_ops.DeepCopy(x=value))
            except tf.errors.ResourceExhaustedError:
                # What a step has updated had the memory for that.
                if not _is_still(variable, value):
                    raise
        for metric in self._metrics:
            # Those that the step has made.
            if any(
                id(variable) not in identities for variable in metric.variables
            ):
                metric.reset_state()


def _is_still(variable, value: np.ndarray) -> bool:
    """Whether a variable has a value; of replicas' nobody knows."""
    both = variable, getattr(variable, "value", None)
    if any(isinstance(v, tf.distribute.DistributedValues) for v in both):
        return False
    return variable.numpy().tobytes() == value.tobytes()


@contextlib.contextmanager
def unchanged(variables: list, metrics: list) -> Iterator[State]:
    """Gives back what steps change in a block of code; see `State`. They
    write no summaries for TensorBoard."""
    state = State(variables, metrics)
    try:
        with tf.summary.record_if(False):
            yield state
    finally:
        state.restore()


def variables_at_once() -> contextlib.AbstractContextManager[None]:
    """Within, a step makes its variables outside of its graph, with their
    values: it is traced twice otherwise, and has none before it ends."""
    return tf.variable_creator_scope(_make_at_once)


def _make_at_once(make: Callable, **arguments):
    if not callable(arguments["initial_value"]):
        return make(**arguments)  # The step may have computed it.
    arguments["experimental_enable_variable_lifting"] = False
    with tf.init_scope():
        return make(**arguments)


class Changes:
    """What a model's steps change.

    Args:
        optimizer: What its steps see as `model.optimizer`.
        is_eager: Whether they run without a graph, which would tell the rest.

    Attributes:
        before: The state before the step that is taken, where it is kept.
    """

    before: State | None = None

    def __init__(self, model: keras.Model, optimizer, is_eager: bool = False):
        is_eager = is_eager or model.run_eagerly
        self._states: list[State] = []
        self._model = model
        self._optimizer = optimizer
        self._train_step = model.train_step
        # What only the graph of a step tells.
        self._others: list[tf.Variable] = []
        self._is_made = all(each.built for each in capture.optimizers(model))
        # A step of one's own may train a part of the model, and nobody knows
        # which before it is traced.
        self._is_own = not is_eager and capture.has_own_step(model)

    @property
    def named(self) -> list:
        """What a step may change of what the model names."""
        return stored(capture.changed_variables(self._model, self._optimizer))

    @property
    def variables(self) -> list:
        """The variables that a step may change."""
        return self.named + self._others

    def reader(self, earlier: Reader | None) -> Reader:
        """Reads these variables; `earlier`, if it reads no others."""
        variables = self.variables
        if earlier and [*map(id, earlier.variables)] == [*map(id, variables)]:
            return earlier
        return Reader(variables)

    @contextlib.contextmanager
    def undone(self, batch=None) -> Iterator[None]:
        """Gives back what steps change within, of variables that are made
        before; see `build`."""
        self.build(batch)
        with (
            unchanged(self.variables, self._model.metrics) as state,
            self.keeping(state),
        ):
            yield

    def keeping(self, state: State) -> patching.Context:
        """A context in which a state has all that a traced step changes, and
        what a step makes."""
        states = patching.member(self, "_states", [*self._states, state])
        return patching.together(
            [states, tf.variable_creator_scope(state.make)]
        )

    def look(self) -> None:
        """Looks into the graph of a step for variables that the model does not
        name, such as those of a random generator or of a moving average."""
        graph: Any = current_graph()
        if graph is None:
            return
        changed = {
            id(outer)
            for outer, inner in graph.captures
            if any(op.type not in _READING for op in inner.consumers())
        }
        known = {id(v) for each in self.variables for v in holders(each)}
        others = [
            variable
            for variable in private_tf.variables_in(graph)
            if id(variable.handle) in changed and id(variable) not in known
        ]
        self._others += others
        for state in self._states:
            state.add(others)

    @property
    def layers_are_built(self) -> bool:
        """Whether all variables exist but for those of optimizers."""
        return is_built(self._model)

    def build(self, batch=None) -> None:
        """Makes the variables that the first step would make.

        Args:
            batch: What the step gets, as `tf.TensorSpec`s. It is traced if
                the model has several optimizers, or a step of its own.
        """
        model, optimizer = self._model, self._optimizer
        own = optimizer, getattr(optimizer, "inner_optimizer", None)
        known = all(each in own for each in capture.optimizers(model))
        if known and not self._is_own:
            with model.distribute_strategy.scope():
                build_optimizer(optimizer, model.trainable_variables)
        elif batch is not None and not self._is_made:
            # Which of them it uses, and for what, only the step knows.
            self.trace(batch)

    def trace(self, batch) -> None:
        """Makes the variables that a step with a batch would make."""
        self._is_made = True
        strategy, step = self._model.distribute_strategy, self._train_step
        releasing.function(
            lambda data: strategy.run(step, args=(data,))
        ).get_concrete_function(batch)
        for variable in self.named:
            # Else those of one shape would share their zeros until they are
            # assigned, and not count before.
            variable.assign(tf.raw_ops.DeepCopy(x=variable))


class Undoing(Mechanism):
    """Keeps what a step changes outside of the device until it is done.

    It changes nothing else. Once a step is done all variables exist, and are
    not looked for again while the model trains.

    Attributes:
        is_on: Whether it does.
    """

    is_on = False

    def __init__(self, model: keras.Model, changes: Changes):
        self._model = model
        self._changes = changes
        self._reader: Reader | None = None

    def start(self) -> None:
        if self.is_on and self._changes.layers_are_built:
            self._changes.build()

    def stop(self, failed: bool = False) -> None:
        # With the memory that it reads into.
        self._reader = None

    def wrapped(self, function: Callable) -> Callable:
        def train(iterator):
            if not self.is_on:
                return function(iterator)
            reader = self._reader or self._changes.reader(None)
            before = State(reader, self._model.metrics)
            # Of several steps, only of the first.
            if self._model.steps_per_execution == 1:
                self._changes.before = before
            try:
                with private_tf.refusals(), self._changes.keeping(before):
                    logs = function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                # The data ended. Steps that were taken before are done.
                raise
            except BaseException:
                before.restore()
                raise
            finally:
                self._changes.before = None
            self._reader = self._reader or self._changes.reader(reader)
            return logs

        return train
