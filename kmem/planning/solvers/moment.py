"""A lower bound on the time, from what is in memory at one moment.

When an operation runs for the first time, what was made before and is read
after is in memory or runs again later; and what runs again needs its inputs,
which are in memory at that moment or run again as well. The cheapest choice
within the budget, a Boolean program, bounds every schedule whose first runs
keep the program's order. `kmem.planning.bounds` has the same without the inputs
of inputs: a knapsack, which needs no solver and is less.

What has to run again twice, for other moments, is counted once.
"""

import math

from kmem.planning.graph import Graph
from kmem.planning.solvers.cpsat import AS_THEY_ARE
from kmem.planning.solvers.cpsat import BooleanProgram
from kmem.planning.solvers.cpsat import CpSat

# CP-SAT wants integers, and not too large ones.
_BYTE_STEPS = 1 << 31
_SECOND_STEPS = 10**7


def seconds_after(
    graph: Graph,
    moment: int,
    budget_bytes: int,
    solver: CpSat,
    seconds_limit: float,
) -> float:
    """Returns seconds that every schedule within a budget runs again.

    Args:
        graph: The operations and their tensors.
        moment: The operation that runs for the first time.
        budget_bytes: The peak that a schedule may have.
        solver: CP-SAT.
        seconds_limit: How long to search; less is found in less time.
    """
    # Sizes and times are rounded down, so that the bound stays one.
    byte_unit = max(1, budget_bytes // _BYTE_STEPS)
    if byte_unit == 1:
        byte_unit = math.gcd(*graph.tensor_bytes) or 1
    second_unit = max(graph.seconds, 1e-12) / _SECOND_STEPS
    operation, maker = graph.operations[moment], graph.maker
    touched = set(operation.inputs) - graph.constants
    required_bytes = graph.constant_bytes + operation.workspace_bytes
    required_bytes += sum(
        graph.tensor_bytes[tensor]
        for tensor in touched.union(operation.outputs)
    )
    program = BooleanProgram()
    kept: dict[int, int | bool] = dict.fromkeys(touched, True)
    again: dict[int, int | bool] = {}
    waiting = _read_later(graph, moment)
    found = list(waiting | touched)
    for tensor in found:
        index = maker[tensor]
        made = graph.operations[index]
        if tensor not in touched:
            must = tensor in waiting and not made.recomputable
            kept[tensor] = must or program.add()
        if index in again:
            continue
        again[index] = False
        if made.recomputable:
            again[index] = program.add(int(made.seconds / second_unit))
            new = set(made.inputs) - graph.constants
            found += new.difference(found)
    for tensor in waiting:
        program.at_most([(-1, kept[tensor]), (-1, again[maker[tensor]])], -1)
    for index, runs in again.items():
        if runs is False:
            continue
        for tensor in set(graph.operations[index].inputs) - graph.constants:
            source = again[maker[tensor]]
            program.at_most([(1, runs), (-1, kept[tensor]), (-1, source)], 0)
    program.at_most(
        [
            (graph.tensor_bytes[tensor] // byte_unit, variable)
            for tensor, variable in kept.items()
            if tensor not in touched
        ],
        (budget_bytes - required_bytes) // byte_unit,
    )
    answer = solver.solve(program, seconds_limit, AS_THEY_ARE)
    if answer.is_infeasible:
        return math.inf
    return max(answer.bound, 0.0) * second_unit


def _read_later(graph: Graph, moment: int) -> set[int]:
    """What was made before an operation and is read after it."""
    return {
        tensor
        for operation in graph.operations[:moment]
        for tensor in operation.outputs
        if tensor in graph.results
        or (graph.readers[tensor] and graph.readers[tensor][-1] > moment)
    }
