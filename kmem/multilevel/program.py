"""A multilevel program as a `keras.Model`: `fit` trains all of its levels."""

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.base.checks import must_be
from kmem.base.patching import member
from kmem.base.sizes import format_size
from kmem.graph import ordering
from kmem.graph import releasing
from kmem.keras_graph import profiling
from kmem.multilevel import choosing
from kmem.multilevel import feeding
from kmem.multilevel import level_plan
from kmem.multilevel import logs
from kmem.multilevel import structure
from kmem.multilevel import workers
from kmem.multilevel.level import Level
from kmem.multilevel.rounds import Round
from kmem.options import MemoryOptions
from kmem.options import Sharding
from kmem.sharding.engine import engine
from kmem.step import batches


class Program(keras.Model):
    """Levels that are trained together by `fit`.

    A step is one update of the top level; each level below makes its
    `unroll_steps` before each update of the one above that reads it.
    Callbacks, `History`, `steps_per_execution` and checkpoints are Keras's:
    `save_weights` saves all of the levels' weights and optimizers. Logs hold
    the mean of each level's loss as `<name>_loss`, and what a solver left of a
    gradient as `<name>_residual`. `loss` is the top level's, which is what a
    program minimizes, and not a number once any level's is not:
    `TerminateOnNaN` and other callbacks look there.

    Args:
        levels: A list of `Level`s, lowest first. Levels that read each other
            have no order but this one.
        edges: `"infer"`, or pairs of names, each a level and one that its
            loss reads: those to differentiate through.
        name: The program's name.

    Raises:
        ValueError: If the levels are not of this form.

    Example:

    ```python
    import keras
    import tensorflow as tf
    from keras import ops

    from kmem.multilevel import Level, Program

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    weigh = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

    def weighted_loss(x, y):
        return ops.mean(ops.sigmoid(weigh(x)) * ops.square(model(x) - y))

    def clean_loss(x, y):
        return ops.mean(ops.square(model(x) - y))

    program = Program([
        Level(model, weighted_loss, keras.optimizers.SGD(0.1), name="model"),
        Level(weigh, clean_loss, keras.optimizers.Adam(), name="weigh"),
    ])
    x, y = keras.random.normal((64, 8)), keras.random.normal((64, 1))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    history = program.fit({"model": data, "weigh": data}, epochs=2)
    sorted(history.history)  # ["loss", "model_loss", "weigh_loss"]
    ```
    """

    def __init__(
        self,
        levels: list[Level],
        *,
        edges: str | Iterable[tuple[str, str]] = "infer",
        name: str | None = None,
    ):
        super().__init__(name=name)
        structure.check_levels(levels)
        self.levels = list(levels)
        self._wanted_edges: Any = edges if edges == "infer" else list(edges)
        self._models = [level.model for level in levels]
        self._losses: Any = []
        self._residuals = logs.residual_trackers(levels)
        self._optimizers = [level.optimizer for level in levels]
        # Its levels, built, and the types of what a replica's step is given.
        self.structure: Any = None
        self.element: dict[str, Any] = {}
        self._prepared_for: tuple | None = None
        self._validation_model: Any = None
        self.compile()

    @property
    def optimizers(self) -> list:
        """The levels' optimizers, with the loss scales around them."""
        return list(self._optimizers)

    def compile(
        self,
        *,
        steps_per_execution: int = 1,
        jit_compile: bool = False,
        run_eagerly: bool = False,
    ) -> None:
        """Says how steps run; the levels have their losses and optimizers.

        Args:
            steps_per_execution: As in `keras.Model.compile`.
            jit_compile: Likewise; off by default.
            run_eagerly: Likewise.
        """
        super().compile(
            optimizer=None,
            loss=None,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            run_eagerly=run_eagerly,
        )

    def prepare(self, data: dict[str, Any]) -> None:
        """Builds the levels, finds out which one reads which, and plans them.

        `fit` does so by itself. Plans are made anew for other batches, and
        for another `compile`.

        Args:
            data: For each level's name, its `tf.data.Dataset` or a batch.

        Raises:
            ValueError: If a level cannot be trained, or has no plan within
                its budget; see `Level.look`.
        """
        self._prepare(data, MemoryOptions(), verbose=0)

    def _prepare(self, data, options: MemoryOptions, verbose: int) -> None:
        budget = choosing.checked_bytes(self.levels, options)
        replans = budget is not None or any(
            x.options.remat is not None or x.options is not x.given_options
            for x in self.levels
        )
        if self.structure is not None and not replans:
            return
        specs = feeding.first_batches(data)
        mode = profiling.mode(self)
        prepared_for = mode, batches.to_json(specs), budget
        if prepared_for == self._prepared_for:
            return
        self._prepared_for = self.train_function = None
        strategy = self.distribute_strategy
        replicas = strategy.num_replicas_in_sync
        shares, microbatches = {}, {}
        for level in self.levels:
            level.options = level.given_options
            level.models = [each.model for each in self.levels]
            share = batches.part_of(specs[level.name], replicas)
            part = batches.part_of(share, level.options.num_parts)
            shares[level.name], microbatches[level.name] = share, part
        edges = structure.find_edges(self.levels, microbatches, mode)
        edges = structure.choose_edges(self.levels, edges, self._wanted_edges)
        structure.check_responses(self.levels, edges)
        if self.structure is None:
            with strategy.scope():
                self.structure = structure.Structure(self.levels, edges)
                # What losses give for the logs is known now.
                self._losses = logs.loss_trackers(self.levels)
            self._optimizers = self.structure.optimizers
        self._set_element(specs)
        self.built = True
        level_plan.plan_within_budgets(self)
        if budget is not None:
            choosing.Choosing(self, shares, options, budget).choose(verbose)
        if mode == "eager" and replicas == 1:
            # Else a step is traced before any level is updated, too.
            step = tf.function(self.train_step, autograph=False)
            step.get_concrete_function(self.element)
        self._prepared_for = prepared_for

    def _set_element(self, specs: dict[str, Any]) -> None:
        replicas = self.distribute_strategy.num_replicas_in_sync
        counts = self.structure.num_batches
        self.element = feeding.element_specs(specs, counts, replicas)

    def summary(
        self,
        data: dict[str, Any] | None = None,
        print_fn: Callable[[str], Any] = print,
    ) -> None:
        """Prints the levels, what reads what, and what an update needs.

        A level's peak is the device's in a step in which only this level
        computes, which is what its `remat` has to stay within. It is measured
        by a dry run on random data, which leaves no trace; "-" is one that
        cannot be measured, and "too much" one that the device has no memory
        for.

        Args:
            data: As in `prepare`, for levels with their own options. Needed
                if neither that was called nor `fit`.
            print_fn: What is called with the text.

        Raises:
            ValueError: If it is not known what the levels are given.
        """
        if data is not None:
            specs = feeding.first_batches(data)
            self.prepare(specs)
            self._set_element(specs)
        if self.structure is None:
            raise ValueError(
                "`summary` needs the data of the levels: call `summary(data)` "
                "with what `fit` gets as `x`. Received: data=None"
            )
        peaks = [self._peak(level) for level in self.levels]
        print_fn(self.structure.table(peaks))

    def _peak(self, level: Level) -> str:
        """The peak of a step in which only one level computes."""
        if not memory.is_counted():
            return "-"
        step = level_plan.measure(self, [level])
        return "too much" if step is None else format_size(step.peak_bytes)

    def fit(
        self,
        x: dict[str, Any],
        *,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        validation_model: keras.Model | None = None,
        memory_budget: int | float | str | None = None,
        sharding: Any = None,
        **kwargs,
    ):
        """Trains all levels.

        Args:
            x: For each level's name, a `tf.data.Dataset` of its batches.
            steps_per_epoch: The top level's updates in an epoch; the data
                sets are repeated. Without it, an epoch ends with the first
                data set that does.
            validation_data: What `validation_model` is evaluated on.
            validation_model: A compiled model; its logs get the prefix
                `val_`.
            memory_budget: The device's peak during a step of all levels:
                bytes, `"8GB"`, or a share of the device in (0, 1]. A level
                that does not fit recomputes, or has its batches in
                micro-batches. What validates is not looked at.
            sharding: As in `kmem.Model.fit`, for all levels.
            **kwargs: As in `keras.Model.fit`: `epochs`, `callbacks`,
                `verbose`, `initial_epoch`, `validation_freq` and so on.

        Returns:
            Keras's `History`.

        Raises:
            ValueError: If the data are not the levels', or a level cannot be
                trained. Nothing has been changed then.
        """
        feeding.check(x, [level.name for level in self.levels])
        self._set_validation_model(validation_data, validation_model)
        options = MemoryOptions(memory_budget=memory_budget, sharding=sharding)
        option = options.sharding
        if self.structure:
            workers.make_whole(self.structure)
        self._prepare(x, options, kwargs.get("verbose") not in (0, 2))
        stream, steps = feeding.stream(
            x,
            self.structure.num_batches,
            steps_per_epoch is not None,
            self.distribute_strategy,
        )
        # The data sets shuffle, if they are told to.
        kwargs.setdefault("shuffle", False)
        with self._processes(option):
            history = super().fit(
                stream,
                steps_per_epoch=steps_per_epoch or steps,
                validation_data=validation_data,
                **kwargs,
            )
            pairs = zip(self._models, self._optimizers, strict=True)
            for model, optimizer in pairs:
                optimizer.finalize_variable_values(model.trainable_variables)
        logs.warn(self.levels, history.history)
        return history

    @contextlib.contextmanager
    def _processes(self, option: Sharding | None) -> Iterator[None]:
        """The context in which several processes train, if it is wanted."""
        if option is None:
            yield
            return
        workers.check(self, self.levels, option)
        with (
            # They are traced with variables as they are then.
            member(self, "train_function", None),
            member(self, "test_function", None),
            workers.in_shards(self.structure, option),
        ):
            self.make_train_function()
            step: Any = self.train_function
            times = self.steps_per_execution
            self.train_function = engine().watching(times)(step)
            yield

    def train_step(self, data: dict[str, Any]) -> dict[str, Any]:
        """One update of the top level, and those below as it asks for."""
        one = Round(self.structure, data, self._losses, self._residuals)
        one.update(len(self.levels) - 1)
        for level in self.levels:
            level.local.steps.clear()
        releasing.forget_gradients()
        logged = self.get_metrics_result()
        ordering.keep_order()
        return logged

    def get_metrics_result(self) -> dict[str, Any]:
        """The logs so far, the means of what levels and solvers note."""
        return logs.results(self._losses, self._residuals)

    def save_own_variables(self, store: Any) -> None:
        """Saves what Keras leaves out: the states of random numbers."""
        super().save_own_variables(store)
        for key, variable in self._seeds().items():
            store[key] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` saved."""
        seeds = self._seeds()
        super().load_own_variables(
            {key: store[key] for key in store.keys() if key not in seeds}
        )
        for key in seeds.keys() & set(store.keys()):
            seeds[key].assign(store[key])

    def _seeds(self) -> dict[str, Any]:
        """Variables that no layer saves, those of the losses included, by the
        names that they are saved under."""
        used = [v for level in self.levels for v in level.state]
        if self.structure is not None:
            # What solvers have kept for the next step.
            used += itertools.chain(*self.structure.guesses.values())
        saved = {id(v) for v in self.weights}
        variables = {id(v): v for v in (*self.variables, *used)}
        seeds = [v for key, v in variables.items() if key not in saved]
        return {f"seed_{number}": v for number, v in enumerate(seeds)}

    def evaluate(self, *args, **kwargs):
        """Evaluates the `validation_model` of the last `fit`.

        Args:
            *args: As in `keras.Model.evaluate`.
            **kwargs: Likewise.

        Returns:
            What the model's `evaluate` does.

        Raises:
            ValueError: If there was none.
        """
        if self._validation_model is None:
            raise ValueError(
                "A `Program` has several models: evaluate one of them, such "
                "as `program.levels[0].model`, after it was compiled, or give "
                "`fit` a `validation_model`. Received: program="
                f"{self.name}, without a `validation_model`"
            )
        # Keras resets the program's own only.
        self._validation_model.reset_metrics()
        return super().evaluate(*args, **kwargs)

    def test_step(self, data: Any) -> dict[str, Any]:
        """A step of the model that is validated."""
        with self.levels[0].workers.computing(backward=False):
            return self._validation_model.test_step(data)

    def _set_validation_model(self, data, model) -> None:
        if data is None:
            return
        is_right = isinstance(model, keras.Model) and model.compiled
        kind = "a compiled model, such as one of a level after "
        kind += "`model.compile(loss=..., metrics=...)`"
        must_be(is_right, model, "validation_model", kind)
        if model is not self._validation_model:
            self._validation_model = model
            self.test_function = None
