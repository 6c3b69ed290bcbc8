"""Rehearses the steps of a program, to keep a level's budget by measurement.

What counts for a level's budget is the device's peak in a step in which only
this level computes: derivatives of its own loss, for its update and for the
updates of others that pass through it. Half of a variable's value stands for
what other levels would compute. All the rest of the step is as in `fit`:
variables, optimizers, batches, and the gradients on their way. What this
module does not do: see what levels that compute at the same time need
together; each waits for the variables that the one before updates.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.budget.dry_run import Measurement
from kmem.budget.dry_run import dry_run
from kmem.fit import pipeline
from kmem.multilevel import passes
from kmem.multilevel.level import Level
from kmem.multilevel.rounds import Structure
from kmem.step import batches
from kmem.step import patching


def keep_budgets(
    program: keras.Model, structure: Structure, rows: dict[str, Any]
) -> None:
    """Plans all levels of a program that have a budget.

    Args:
        program: The program, which trains what is in `structure`. Its state
            is given back.
        structure: The levels, built.
        rows: For each level's name the `tf.TensorSpec`s of a loader's batch.

    Raises:
        ValueError: If a level has no plan within its budget.
    """
    element = _element(program, structure, rows)
    # One that is ready, and one in the making.
    reserved = pipeline.ready_bytes(element, 2)
    for level in structure.levels:
        if level.planned is not None and level.planned.has_budget:
            level.planned.choose(
                lambda level=level: _rehearse(
                    program, structure, level, element
                ),
                reserved,
            )


def trace(
    program: keras.Model, structure: Structure, rows: dict[str, Any]
) -> None:
    """Traces a step, which finds out what is wrong, and runs nothing.

    Args:
        program: As in `keep_budgets`.
        structure: Likewise.
        rows: Likewise.
    """
    element = _element(program, structure, rows)
    if program.distribute_strategy.num_replicas_in_sync == 1:
        step = tf.function(program.train_step, autograph=False)
        step.get_concrete_function(element)


def _element(program, structure: Structure, rows: dict[str, Any]) -> dict:
    """The types of what a replica's step is given."""
    count = program.distribute_strategy.num_replicas_in_sync
    return {
        level.name: _stacked(batches.part_of(rows[level.name], count), number)
        for level, number in zip(
            structure.levels, structure.num_batches, strict=True
        )
    }


def _rehearse(
    program, structure: Structure, level: Level, element
) -> Measurement | None:
    """Runs steps in which only one level computes."""
    training = _alone(program, structure, level)
    return dry_run(program, element, _state(structure), training)


@contextlib.contextmanager
def _alone(program, structure: Structure, level: Level) -> Iterator[None]:
    """Within, the program trains one of its levels."""
    with contextlib.ExitStack() as stack:
        for other in structure.levels:
            if other is not level:
                stack.enter_context(_without_passes(other))
        program.make_train_function(force=True)
        try:
            yield
        finally:
            program.train_function = None


@contextlib.contextmanager
def _without_passes(level: Level) -> Iterator[None]:
    """Within, a level's derivatives are other numbers of their shapes."""

    def loss_and_gradient(batch, wrt=None, at=None):
        wrt = level.variables if wrt is None else wrt
        level.reached.update(map(id, wrt))
        return tf.zeros([]), _stand_ins(wrt)

    def directional_gradient(batch, direction, wrt, at=None):
        level.reached.update(map(id, wrt))
        # So that the direction, of another level, is computed.
        return _stand_ins(wrt, sum(map(tf.reduce_mean, direction)))

    with (
        patching.attribute(level, "loss_and_gradient", loss_and_gradient),
        patching.attribute(level, "directional_gradient", directional_gradient),
    ):
        yield


def _stand_ins(variables: list, number: Any = 0.0) -> list[tf.Tensor]:
    # Not the values themselves, which take no memory of their own.
    return [
        value / 2 + tf.cast(number, value.dtype)
        for value in passes.read(variables)
    ]


def _state(structure: Structure) -> list:
    """What a step may change, besides metrics."""
    found = [
        *(v for level in structure.levels for v in level.model.variables),
        *(v for level in structure.levels for v in level.state),
        *(v for each in structure.optimizers for v in each.variables),
    ]
    return list({id(variable): variable for variable in found}.values())


def _stacked(batch: Any, count: int) -> Any:
    """The types of several batches, of which a round takes one by one."""
    if count == 1:
        return batch
    return keras.tree.map_structure(
        lambda spec: tf.TensorSpec([count, *spec.shape], spec.dtype), batch
    )
