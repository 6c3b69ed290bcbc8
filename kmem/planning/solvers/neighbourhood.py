"""Which part of a schedule to solve again, exactly.

A part is operations that are free to run again, and stages at which they may.
Good parts hold decisions that depend on each other: operations that follow
one another, or those that run again at about the same time, with what they
are made from.
"""

import random

from kmem.planning.solvers.local import LocalSearch

# About as many as CP-SAT settles in a few seconds.
_MAX_SLOTS = 900


def choose(
    search: LocalSearch, steps: list[int], rng: random.Random
) -> tuple[set[int], set[int]]:
    """Returns the operations and the stages of a part, at random."""
    repeats = search.repeats(steps)
    if repeats and rng.random() < 0.6:
        operations = _recomputed_nearby(search, steps, repeats, rng)
    else:
        operations = _window(search, rng)
    stages = _stages(search, steps, operations)
    most = max(4, _MAX_SLOTS // max(1, len(operations)))
    if len(stages) > most:
        first = rng.randint(0, len(stages) - most)
        stages = stages[first : first + most]
    return operations, set(stages)


def _window(search: LocalSearch, rng: random.Random) -> set[int]:
    """Operations in a row, of the forward pass more often than not."""
    graph = search.graph
    count = len(graph.operations)
    if graph.num_forward and rng.random() < 0.8:
        count = graph.num_forward
    size = min(count, rng.choice((8, 16, 32, 64)))
    first = rng.randint(0, count - size)
    return {
        index
        for index in range(first, first + size)
        if graph.operations[index].recomputable
    }


def _recomputed_nearby(search, steps, repeats, rng) -> set[int]:
    """What runs again around one moment, and what it is made from."""
    graph = search.graph
    size = min(len(repeats), rng.choice((4, 8, 16, 32)))
    first = rng.randint(0, len(repeats) - size)
    operations = {steps[step] for step in repeats[first : first + size]}
    for _ in range(rng.randint(0, 3)):
        around: set[int] = set()
        for index in operations:
            operation = graph.operations[index]
            around.update(
                graph.maker[tensor]
                for tensor in operation.inputs
                if tensor in graph.maker
            )
            for tensor in operation.outputs:
                around.update(graph.readers[tensor])
        if len(operations | around) > 80:
            break
        operations |= around
    return {i for i in operations if graph.operations[i].recomputable}


def _stages(search, steps: list[int], operations: set[int]) -> list[int]:
    """Where the free operations run again, or could be read."""
    graph = search.graph
    stages = {
        reader
        for index in operations
        for tensor in graph.operations[index].outputs
        for reader in graph.readers[tensor]
    }
    seen: set[int] = set()
    touched = False
    for index in steps:
        operation = graph.operations[index]
        again = index in seen
        if again and (
            index in operations
            or any(graph.maker.get(t) in operations for t in operation.inputs)
        ):
            touched = True
        if not again:
            if touched:
                stages.add(index)
            touched = False
            seen.add(index)
    return sorted(stages)
