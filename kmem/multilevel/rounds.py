"""One update of a program's top level, and all that goes before it.

Every level below is updated as often as the one above asks for. A level's
gradient is that of its own loss, and what reaches its variables through the
levels below, which have just been updated.
"""

import dataclasses
import warnings
from typing import Any
from typing import NoReturn

import keras
import tensorflow as tf

from kmem import precision
from kmem.base.patching import together
from kmem.graph import ordering
from kmem.multilevel import updates
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.loss import assign
from kmem.multilevel.loss import read
from kmem.multilevel.structure import Structure
from kmem.multilevel.structure import routes
from kmem.multilevel.workers import num_replicas
from kmem.sharding import training

# From so many steps on they are a loop: a traced step is not small.
_LOOPED_STEPS = 4


@dataclasses.dataclass
class Round:
    """One update of the top level; on each replica its own.

    Args:
        data: For each level's name its batches: one, or several stacked.
        losses: For each level the means of its losses in updates, and of what
            they give for the logs.
        residuals: For each level that has a solver the mean of what that
            leaves of a gradient, relative to the gradient.
    """

    structure: Structure
    data: dict[str, Any]
    losses: list[list[keras.metrics.Mean]]
    residuals: list[keras.metrics.Mean | None]

    def __post_init__(self):
        self._levels = self.structure.levels
        # Tensors within a loop of the graph.
        self._taken: list[Any] = [0] * len(self._levels)
        # Of each level the last batch, and its loss's state before that.
        self._last: dict[int, tuple[Any, Tensors]] = {}
        # Levels at steps that a gradient will pass.
        self._known: set[int] = set()

    def update(self, number: int) -> None:
        """Updates a level, once the levels below have been."""
        level = self._levels[number]
        children = self.structure.children[number]
        # What levels that roll back were before their steps.
        starts = []
        for child in children:
            if self._levels[child].roll_back:
                own = self.structure.optimizers[child].variables
                variables = [*self._levels[child].model.variables, *own]
                variables = training.stored(variables)
                starts.append((child, variables, read(variables)))
        sums: Tensors = []
        for _ in range(level.tasks_per_update):
            for child in children:
                self._levels[child].local.steps.clear()
                self._start(child)
                self._take_steps(child)
            gradients = self._gradient(number, self._next_batch(number))
            sums = list(map(tf.add, sums, gradients)) if sums else gradients
        self._apply(number, [t / level.tasks_per_update for t in sums])
        for child, variables, values in starts:
            assign(variables, values)
            batch, _ = self._last[child]
            self._apply(child, self._gradient(child, batch))

    def _start(self, number: int) -> None:
        """Sets a level to what its steps start from, if there is such."""
        level = self._levels[number]
        if level.start is not None:
            assign(level.model.weights, read(level.start.weights))
            for variable, value in self.structure.fresh[number]:
                assign([variable], [tf.broadcast_to(value, variable.shape)])

    def _take_steps(self, number: int) -> None:
        """All updates of a level before one of the level above."""
        level = self._levels[number]
        count = level.unroll_steps
        # Replicas cannot meet within a loop of a graph.
        plainly = tf.executing_eagerly() or num_replicas() > 1
        # Outside: gradients that pass through the level start from them.
        last = max(level.kept_steps, 1)
        if count >= _LOOPED_STEPS and count > last and not plainly:
            self._loop(number, count - last)
            count = last
        for left in reversed(range(count)):
            if left < level.kept_steps:
                self._known.add(number)
            self.update(number)
        self._known.discard(number)

    def _loop(self, number: int, count: int) -> None:
        """Makes updates of a level in a loop, which is traced once."""

        def step(index, taken):
            self._taken = taken
            self.update(number)
            ordering.keep_order()
            return index + 1, self._taken

        _, self._taken = tf.while_loop(
            lambda index, _: index < count,
            step,
            (0, self._taken),
            parallel_iterations=1,
        )

    def _gradient(self, number: int, batch: Any) -> Tensors:
        """The gradient of a level's loss, along all paths.

        The batches of the levels below are their last ones.
        """
        level, path = self._levels[number], (number,)
        self._last[number] = batch, read(level.state)
        for each in self._levels:
            each.local.reached.clear()
        scale = _scale(self.structure.optimizers[number])
        with together(each.scaled(scale) for each in self._levels):
            wrt = self._variables(path)
            logged, gradients = level.loss_and_gradient(batch, wrt)
            total = self._arriving(path, gradients)
        reached = self._reached(path)
        if not reached:
            self._refuse_standing_still(number)
        self._warn_of_standing_still(number, reached)
        for tracker, value in zip(self.losses[number], logged, strict=True):
            tracker.update_state(value)
        return total

    def _variables(self, path: tuple[int, ...]) -> list:
        """Those to which a gradient goes on that came along a path."""
        onward = self.structure.onward[path]
        return [v for other in onward for v in self._levels[other].variables]

    def _arriving(self, path: tuple[int, ...], gradients: Tensors) -> Tensors:
        """The sum of what arrives at a path's first level, of gradients with
        regard to the variables to which it goes on."""
        rest, total = iter(gradients), []
        for other in self.structure.onward[path]:
            each = [next(rest) for _ in self._levels[other].variables]
            if other != path[0]:
                each = self._through((*path, other), each)
            total = list(map(tf.add, total, each)) if total else each
        return total

    def _through(self, path: tuple[int, ...], vector: Tensors) -> Tensors:
        """Takes a gradient through a path's last level, and on to the first."""
        number = path[-1]
        level, (batch, state) = self._levels[number], self._last[number]
        level.local.residuals.clear()
        guess = self.structure.guesses.get(path, [])
        guessing = level.guessing(training.stored(guess))
        with level.replayed(batch, state), guessing:
            wrt = self._variables(path)
            products = level.hypergradient(vector, level, batch, wrt)
        tracker = self.residuals[number]
        if tracker is not None:
            for residual in level.local.residuals:
                tracker.update_state(residual)
        return self._arriving(path, products)

    def _reached(self, path: tuple[int, ...]) -> set[int]:
        """The variables of a path's first level to which a gradient comes
        along any path that goes on from it; by their identities."""
        arrived: set[int] = set()
        for other in self.structure.onward[path]:
            variables = map(id, self._levels[other].variables)
            passed = self._levels[path[-1]].local.reached
            reached = passed.intersection(variables)
            if reached and other != path[0]:
                reached = self._reached((*path, other))
            arrived |= reached
        return arrived

    def _warn_of_standing_still(self, number: int, reached: set[int]) -> None:
        """Says once which of a level's variables are without a gradient."""
        level = self._levels[number]
        if len(reached) == len(level.variables) or (
            number in self.structure.told_of
        ):
            return
        self.structure.told_of.add(number)
        learned = level.model.trainable_variables
        pairs = zip(learned, level.variables, strict=True)
        paths = [v.path for v, stored in pairs if id(stored) not in reached]
        more = f", and {len(paths) - 4} more" if len(paths) > 4 else ""
        warnings.warn(
            f"No gradient reaches some variables of level '{level.name}', and "
            f"its optimizer gets zeros for them: {', '.join(paths[:4])}{more}. "
            "Look for `stop_gradient` in the losses, or set `trainable=False` "
            "on the layers of these variables.",
            stacklevel=2,
        )

    def _refuse_standing_still(self, number: int) -> NoReturn:
        names = [level.name for level in self._levels]
        received = ", ".join(
            " -> ".join(names[each] for each in route)
            for route in routes(self.structure.onward, number)
        )
        raise ValueError(
            "A level's loss must have a gradient with regard to its variables, "
            "by itself or through levels below that read them. No gradient "
            f"reaches level '{names[number]}'. Levels come lowest first. "
            "Look for `stop_gradient`, NumPy, integers or rounding in the "
            "losses on its paths, and at `edges` that are left out. "
            f"Received: the paths {received}"
        )

    def _apply(self, number: int, gradients: Tensors) -> None:
        level, (batch, state) = self._levels[number], self._last[number]
        step = None
        optimizer = self.structure.optimizers[number]
        scale = _scale(optimizer)
        if number in self._known:
            keeps = level.keeps(len(level.local.steps))
            step = updates.noted(level, batch, state, scale, gradients, keeps)
        gradients = level.clipped(gradients)
        if scale is not None:
            gradients = [t * tf.cast(scale, t.dtype) for t in gradients]
        learned = level.model.trainable_variables
        level.workers.apply(optimizer, gradients, learned)
        if step is not None:
            updates.finish(step)

    def _next_batch(self, number: int) -> Any:
        """The level's next batch: the union of several if it accumulates."""
        level = self._levels[number]
        data = self.data[level.name]
        start = self._taken[number]
        self._taken[number] += level.num_batches
        if self.structure.num_batches[level.name] == 1:
            return data
        places = [start + i for i in range(level.num_batches)]
        # A slice from a place that is not known has no known length, for XLA.
        return keras.tree.map_structure(
            lambda stacked: tf.concat([stacked[i] for i in places], axis=0),
            data,
        )


def _scale(optimizer) -> Any:
    """What an optimizer divides gradients by, if by anything."""
    scales = precision.scales_loss(optimizer)
    return optimizer.scale_loss(tf.ones([])) if scales else None
