"""Derivatives of a loss that is a mean over examples, in micro-batches.

With the loss, its gradient and products with its second derivatives are means
over examples, and each is the sum of those of a batch's micro-batches, if their
losses count with their share of the examples: `Derivatives.mean` is the one
place that knows of micro-batches. What this module does not do: batch
normalization sees one micro-batch at a time, and dropout draws anew for each.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kmem.base.patching import Context
from kmem.base.patching import attribute
from kmem.base.patching import member
from kmem.graph import ordering
from kmem.graph.releasing import zeros
from kmem.multilevel.loss import Substituted
from kmem.multilevel.loss import assign
from kmem.multilevel.loss import read
from kmem.multilevel.workers import OneProcess
from kmem.multilevel.workers import mean_over_replicas
from kmem.multilevel.workers import num_counted
from kmem.options import MemoryOptions
from kmem.step.parts import Parts

Tensors = list[tf.Tensor]
# Of variables, by their `id`.
Values = dict[int, tf.Tensor]


@dataclasses.dataclass
class Local(threading.local):
    """What passes find: replicas trace a step in threads of their own."""

    # The level's updates since the level above made its last one.
    steps: list = dataclasses.field(default_factory=list)
    # What solvers left of gradients that passed, relative to them.
    residuals: list = dataclasses.field(default_factory=list)
    # The `id` of each variable that a gradient was found for so far.
    reached: set[int] = dataclasses.field(default_factory=set)
    # The variables with the solution of the step before, if any.
    guess: list = dataclasses.field(default_factory=list)
    scale: tf.Tensor | None = None
    in_32_bits: bool = False
    # The state that each pass starts from, if not as it is.
    entry: Tensors | None = None


class Derivatives:
    """The derivatives of one level's loss.

    Attributes:
        workers: The processes that compute a batch together.
        local: What this thread's passes find.
    """

    # What a `Level` has, and describes.
    options: MemoryOptions
    optimizer: Any
    variables: list
    state: list
    # Of the levels that step between its own steps, what its loss reads.
    below: list
    logged: tuple[str, ...]
    computing: Callable[[], Context]
    loss_of: Callable[[Any], tf.Tensor]
    loss_and_metrics: Callable[[Any], Tensors]
    look_once: Callable[[Any], None]
    clipped: Callable[[Tensors], Tensors]

    def __init__(self, name: str):
        self.name = name
        self.workers = OneProcess()
        # Of the model that its steps start from, if any.
        self.start_variables: list = []
        self._is_idle = False
        self.local = Local()

    @property
    def _num_parts(self) -> int:
        """The micro-batches of all batches of an update."""
        return self.options.num_parts * self.options.num_batches

    def guessing(self, variables: list) -> Context:
        """Within, solvers start from these variables, and assign them."""
        return member(self.local, "guess", variables)

    def values(self) -> Tensors:
        """The values of its variables."""
        return read(self.variables)

    def dot(self, a: Tensors, b: Tensors) -> tf.Tensor:
        """The inner product of two lists of tensors, one for each of its
        variables."""
        return self.workers.dot(a, b, self.variables)

    def norm(self, vector: Tensors) -> tf.Tensor:
        """The norm of a list of tensors, one for each of its variables."""
        return tf.sqrt(self.dot(vector, vector))

    def mean(self, function: Callable, batch: Any, wrt: list) -> Tensors:
        """The mean over a batch of what is a mean over a micro-batch.

        Args:
            function: Takes a micro-batch, and what it counts in the mean or
                `None`. Returns a list of tensors that count so, and whose
                shapes do not depend on its size. The first ones are gradients.
            batch: The batch, on every replica of a strategy its own.
            wrt: The variables to which these gradients are taken.

        Returns:
            The list of the means, the same on all replicas.
        """
        if self.local.entry is not None:
            assign(self.state, self.local.entry)
        if self._num_parts == 1 and not self.workers.split_batches:
            with self.computing():
                return mean_over_replicas(function(batch, None))
        own = self.workers.slice(batch)
        parts = Parts(own.data, self._num_parts, own.fewest_rows)

        def weighted(microbatch, rows, total):
            with self.computing():
                return function(microbatch, tf.cast(rows, total.dtype) / total)

        with self.workers.passing(self.state, own):
            sums = parts.sum_traced(weighted, num_counted(own))
        return mean_over_replicas(self.workers.total(sums, wrt))

    def gradient(
        self, batch: Any, wrt: list | None = None, at: Values | None = None
    ) -> Tensors:
        """The gradient of the loss.

        Args:
            batch: The batch.
            wrt: The variables to which it is taken; the level's by default.
            at: By `id` of variables, values to take instead of theirs.

        Returns:
            A tensor for each of `wrt`.
        """
        return self.loss_and_gradient(batch, wrt, at)[1]

    def loss_and_gradient(
        self, batch: Any, wrt: list | None = None, at: Values | None = None
    ) -> tuple[Tensors, Tensors]:
        """The loss with what else goes into the logs, and the loss's gradient;
        see `gradient`."""
        wrt = self.variables if wrt is None else wrt
        if self._is_idle:
            logged = [tf.zeros([])] * len(self.logged)
            return logged, self._stand_ins(wrt)
        self.look_once(batch)
        scale = self.local.scale

        def of_microbatch(microbatch, share):
            values = self._substitutes(wrt, at)
            sources = [values[id(variable)] for variable in wrt]
            # Gradients within as well: they may run some of the loss again.
            with Substituted(values):
                with _watching(sources) as tape:
                    logged = self.loss_and_metrics(microbatch)
                    logged = [_scaled(each, share) for each in logged]
                    scaled = _scaled(logged[0], scale)
                gradients = tape.gradient(scaled, sources)
            gradients = self._dense(gradients, sources, wrt)
            self._hold_back(gradients)
            return [*gradients, *logged]

        means = self.mean(of_microbatch, batch, wrt)
        gradients, logged = means[: len(wrt)], means[len(wrt) :]
        return logged, _unscaled(gradients, scale)

    def directional_gradient(
        self,
        batch: Any,
        direction: Tensors,
        wrt: list,
        at: Values | None = None,
    ) -> Tensors:
        """The gradient of <dL/dw, direction>, w being the level's variables.

        It leaves no trace: what the loss assigns is given back.

        Args:
            batch: The batch.
            direction: A tensor for each of the level's variables.
            wrt: The variables to which it is taken. For the level's own it is
                the product of the loss's Hessian and the direction.
            at: By `id` of variables, values to take instead of theirs.

        Returns:
            A tensor for each of `wrt`.

        Raises:
            ValueError: If an operator has no second derivative.
        """
        if self._is_idle:
            return self._stand_ins(wrt, direction)
        self.look_once(batch)
        scale = self.local.scale
        norm: Any = None
        if scale is not None:
            # The scaled loss alone has to fit into 16 bits then.
            norm = self.norm(direction)
            direction = [tf.math.divide_no_nan(d, norm) for d in direction]

        def of_microbatch(microbatch, share):
            values = self._substitutes(wrt, at)
            own = [values[id(variable)] for variable in self.variables]
            sources = [values[id(variable)] for variable in wrt]
            with Substituted(values):
                with _watching(sources) as outer:
                    with _watching(own) as inner:
                        loss = _scaled(self.loss_of(microbatch), share)
                        loss = _scaled(loss, scale)
                    gradient = inner.gradient(loss, own)
                    gradient = self._dense(gradient, own, self.variables)
                    self._hold_back(gradient, differentiated=True)
                # Not of an inner product: ones for each weight would be kept.
                products = outer.gradient(
                    gradient, sources, output_gradients=direction
                )
            products = self._dense(products, sources, wrt)
            self._hold_back(products)
            return products

        moments = attribute(tf.nn, "moments", _moments)
        # Else the forward pass would run ahead of what asks for it.
        after = tf.control_dependencies(direction)
        try:
            with self.replayed(batch), moments, after:
                products = self.mean(of_microbatch, batch, wrt)
        except (LookupError, NotImplementedError) as error:
            raise ValueError(
                f"The loss of level '{self.name}' must have second "
                "derivatives: replace the operator, or give the level "
                "`hypergradient=FiniteDifference()`, which needs none. What "
                "`keras.remat`, `keras.RematScope` or `tf.recompute_grad` runs "
                f"again has none; `kmem.remat.recompute` has. Received: {error}"
            ) from error
        if scale is not None:
            products = [t * norm for t in products]
        return _unscaled(products, scale)

    @contextlib.contextmanager
    def replayed(
        self, batch: Any, state: Tensors | None = None
    ) -> Iterator[None]:
        """Starts each pass within from the same state, and leaves it as is.

        Args:
            batch: What the passes are of.
            state: Values of `self.state`; by default those that passes start
                from already, or else as it is now.
        """
        self.look_once(batch)
        around = self.local.entry
        after = read(self.state) if around is None else around
        try:
            given = after if state is None else state
            with member(self.local, "entry", given):
                yield
        finally:
            assign(self.state, after)

    def scaled(self, scale: tf.Tensor | None) -> Context:
        """Multiplies the loss within passes, and divides their results."""
        return member(self.local, "scale", scale)

    def in_32_bits(self) -> Context:
        """Lets passes compute in 32 bits what they compute in 16."""
        return member(self.local, "in_32_bits", True)

    def idle(self) -> Context:
        """Within, passes compute nothing, but give other numbers of the same
        shapes, in the threads of all replicas."""
        return member(self, "_is_idle", True)

    def _stand_ins(self, wrt: list, direction: Iterable = ()) -> Tensors:
        self.local.reached.update(map(id, wrt))
        # So that the direction, of another level, is computed.
        number: Any = sum(map(tf.reduce_mean, direction), 0.0)
        # Not the values themselves, which take no memory of their own.
        return [value / 2 + tf.cast(number, value.dtype) for value in read(wrt)]

    def _substitutes(self, wrt: list, at: Values | None) -> Values:
        """The values of the level's variables and of `wrt`, and those given."""
        given = at or {}
        others = [v for v in (*self.variables, *wrt) if id(v) not in given]
        return given | dict(zip(map(id, others), read(others), strict=True))

    def _hold_back(
        self, gradients: Tensors, differentiated: bool = False
    ) -> None:
        """Orders the backward pass, where memory is to be saved."""
        if self.options.remat is not None or self._num_parts > 1:
            ordering.hold_back(gradients, differentiated)

    def _dense(
        self, gradients: list, values: Tensors, variables: list
    ) -> Tensors:
        """Zeros for `None`, no `IndexedSlices`, and what they have reached."""
        self.local.reached.update(
            id(variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        )
        return [
            zeros(value.shape, value.dtype)
            if gradient is None
            else tf.convert_to_tensor(gradient)
            for gradient, value in zip(gradients, values, strict=True)
        ]


@contextlib.contextmanager
def _watching(tensors: Tensors) -> Iterator[tf.GradientTape]:
    """A tape of what is computed from some tensors, and from no others."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(tensors)
        yield tape


def _scaled(loss: tf.Tensor, scale: tf.Tensor | None) -> tf.Tensor:
    return loss if scale is None else loss * tf.cast(scale, loss.dtype)


def _unscaled(tensors: Tensors, scale: tf.Tensor | None) -> Tensors:
    if scale is None:
        return tensors
    return [t / tf.cast(scale, t.dtype) for t in tensors]


def _moments(x, axes, shift=None, keepdims=False, name=None):
    """The mean and the variance, with derivatives of any order.

    `tf.nn.moments` takes the mean in its variance for constant. The derivative
    of that is right, for deviations add up to zero, and the derivative of the
    derivative is not: products with the Hessian of a net with batch, layer or
    group normalization are wrong, by tens of percent in small nets. Not here:
    moments that a strategy synchronizes, and what the user's own code takes
    for constant.
    """
    dtype = x.dtype
    if dtype == tf.float16:
        x = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(x, axes, keepdims=True)
    squares = tf.math.squared_difference(x, mean)
    variance = tf.reduce_mean(squares, axes, keepdims=True)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return tf.cast(mean, dtype), tf.cast(variance, dtype)
