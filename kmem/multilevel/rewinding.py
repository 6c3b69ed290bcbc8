"""A level's steps from the last to the first, of which few states are kept.

The adjoint of a step needs its state: the weights, and what the optimizer
keeps. Where those of all steps are too much, steps are made again from a state
that was kept, at the batches and random numbers that they had. Which ones are
kept, so that the fewest are made again, is known in closed form, as all steps
take as long (Griewank and Walther, ACM Transactions on Mathematical Software
26, 2000, algorithm 799). What this module does not do: recompute within a
step, which is what the level's `remat` is for.
"""

import math
from collections.abc import Iterator

from kmem.graph import control
from kmem.multilevel import updates
from kmem.multilevel.derivatives import Tensors


def split(num_steps: int, num_waiting: int) -> int:
    """The number of steps, of two or more, to make before the next state is
    kept; of such states, the one at the start included, there are
    `num_waiting` at a time, beside the one that is worked at."""
    repeats = 1
    while math.comb(num_waiting + repeats, repeats) < num_steps:
        repeats += 1
    # So many steps take so many repeats at most, with all states or one less.
    most = math.comb(num_waiting + repeats - 1, num_waiting)
    rest = math.comb(num_waiting + repeats - 2, num_waiting - 1)
    return min(most, num_steps - rest)


def kept(num_steps: int, num_waiting: int) -> list[int]:
    """The steps whose states are kept as the steps are first made."""
    places = [0]
    while num_steps > 1:
        made = split(num_steps, num_waiting)
        places.append(places[-1] + made)
        num_steps, num_waiting = num_steps - made, num_waiting - 1
    return places


def rewound(
    steps: list[updates.Step], num_waiting: int | None, arrived: Tensors
) -> Iterator[updates.Step]:
    """The steps from the last to the first, with their states and gradients.

    Args:
        steps: The steps, those of `kept` with their states.
        num_waiting: As in `split`; `None` if all have states and gradients.
        arrived: The gradient that has come back so far, which the caller
            replaces: nothing is made again before it is there.
    """
    if num_waiting is None:
        yield from reversed(steps)
        return
    ranges = [(0, len(steps), num_waiting)]
    while ranges:
        first, last, num_waiting = ranges.pop()
        if last < len(steps):
            steps[last].values = steps[last].slots = []
        if last - first == 1:
            step = steps[first]
            values, _ = control.after(arrived, step.values, [])
            yield updates.remade(step, values, step.slots)
            continue
        middle = first + split(last - first, num_waiting)
        if not steps[middle].values:
            _make_again(steps[first : middle + 1], arrived)
        ranges.append((first, middle, num_waiting))
        ranges.append((middle, last, num_waiting - 1))


def _make_again(steps: list[updates.Step], gradients: Tensors) -> None:
    """Gives the last of some steps its state, from that of the first."""
    values, _ = control.after(gradients, steps[0].values, [])
    slots = steps[0].slots
    for step in steps[:-1]:
        values, slots = updates.after(updates.remade(step, values, slots))
    steps[-1].values, steps[-1].slots = values, slots
