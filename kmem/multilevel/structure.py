"""Levels in their order, and which reads which: what a gradient passes.

An edge (a, b) says that the loss of level a reads variables of level b. If a
is above b, b's variables react to nothing of a's by it, and a's loss depends
on b's; if a is below b, b's variables shape what a learns. The gradient of a
level's loss reaches its variables along all paths through levels below it,
each of which is passed at most once. What this module does not do: derive the
response of a level whose own gradient passes through levels below, which takes
third derivatives. Every level that is passed responds through its own loss
alone, and `check_responses` refuses programs in which that is not all.
"""

from collections.abc import Iterable
from typing import Any
from typing import Literal

import keras
import numpy as np

from kmem import precision
from kmem.base.checks import must_be
from kmem.base.sizes import format_size
from kmem.multilevel import updates
from kmem.multilevel.hypergradients import Unrolled
from kmem.multilevel.level import Level
from kmem.multilevel.workers import num_replicas
from kmem.sharding.variables import ShardedVariable
from kmem.step import batches
from kmem.step.capture import optimizer_config

Edges = frozenset[tuple[int, int]]
# For each path that a gradient comes along, from the level whose loss it is of
# to one that it passes, where it goes on to: the first level is where it ends.
Paths = dict[tuple[int, ...], list[int]]


class Structure:
    """Levels in their order, and how they are connected.

    Attributes:
        levels: The levels, lowest first.
        edges: Which level reads which.
        onward: For each path of a gradient where it goes on to.
        optimizers: The levels' optimizers, or what scales their losses.
        guesses: For each path to a level that starts from the solution of the
            step before, variables with that.
        fresh: For each level that starts anew, its optimizer's variables with
            their first values.
        children: For each level, the levels that step before it does.
        num_updates: For each level, its updates in a round.
        num_batches: For each level's name, the loader's batches in a round.
        told_of: The levels of which a warning was given.
    """

    def __init__(self, levels: list[Level], edges: Edges):
        self.levels = levels
        self.edges = edges
        self.told_of: set[int] = set()
        numbers = range(len(levels))
        self.onward: Paths = {}
        for number in numbers:
            self.onward |= _paths(edges, number)
        passing = [path for path in self.onward if len(path) > 1]
        passed = [
            {path[-1] for path in passing if path[0] == n} for n in numbers
        ]
        self.optimizers = [
            _optimizer(level, [level, *(levels[i] for i in below)])
            for level, below in zip(levels, passed, strict=True)
        ]
        self.guesses: dict[tuple[int, ...], list] = {
            path: _guess(levels[path[-1]])
            for path in passing
            if getattr(levels[path[-1]].hypergradient, "warm_start", False)
        }
        self.fresh = {
            number: _fresh(level)
            for number, level in enumerate(levels)
            if level.start is not None
        }
        # What makes a level step: the first above that reads it, or the top.
        parents = [
            min((a for a, b in edges if b == level < a), default=numbers[-1])
            for level in numbers[:-1]
        ]
        self.children = [
            [child for child, parent in enumerate(parents) if parent == number]
            for number in numbers
        ]
        for level, children in zip(levels, self.children, strict=True):
            below = [levels[child] for child in children]
            level.inner_levels = sum((c.inner_levels for c in below), below)
        self.num_updates = [1] * len(levels)
        for number in reversed(numbers[:-1]):
            parent = parents[number]
            rounds = self.num_updates[parent] * levels[parent].tasks_per_update
            self.num_updates[number] = rounds * levels[number].unroll_steps
        self.num_batches = {
            level.name: count * level.tasks_per_update * level.num_batches
            for count, level in zip(self.num_updates, levels, strict=True)
        }

    def table(self, peaks: list[str]) -> str:
        """A line for each level, the lowest first, with its peak."""
        names = [level.name for level in self.levels]
        width = max(map(len, ["level", *names]))
        lines = [
            f"{'level':<{width}}  {'learns':>9}  {'steps':>5}  {'peak':>9}  "
            "hypergradient, and what the loss reads"
        ]
        for number, level in enumerate(self.levels):
            learns = format_size(batches.num_bytes(level.variables))
            reads = [names[b] for a, b in sorted(self.edges) if a == number]
            lines.append(
                f"{level.name:<{width}}  {learns:>9}  "
                f"{self.num_updates[number]:>5}  {peaks[number]:>9}  "
                f"{level.hypergradient}, reads {', '.join(reads) or 'no other'}"
            )
        return "\n".join(lines)


def check_levels(levels: Any) -> None:
    """Checks what a program is made of."""
    is_list = isinstance(levels, list | tuple) and len(levels) > 0
    is_right = is_list and all(isinstance(level, Level) for level in levels)
    must_be(is_right, levels, "levels", "a list of levels, lowest first")
    names = [level.name for level in levels]
    if len(set(names)) < len(names):
        raise ValueError(
            "Levels must have different names: give them `name=...`. "
            f"Received: {names}"
        )
    for level in levels:
        cut = (v for v in level.model.weights if isinstance(v, ShardedVariable))
        if any(variable.shard.stays for variable in cut):
            raise ValueError(
                "The models of a program must be built outside of "
                "`kmem.ShardedStrategy`: `fit(sharding=...)` divides them. "
                f"Received: level '{level.name}', whose model is in shards"
            )


def find_edges(
    levels: list[Level],
    specs: dict[str, Any],
    mode: Literal["eager", "graph", "xla"],
) -> Edges:
    """The edges between levels, from what their losses read of micro-batches of
    the types `specs`. No two levels may learn the same variable."""
    looks = [level.look(specs[level.name], mode) for level in levels]
    owners: dict[int, Level] = {}
    for level in levels:
        for variable in level.variables:
            owner = owners.setdefault(id(variable), level)
            if owner is not level:
                raise ValueError(
                    "Levels must have variables of their own: freeze what "
                    "another one learns with `trainable=False`. Received: "
                    f"'{variable.path}' in the levels '{owner.name}' and "
                    f"'{level.name}'"
                )
    return frozenset(
        (reader, other)
        for reader, look in enumerate(looks)
        for other, level in enumerate(levels)
        if reader != other
        and any(id(variable) in look.read for variable in level.variables)
    )


def choose_edges(
    levels: list[Level], edges: Edges, chosen: str | Iterable[tuple[str, str]]
) -> Edges:
    """Of the edges that there are, those that the user names, or all."""
    if chosen == "infer":
        return edges
    names = [level.name for level in levels]
    by_name = {(names[a], names[b]): (a, b) for a, b in edges}
    pairs: list[Any] = list(map(tuple, chosen))
    for pair in pairs:
        if pair not in by_name:
            raise ValueError(
                "`edges` must be pairs of a level and one whose variables its "
                "loss reads; leave the others out, or let the loss read them. "
                f"Received: {pair!r}, while there are {sorted(by_name)}"
            )
    return frozenset(by_name[pair] for pair in pairs)


def check_responses(levels: list[Level], edges: Edges) -> None:
    """Refuses gradients through a level that responds by levels below it.

    A level that reads none of those that depend on it responds as its own loss
    says. If all levels below the top one are of this kind, they depend on each
    other in no circle, and the paths are the chain rule.
    """
    names = [level.name for level in levels]
    for top in range(len(levels)):
        onward = _reachable(edges, top, top)
        for number in sorted(onward - {top}):
            _, *others = routes(_paths(edges, number), number)
            if not others or top not in _reachable(edges, number, top):
                continue
            path = " -> ".join(names[i] for i in others[0])
            raise ValueError(
                "A level that the gradient of a level above passes through "
                "must respond by its own loss alone: its loss may read no "
                "level below that depends on it in turn, since that takes "
                "third derivatives. Make one level of them, with one loss, "
                "or leave the first edge out of `edges`: then the level "
                "treats what is below as constant, in its own gradient too. "
                f"Received: the gradient of level '{names[top]}' through "
                f"level '{names[number]}', whose own goes {path}"
            )
        _check_unrolled(levels, _paths(edges, top), top)


def _check_unrolled(levels: list[Level], paths: Paths, top: int) -> None:
    """Refuses to go back through steps of two levels that take turns."""
    for path, onward in paths.items():
        for reader, other in ((path[-1], other) for other in onward):
            if not other < reader < top or levels[reader].kept_steps < 2:
                continue
            both = levels[reader], levels[other]
            if all(isinstance(x.hypergradient, Unrolled) for x in both):
                raise ValueError(
                    "`Unrolled` must go through one step of a level whose "
                    "loss reads a level below that is `Unrolled`, too, and "
                    "steps between: give it `steps=1` or `unroll_steps=1`, or "
                    "one of the two a solver. Received: level "
                    f"'{both[0].name}' with unroll_steps="
                    f"{both[0].unroll_steps}, which reads level "
                    f"'{both[1].name}'"
                )


def routes(paths: Paths, top: int) -> list[tuple[int, ...]]:
    """The paths from a level back to it, the direct one first."""
    return [
        (*path, top)
        for path, onward in paths.items()
        if path[0] == top and top in onward
    ]


def _paths(edges: Edges, top: int) -> Paths:
    """The paths from a level's loss to its variables: directly, and through
    levels below it."""
    paths: Paths = {(top,): [top]}

    def follow(path: tuple[int, ...]) -> bool:
        """Whether a path arrives."""
        onward = [
            other
            for reader, other in sorted(edges)
            if reader == path[-1] and other <= top
            if other == top or (other not in path and follow((*path, other)))
        ]
        if onward:
            paths[path] = paths.get(path, []) + onward
        return bool(onward)

    follow((top,))
    return paths


def _fresh(level: Level) -> list[tuple[Any, Any]]:
    """What begins anew with an optimizer: its learning rate does not.

    The values are those of one that has made no step: a number where all
    entries are equal, so that no graph has to hold them.
    """
    optimizer = getattr(level.optimizer, "inner_optimizer", level.optimizer)
    config = optimizer_config(optimizer)
    new = type(optimizer).from_config(config)
    new.build(level.variables)
    pairs = zip(optimizer.variables, new.variables, strict=True)
    values = [(v, n.numpy()) for v, n in pairs if v.name != "learning_rate"]
    return [
        (v, first.flat[0] if first.size and np.ptp(first) == 0 else first)
        for v, first in values
    ]


def _guess(level: Level) -> list[keras.Variable]:
    if num_replicas() > 1:
        raise ValueError(
            "`warm_start` keeps a solution for the next step, which replicas "
            "of a `tf.distribute` strategy cannot: leave it out. Received: "
            f"level '{level.name}' with {level.hypergradient}"
        )
    return [
        keras.Variable(
            keras.ops.zeros(v.shape, v.dtype),
            trainable=False,
            name=f"{level.name}_guess",
        )
        for v in level.variables
    ]


def _reachable(edges: Edges, start: int, top: int) -> set[int]:
    """The levels up to the top one that a level's loss depends on."""
    found: set[int] = set()
    new = {start}
    while new:
        new = {b for a, b in edges if a in new and b <= top} - found
        found |= new
    return found


def _optimizer(level: Level, on_path: list[Level]):
    """A level's optimizer, built, with a loss scale where it needs one.

    A level's update is made of passes through its own loss and through those
    of the levels below, and all of them are scaled by that level's scale: if
    any of them overflows, the update is skipped and the scale that did it is
    halved.
    """
    optimizer = level.optimizer
    if not optimizer.built:
        optimizer.build(level.variables)
    if level.kept_steps:
        updates.check(level, type(level.hypergradient).__name__)
    options = [each.options.mixed_precision for each in on_path]
    half = [o for o in options if o is not None and o.dtype == "float16"]
    if not half or precision.scales_loss(optimizer):
        return optimizer
    return precision.around(optimizer, level.variables, half[0])
