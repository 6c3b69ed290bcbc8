"""One update of a program's top level, and all that goes before it.

Every level below is updated as often as the one above asks for. A level's
gradient is that of its own loss, and what reaches its variables through the
levels below, which have just been updated.
"""

import functools
import warnings
from typing import Any
from typing import NoReturn

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from kmem.base.patching import together
from kmem.graph import ordering
from kmem.multilevel import updates
from kmem.multilevel.derivatives import Tensors
from kmem.multilevel.level import Level
from kmem.multilevel.loss import assign
from kmem.multilevel.loss import read
from kmem.multilevel.structure import Structure
from kmem.multilevel.structure import Tree
from kmem.multilevel.structure import routes
from kmem.multilevel.workers import num_replicas

# From so many steps on they are a loop: a traced step is not small.
_LOOPED_STEPS = 4


class Round:
    """One update of the top level; on each replica its own.

    Args:
        data: For each level's name its batches: one, or several stacked.
        losses: For each level the means of its losses in updates, and of what
            they give for the logs.
        residuals: For each level that has a solver the mean of what that
            leaves of a gradient, relative to the gradient.
    """

    def __init__(
        self,
        structure: Structure,
        data: dict[str, Any],
        losses: list[list[keras.metrics.Mean]],
        residuals: list[keras.metrics.Mean | None],
    ):
        self._structure = structure
        self._levels = structure.levels
        self._data = data
        self._losses = losses
        self._residuals = residuals
        # Tensors within a loop of the graph.
        self._taken: list[Any] = [0] * len(self._levels)
        # Of each level the last batch, and its loss's state before that.
        self._last: dict[int, tuple[Any, Tensors]] = {}
        self._in_loop: set[int] = set()

    def update(self, number: int) -> None:
        """Updates a level, once the levels below have been."""
        level = self._levels[number]
        children = self._structure.children[number]
        # What levels that roll back were before their steps.
        starts = [
            (child, variables, read(variables))
            for child in children
            if self._levels[child].roll_back
            for variables in [self._trained(child)]
        ]
        sums: Tensors = []
        for _ in range(level.tasks_per_update):
            for child in children:
                self._levels[child].steps.clear()
                self._start(child)
                self._take_steps(child)
            gradients = self._gradient(number, self._next_batch(number))
            sums = list(map(tf.add, sums, gradients)) if sums else gradients
        self._apply(number, [t / level.tasks_per_update for t in sums])
        for child, variables, values in starts:
            assign(variables, values)
            batch, _ = self._last[child]
            self._apply(child, self._gradient(child, batch))

    def _trained(self, number: int) -> list:
        """What steps of a level change."""
        optimizer = self._structure.optimizers[number]
        return [*self._levels[number].model.variables, *optimizer.variables]

    def _start(self, number: int) -> None:
        """Sets a level to what its steps start from, if there is such."""
        level = self._levels[number]
        if level.start is not None:
            assign(level.model.weights, read(level.start.weights))
            for variable, value in self._structure.fresh[number]:
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
        for _ in range(count):
            self.update(number)

    def _loop(self, number: int, count: int) -> None:
        """Makes updates of a level in a loop, which is traced once, and in
        which they are not kept."""
        start = list(self._taken)
        each = self._structure.batches_in_update(number)

        def take(index):
            for level, taken in each.items():
                self._taken[level] = start[level] + index * taken

        def step(index):
            take(index)
            self.update(number)
            ordering.keep_order()
            return (index + 1,)

        self._in_loop.add(number)
        tf.while_loop(
            lambda index: index < count, step, (0,), parallel_iterations=1
        )
        self._in_loop.remove(number)
        take(count)

    def _gradient(self, number: int, batch: Any) -> Tensors:
        """The gradient of a level's loss, along all paths.

        The batches of the levels below are their last ones.
        """
        level, tree = self._levels[number], self._structure.trees[number]
        self._last[number] = batch, read(level.state)
        wrt = [*level.variables]
        for other in tree:
            wrt += self._levels[other].variables
        for each in self._levels:
            each.reached.clear()
        scale = _scale(self._structure.optimizers[number])
        with together(each.scaled(scale) for each in self._levels):
            logged, gradients = level.loss_and_gradient(batch, wrt)
            below = [self._levels[other] for other in tree]
            total, *vectors = _split(gradients, [level, *below])
            for other, vector in zip(tree, vectors, strict=True):
                path = number, other
                through = self._through(path, vector, tree[other])
                total = list(map(tf.add, total, through))
        reached = self._reached(number, {number: None, **tree})
        if not reached:
            self._refuse_standing_still(number)
        self._warn_of_standing_still(number, reached)
        for tracker, value in zip(self._losses[number], logged, strict=True):
            tracker.update_state(value)
        return total

    def _through(
        self, path: tuple[int, ...], vector: Tensors, tree: Tree
    ) -> Tensors:
        """Takes a gradient through a level, and on to the top one.

        `path` is where it came from: the top one first, the level last.
        """
        top, *_, number = path
        level, (batch, state) = self._levels[number], self._last[number]
        targets = [self._levels[other] for other in tree]
        wrt = [variable for each in targets for variable in each.variables]
        level.residuals.clear()
        guess = self._structure.guesses.get(path, [])
        with level.replayed(batch, state), level.guessing(guess):
            products = level.hypergradient(vector, level, batch, wrt)
        tracker = self._residuals[number]
        if tracker is not None:
            for residual in level.residuals:
                tracker.update_state(residual)
        total: Tensors = []
        for other, each in zip(tree, _split(products, targets), strict=True):
            if other != top:
                each = self._through((*path, other), each, tree[other])
            total = list(map(tf.add, total, each)) if total else each
        return total

    def _reached(self, number: int, tree: Tree) -> set[int]:
        """The variables to which a gradient comes, along any path from a
        level, of the level where its paths end; by their identities."""
        arrived: set[int] = set()
        for other, further in tree.items():
            variables = map(id, self._levels[other].variables)
            reached = self._levels[number].reached.intersection(variables)
            if reached and further is not None:
                reached = self._reached(other, further)
            arrived |= reached
        return arrived

    def _warn_of_standing_still(self, number: int, reached: set[int]) -> None:
        """Says once which of a level's variables are without a gradient."""
        level = self._levels[number]
        if len(reached) == len(level.variables) or (
            number in self._structure.told_of
        ):
            return
        self._structure.told_of.add(number)
        paths = [v.path for v in level.variables if id(v) not in reached]
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
        tree = {number: None, **self._structure.trees[number]}
        received = ", ".join(
            " -> ".join(names[each] for each in (number, *route))
            for route in routes(tree)
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
        if level.kept_steps and number not in self._in_loop:
            step = updates.noted(level, batch, state, gradients)
        gradients = level.clipped(gradients)
        optimizer = self._structure.optimizers[number]
        scale = _scale(optimizer)
        if scale is not None:
            gradients = [t * tf.cast(scale, t.dtype) for t in gradients]
        level.workers.apply(optimizer, gradients, level.variables)
        if step is not None:
            updates.finish(level, step, level.kept_steps)

    def _next_batch(self, number: int) -> Any:
        """The level's next batch: the union of several if it accumulates."""
        level = self._levels[number]
        data = self._data[level.name]
        start = self._taken[number]
        self._taken[number] += level.num_batches
        if self._structure.num_batches[number] == 1:
            return data
        return keras.tree.map_structure(
            functools.partial(_union, start, level.num_batches), data
        )


def _scale(optimizer) -> Any:
    """What an optimizer divides gradients by, if by anything."""
    scales = isinstance(optimizer, LossScaleOptimizer)
    if not scales and optimizer.loss_scale_factor is None:
        return None
    return optimizer.scale_loss(tf.ones([]))


def _split(tensors: Tensors, levels: list[Level]) -> list[Tensors]:
    """A list for each level's variables."""
    rest = iter(tensors)
    return [[next(rest) for _ in level.variables] for level in levels]


def _union(start: Any, count: int, stacked: tf.Tensor) -> tf.Tensor:
    """Some of the stacked batches, as one."""
    if count == 1:
        return stacked[start]
    # A slice from a place that is not known has no known length, for XLA.
    return tf.concat([stacked[start + i] for i in range(count)], axis=0)
