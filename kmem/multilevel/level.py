"""One level of a multilevel program: a model, its loss, and its optimizer.

What this module does not do: order levels, or pass gradients between them.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Literal

import keras
import tensorflow as tf

from kmem import precision
from kmem.base import checks
from kmem.base.patching import Context
from kmem.base.patching import together
from kmem.base.private_keras import all_layers
from kmem.multilevel import loss as losses
from kmem.multilevel import rewinding
from kmem.multilevel import updates
from kmem.multilevel.derivatives import Derivatives
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.hypergradients import Identity
from kmem.multilevel.hypergradients import Unrolled
from kmem.multilevel.level_plan import LevelPlan
from kmem.options import MemoryOptions
from kmem.sharding import training


class Level(Derivatives):
    """One optimization problem of a multilevel program.

    Args:
        model: A `keras.Model`. Its trainable variables are what the level
            learns.
        loss: A function of a batch, `loss(x, y)` for batches `(x, y)`, that
            returns a scalar: a mean over the batch's examples. It calls
            whatever models it likes, those of other levels included. It may
            return a pair, the loss and a dictionary of scalars for the logs,
            means too: `loss, {"accuracy": accuracy}`. What the regularizers
            of the level's own weights give is added, as Keras's `fit` adds it.
        optimizer: A `keras.optimizers.Optimizer`, or the name of one.
        name: The level's name; the model's by default.
        unroll_steps: The level's updates before the level above makes one.
        start: A model with the same weights, such as that of a level above:
            before the level's `unroll_steps` its weights are set to those, and
            its optimizer begins anew. With `Unrolled` gradients go on to it.
        hypergradient: How gradients pass through this level to others:
            `Identity()` by default.
        roll_back: Once the level above made its update, restore this level's
            state of before, and make one update, with the last batch.
        tasks_per_update: The number of rounds of the levels below for one
            update, with the mean of the gradients after each.
        microbatches: The number of micro-batches of each batch.
        gradient_accumulation_steps: The number of the loader's batches for
            one update, equal to that of their union.
        mixed_precision: As in `kmem.Model.fit`, for all of the program's
            models while this level's loss is computed.
        remat: As in `kmem.Model.fit`, likewise.
        clipnorm: The most that the global norm of the level's gradient may
            be; it is scaled down to this.

    Raises:
        ValueError: If an argument is not of this form.

    Example:

    ```python
    import keras
    from keras import ops

    from kmem.multilevel import Level

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

    def loss(x, y):
        return ops.mean(ops.square(model(x) - y))

    level = Level(model, loss, keras.optimizers.SGD(0.1), microbatches=4)
    x, y = keras.random.normal((32, 8)), keras.random.normal((32, 1))
    kernel_gradient, bias_gradient = level.gradient((x, y))
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Callable[..., Any],
        optimizer: keras.optimizers.Optimizer | str,
        *,
        name: str | None = None,
        unroll_steps: int = 1,
        start: keras.Model | None = None,
        hypergradient: Any = None,
        roll_back: bool = False,
        tasks_per_update: int = 1,
        microbatches: Any = 1,
        gradient_accumulation_steps: Any = 1,
        mixed_precision: Any = None,
        remat: Any = None,
        clipnorm: float | None = None,
    ):
        is_model = isinstance(model, keras.Model)
        checks.must_be(is_model, model, "model", "a `keras.Model`")
        kind = "a function of a batch, such as `loss(x, y)`, that returns "
        checks.must_be(callable(loss), loss, "loss", f"{kind}a scalar")
        kind = (
            "an object: `Identity()`, `FiniteDifference()`, `SAMA()`, "
            "`Neumann()`, `ConjugateGradient()`, `MinimalResidual()` or "
            "`Unrolled()`"
        )
        is_object = not isinstance(hypergradient, type)
        is_right = is_object and callable(hypergradient or Identity())
        checks.must_be(is_right, hypergradient, "hypergradient", kind)
        if clipnorm is not None:
            checks.positive(clipnorm, "clipnorm")
        self.model = model
        # A `tf.function` keeps the variables' values that it first saw.
        self.loss: Any = getattr(loss, "python_function", loss)
        self.optimizer: Any = keras.optimizers.get(optimizer)
        self.unroll_steps = checks.positive_int(unroll_steps, "unroll_steps")
        self.hypergradient = hypergradient or Identity()
        self.roll_back = bool(roll_back)
        self.tasks_per_update = checks.positive_int(
            tasks_per_update, "tasks_per_update"
        )
        self.clipnorm = clipnorm
        self.start: keras.Model | None = None
        # The names of what it gives for the logs, as far as is known.
        self.logged: tuple[str, ...] = ("loss",)
        self.options = self.given_options = MemoryOptions(
            microbatches=microbatches,
            gradient_accumulation_steps=gradient_accumulation_steps,
            mixed_precision=mixed_precision,
            remat=remat,
        )
        super().__init__(name or model.name)
        if self.kept_steps:
            updates.check(self, type(self.hypergradient).__name__)
        if start is not None:
            self._set_start(start)
        # Those that its loss may call; the program knows them all.
        self.models = [model]
        # Those that step between its steps.
        self.inner_levels: list[Level] = []
        self.plan: LevelPlan | None = None
        # Whether its loss calls one of them, which a plan is for.
        self.calls_model = False
        self._looked: losses.Looking | None = None

    def _set_start(self, start: keras.Model) -> None:
        shapes = [v.shape for v in self.model.weights]
        if not isinstance(start, keras.Model) or shapes != [
            v.shape for v in start.weights
        ]:
            raise ValueError(
                "`start` must be a model with weights of the same shapes, "
                "built as the level's own is. Received: level "
                f"'{self.name}' with start={start!r}"
            )
        are_too_few = self.kept_steps < self.unroll_steps
        if isinstance(self.hypergradient, Unrolled) and are_too_few:
            raise ValueError(
                "`Unrolled` must go through all `unroll_steps` of a level "
                "with a `start`, to arrive there. Received: level "
                f"'{self.name}' with unroll_steps={self.unroll_steps} and "
                f"{self.hypergradient}"
            )
        self.start = start
        self.start_variables = start.trainable_variables

    @property
    def num_batches(self) -> int:
        """The loader's batches in an update."""
        return self.options.num_batches

    @property
    def variables(self) -> list:
        """What the level learns; its shards, of what is in shards."""
        return training.stored(self.model.trainable_variables)

    @property
    def kept_steps(self) -> int:
        """How many of its last updates its hypergradient wants to know."""
        kept: Any = getattr(self.hypergradient, "kept_steps", None)
        return kept(self.unroll_steps) if kept else 0

    @property
    def below(self) -> list:
        """What its loss reads of the levels that step between its steps."""
        read = self._looked.read if self._looked else {}
        learned = [v for level in self.inner_levels for v in level.variables]
        return [variable for variable in learned if id(variable) in read]

    def keeps(self, number: int) -> tuple[bool, bool]:
        """Whether the state and the gradients of a step are kept, of those
        that its hypergradient wants to know the one of this number."""
        num_waiting = None
        if isinstance(self.hypergradient, Unrolled):
            num_waiting = self.hypergradient.num_waiting(self, self.kept_steps)
        if num_waiting is None:
            return True, True
        return number in rewinding.kept(self.kept_steps, num_waiting), False

    @property
    def state(self) -> list:
        """Keras's variables that the loss assigns, such as random seeds."""
        return list(self._looked.assigned.values()) if self._looked else []

    def look_once(self, batch: Any) -> None:
        """Looks at the loss, if that was not done."""
        if self._looked is None:
            self.look(batch)

    def look(
        self, batch: Any, mode: Literal["eager", "graph", "xla"] = "graph"
    ) -> losses.Looking:
        """Traces the loss, builds what it calls, and draws what can be planned.

        Args:
            batch: A batch, or its `tf.TensorSpec`s; with `remat`, one of the
                micro-batches in which batches are computed.
            mode: How steps will run.

        Returns:
            What the loss reads and assigns.

        Raises:
            ValueError: If the loss is no scalar, if the level has nothing to
                learn, or if `remat` is a plan for another model.
        """
        self.plan = None
        looking = losses.Looking()
        calls: list[tuple[keras.Model, Any]] = []

        def trace(batch):
            noting = losses.noting_calls(self.models, calls)
            with self.computing(), looking, noting:
                self.loss_of(batch)

        # Not a part of a step that may be in the making. Without one this
        # would only stop tapes of the loss's own.
        eager = tf.executing_eagerly()
        outside = contextlib.nullcontext() if eager else tf.init_scope()
        with outside, self.model.distribute_strategy.scope():
            tf.function(trace, autograph=False).get_concrete_function(batch)
        if not self.variables:
            raise ValueError(
                "A level must have trainable variables: give it another "
                "model, or set `trainable=True` on its layers. Received: "
                f"level '{self.name}' of model '{self.model.name}'"
            )
        # Its steps read what they start from.
        start = self.start.weights if self.start else []
        looking.read |= {id(variable): variable for variable in start}
        self._looked, self.calls_model = looking, len(calls) > 0
        remat = self.options.remat
        if remat is not None:
            self.plan = LevelPlan(self.name, calls, remat, self._mixed, mode)
        return looking

    def computing(self) -> Context:
        """What the level wants its loss, and gradients of it, computed in:
        they may run some of it again."""
        in_32_bits = self.local.in_32_bits
        applied = losses.in_32_bits if in_32_bits else self._mixed

        def contexts():
            yield from map(applied, self.models)
            yield self.workers.computing()
            if self.plan is not None:
                yield self.plan.applied()
            if self.options.mixed_precision is not None and not in_32_bits:
                # What models give to each other, and to the loss.
                yield losses.giving_32_bits(self.models)

        return together(contexts())

    def loss_of(self, batch: Any) -> tf.Tensor:
        """The loss of a batch, and what the weights' regularizers add."""
        return self.loss_and_metrics(batch)[0]

    def loss_and_metrics(self, batch: Any) -> Tensors:
        """The same, and what the loss gives for the logs."""
        is_tuple = isinstance(batch, tuple | list)
        arguments = tuple(batch) if is_tuple else (batch,)
        found = losses.values(self.loss, arguments, self.name)
        self.logged = tuple(found)
        loss, *metrics = found.values()
        penalties = [
            variable.regularizer(variable)
            for variable in self.model.trainable_variables
            if variable.regularizer is not None
        ]
        loss = tf.add_n([loss, *(tf.cast(p, loss.dtype) for p in penalties)])
        return [loss, *metrics]

    def clipped(self, gradients: Tensors) -> Tensors:
        """Gradients as the optimizer gets them."""
        if self.clipnorm is None:
            return gradients
        norm = self.norm(gradients)
        return tf.clip_by_global_norm(gradients, self.clipnorm, norm)[0]

    @contextlib.contextmanager
    def _mixed(self, model: keras.Model) -> Iterator[None]:
        """Within, a model computes in what the level wants."""
        option = self.options.mixed_precision
        if option is None:
            yield
            return
        # A name is that of a layer in one of the models.
        elsewhere = {
            layer.name for other in self.models for layer in all_layers(other)
        } - {layer.name for layer in all_layers(model)}
        exclude = [name for name in option.exclude if name not in elsewhere]
        option = dataclasses.replace(option, exclude=tuple(exclude))
        with precision.applied(model, option):
            yield
        precision.warn(model)
