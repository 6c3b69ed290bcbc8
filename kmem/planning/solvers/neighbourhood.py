"""Which operations of a schedule to set free, to solve it again exactly.

Good parts hold decisions that depend on each other: operations that follow
one another, or those that run again at about the same time, with what they
are made from and what is made from them.
"""

import random

from kmem.planning.solvers.local import LocalSearch


def choose(
    search: LocalSearch, steps: list[int], size: int, rng: random.Random
) -> set[int]:
    """Returns about `size` recomputable operations, at random.

    The backward pass joins in when `size` is more than the forward pass has:
    running it again seldom pays.
    """
    graph = search.graph
    count = len(graph.operations)
    if size < graph.num_forward and rng.random() < 0.9:
        count = graph.num_forward
    elif size == graph.num_forward:
        count = size
    repeats = search.repeats(steps)
    if size < count and repeats and rng.random() < 0.5:
        chosen = _recomputed_nearby(search, steps, repeats, size, rng)
    else:
        size = min(count, size)
        first = rng.randint(0, count - size)
        chosen = set(range(first, first + size))
    return {i for i in chosen if graph.operations[i].recomputable}


def _recomputed_nearby(search, steps, repeats, size, rng) -> set[int]:
    """What runs again around one moment, and the operations around that."""
    first = rng.randrange(len(repeats))
    last = first + rng.randint(1, size)
    chosen = {steps[step] for step in repeats[first:last]}
    border = list(chosen)
    while border and len(chosen) < size:
        around: list[int] = []
        for index in border:
            around += _neighbours(search.graph, index)
        border = [i for i in dict.fromkeys(around) if i not in chosen]
        rng.shuffle(border)
        border = border[: size - len(chosen)]
        chosen.update(border)
    return chosen


def _neighbours(graph, index: int) -> list[int]:
    operation = graph.operations[index]
    makers = [graph.maker.get(tensor) for tensor in operation.inputs]
    found = [maker for maker in makers if maker is not None]
    for tensor in operation.outputs:
        found += graph.readers[tensor]
    return found
