"""Which level reads which: what a gradient has to pass through.

An edge (a, b) says that the loss of level a reads variables of level b. If a
is above b, b's variables react to nothing of a's by it, and a's loss depends
on b's; if a is below b, b's variables shape what a learns. The gradient of a
level's loss reaches its variables along all paths through levels below it,
each of which is passed at most once. What this module does not do: derive a
level's response to how the levels below respond, which takes third
derivatives; each level responds through its own loss.
"""

from collections.abc import Iterable
from typing import Any
from typing import Literal

from kmem.multilevel.level import Level

Edges = frozenset[tuple[int, int]]
# For each level that a gradient goes on to, where it goes from there; `None`
# where it has arrived.
Tree = dict[int, Any]


def find(
    levels: list[Level],
    batches: dict[str, Any],
    mode: Literal["eager", "graph", "xla"],
) -> Edges:
    """The edges between levels, from what their losses read.

    Args:
        levels: The levels, lowest first.
        batches: For each level's name the `tf.TensorSpec`s of what its loss
            is computed of at a time.
        mode: How steps will run.

    Raises:
        ValueError: If two levels learn the same variable.
    """
    looks = [level.look(batches[level.name], mode) for level in levels]
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
    found = set()
    for reader, looking in enumerate(looks):
        for other, level in enumerate(levels):
            reads = any(id(v) in looking.read for v in level.variables)
            if reader != other and reads:
                found.add((reader, other))
    return frozenset(found)


def chosen(
    levels: list[Level], found: Edges, wanted: Iterable[tuple[str, str]]
) -> Edges:
    """The edges that the user wants, of those that there are.

    Args:
        levels: The levels.
        found: The edges that there are.
        wanted: Pairs of names: the level that reads, and what it reads.

    Raises:
        ValueError: If there is no such edge.
    """
    numbers = {level.name: number for number, level in enumerate(levels)}
    edges = set()
    for reader, other in wanted:
        edge = numbers.get(reader, -1), numbers.get(other, -1)
        if edge not in found:
            existing = [(levels[a].name, levels[b].name) for a, b in found]
            raise ValueError(
                "`edges` must be pairs of a level and one whose variables its "
                "loss reads; leave the others out, or let the loss read them. "
                f"Received: {(reader, other)!r}, while there are "
                f"{sorted(existing)}"
            )
        edges.add(edge)
    return frozenset(edges)


def parents(edges: Edges, count: int) -> list[int]:
    """For each level but the top one, the level that makes it step.

    The first above that reads it, or the top level if none does.
    """
    return [
        min((a for a, b in edges if b == level < a), default=count - 1)
        for level in range(count - 1)
    ]


def paths(edges: Edges, top: int) -> Tree:
    """The paths from a level's loss to its variables, as a tree.

    Args:
        edges: The edges.
        top: The level.
    """

    def onward(level: int, passed: frozenset[int]) -> Tree:
        tree: Tree = {}
        for reader, other in sorted(edges):
            if reader != level or other in passed or other > top:
                continue
            if other == top:
                tree[top] = None
            elif further := onward(other, passed | {other}):
                tree[other] = further
        return tree

    # Not to itself directly: that is no path through other levels.
    return {
        other: tree
        for reader, other in sorted(edges)
        if reader == top > other and (tree := onward(other, frozenset({other})))
    }


def passed(tree: Tree) -> set[int]:
    """The levels that a gradient passes."""
    found = {level for level, further in tree.items() if further is not None}
    for further in tree.values():
        found |= passed(further) if further else set()
    return found


def routes(tree: Tree) -> list[list[int]]:
    """The paths one by one, each the levels that it reaches in turn."""
    return [
        [level, *rest]
        for level, further in tree.items()
        for rest in (routes(further) if further else [[]])
    ]
