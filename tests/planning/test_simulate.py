"""A schedule costs what can be counted by hand."""

import dataclasses

import numpy as np
import pytest

from kmem.planning.graph import Graph
from kmem.planning.graph import Operation
from kmem.planning.graph import simulate


def operation(inputs, outputs, **others):
    others = {"name": "op", "seconds": 1.0, **others}
    return Operation(inputs=inputs, outputs=outputs, **others)


# a -> b -> c, and d reads what a and c made.
DIAMOND = Graph(
    operations=(
        operation((), (0,), seconds=1.0),
        operation((0,), (1,), seconds=2.0),
        operation((1,), (2,), seconds=4.0),
        operation((0, 2), (3,), seconds=8.0),
    ),
    tensor_bytes=(10, 20, 30, 5),
    results=frozenset({3}),
)


def replay_forwards(graph, schedule):
    """The definition, step by step, with the whole future looked through."""
    made_at, step_bytes = {}, []
    alive = set(graph.constants)
    for step, index in enumerate(schedule):
        current = graph.operations[index]
        for tensor in current.outputs:
            made_at[tensor] = step
        alive.update(current.outputs)
        step_bytes.append(
            graph.resident_bytes
            + sum(graph.tensor_bytes[t] for t in alive)
            + current.workspace_bytes
        )
        for tensor in sorted(alive - graph.constants):
            rest = [graph.operations[i] for i in schedule[step + 1 :]]
            for later in rest:
                if tensor in later.inputs:
                    break
                if tensor in later.outputs:
                    alive.discard(tensor)
                    break
            else:
                if tensor not in graph.results:
                    alive.discard(tensor)
    return step_bytes


def test_the_program_of_a_small_graph():
    simulation = simulate(DIAMOND, DIAMOND.program)
    assert simulation.step_bytes == (10, 30, 60, 45)
    assert simulation.peak_bytes == 60
    assert simulation.seconds == 15
    assert simulation.num_recomputed == 0


def test_what_is_made_again_is_not_kept_meanwhile():
    simulation = simulate(DIAMOND, (0, 1, 2, 0, 3))
    assert simulation.step_bytes == (10, 30, 50, 40, 45)
    assert simulation.seconds == 16
    assert simulation.num_recomputed == 1


def test_constants_and_resident_bytes_are_always_counted():
    graph = dataclasses.replace(
        DIAMOND,
        operations=(operation((4,), (0,)), *DIAMOND.operations[1:]),
        tensor_bytes=(*DIAMOND.tensor_bytes, 100),
        constants=frozenset({4}),
        resident_bytes=1000,
    )
    simulation = simulate(graph, graph.program)
    assert simulation.step_bytes == (1110, 1130, 1160, 1145)


def test_workspace_and_unused_outputs_count_while_their_operation_runs():
    graph = Graph(
        operations=(
            operation((), (0, 1), workspace_bytes=100),
            operation((0,), (2,)),
        ),
        tensor_bytes=(1, 10, 2),
    )
    assert simulate(graph, (0, 1)).step_bytes == (111, 3)


def test_all_outputs_are_made_anew():
    graph = Graph(
        operations=(
            operation((), (0, 1)),
            operation((0,), (2,)),
            operation((0,), (3,)),
            operation((1,), (4,)),
        ),
        tensor_bytes=(1, 10, 100, 1000, 10000),
    )
    # The first copy of tensor 1 has no reader before the second is made.
    simulation = simulate(graph, (0, 1, 0, 2, 3))
    assert simulation.step_bytes == (11, 101, 11, 1011, 10010)


def test_a_result_stays_to_the_end():
    graph = dataclasses.replace(DIAMOND, results=frozenset({1, 3}))
    assert simulate(graph, graph.program).step_bytes == (10, 30, 60, 65)
    assert simulate(graph, (0, 1, 2, 3, 0, 1)).step_bytes[-3:] == (45, 15, 35)


def test_an_empty_graph_holds_what_is_resident():
    graph = Graph(operations=(), tensor_bytes=(), resident_bytes=7)
    assert simulate(graph, ()).peak_bytes == 7


@pytest.mark.parametrize("seed", range(20))
def test_the_walk_from_the_end_agrees_with_the_definition(seed):
    rng = np.random.default_rng(seed)
    operations, count = [], 2
    for _ in range(8):
        inputs = tuple(rng.choice(count, size=min(2, count), replace=False))
        outputs = tuple(range(count, count + rng.integers(0, 3)))
        count += len(outputs)
        operations.append(
            operation(
                tuple(map(int, inputs)),
                outputs,
                workspace_bytes=int(rng.integers(5)),
            )
        )
    graph = Graph(
        operations=tuple(operations),
        tensor_bytes=tuple(map(int, rng.integers(0, 50, size=count))),
        constants=frozenset({0, 1}),
        results=frozenset({count - 1}),
        resident_bytes=3,
    )
    again = [int(i) for i in rng.integers(0, 8, size=6)]
    schedule = (*graph.program, *sorted(again), *again)
    simulation = simulate(graph, schedule)
    assert list(simulation.step_bytes) == replay_forwards(graph, schedule)
    assert simulation.num_recomputed == 12


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((0, 1, 3), r"must run every operation.*without \[2\]"),
        ((0, 1, 2, 3, 4), r"and no other.*with \[4\]"),
        ((1, 0, 2, 3), r"step 0, operations\[1\] \(op\), reads \[0\]"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        simulate(DIAMOND, schedule)


def test_what_is_not_recomputable_runs_once():
    graph = Graph(
        operations=(operation((), (0,), recomputable=False),),
        tensor_bytes=(1,),
    )
    assert simulate(graph, (0,)).peak_bytes == 1
    with pytest.raises(ValueError, match=r"operations\[0\] .* runs 2 times"):
        simulate(graph, (0, 0))


def test_a_tensor_has_one_maker():
    with pytest.raises(ValueError, match="must be made by one operation"):
        Graph(
            operations=(operation((), (0,)), operation((), (0,))),
            tensor_bytes=(1,),
        )
