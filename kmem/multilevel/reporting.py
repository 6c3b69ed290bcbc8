"""A program's levels in words: what reads what, and what an update needs.

A level's peak is estimated: the gradient of one part of its batch is traced,
through the levels below where that is so, and its graph replayed (peaks.py).
Added is what is there all the time: variables, optimizers, and the batches of
a step. Nothing is run.
"""

import contextlib
from typing import Any

import tensorflow as tf

from kmem.base.sizes import format_size
from kmem.multilevel import peaks
from kmem.multilevel.level import Level
from kmem.multilevel.rounds import Round
from kmem.multilevel.rounds import Structure
from kmem.step import batches
from kmem.step import patching


def summary(structure: Structure, parts: dict[str, Any]) -> str:
    """A table, a line for each level, the lowest first.

    Args:
        structure: The levels.
        parts: For each level's name the `tf.TensorSpec`s of what its loss is
            computed of at a time.
    """
    names = [level.name for level in structure.levels]
    width = max(map(len, ["level", *names]))
    lines = [
        f"{'level':<{width}}  {'learns':>9}  {'steps':>5}  "
        f"{'estimated peak':>14}  hypergradient, and what the loss reads"
    ]
    for number, level in enumerate(structure.levels):
        learns = batches.num_bytes(level.variables)
        peak = resident_bytes(structure, parts)
        peak += gradient_bytes(structure, number, parts)
        reads = [names[b] for a, b in sorted(structure.edges) if a == number]
        lines.append(
            f"{level.name:<{width}}  {format_size(learns):>9}  "
            f"{structure.num_updates[number]:>5}  {format_size(peak):>14}  "
            f"{level.hypergradient}, reads {', '.join(reads) or 'no other'}"
        )
    return "\n".join(lines)


def resident_bytes(structure: Structure, parts: dict[str, Any]) -> int:
    """What a step has in memory from its start to its end."""
    variables = [
        *(v for level in structure.levels for v in level.model.variables),
        *(v for each in structure.optimizers for v in each.variables),
    ]
    data_bytes = sum(
        count * level.options.num_parts * batches.num_bytes(parts[level.name])
        for level, count in zip(
            structure.levels, structure.num_batches, strict=True
        )
    )
    return batches.num_bytes(variables) + data_bytes


def gradient_bytes(
    structure: Structure, number: int, parts: dict[str, Any]
) -> int:
    """What making the gradient of a level's update takes besides."""

    def gradient(data):
        round_ = Round(structure, data)
        for below, level in enumerate(structure.levels):
            round_.start_from(below, data[level.name])
            # All alike: only their number counts.
            step = round_.noted(below, level.values())
            level.steps[:] = [step] * level.unroll_steps if step else []
        return round_.gradient(number, data[structure.levels[number].name])

    with contextlib.ExitStack() as stack:
        for level in structure.levels:
            stack.enter_context(_in_one_part(level))
        traced = tf.function(gradient, autograph=False)
        graph = traced.get_concrete_function(parts).graph
    for level in structure.levels:
        level.steps.clear()
    level = structure.levels[number]
    # The sum over the parts.
    sums = level.num_parts > 1 and batches.num_bytes(level.variables)
    return peaks.temporary_bytes(graph) + sums


def _in_one_part(level: Level):
    return patching.attribute(level, "num_parts", 1)
