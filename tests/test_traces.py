"""A recorded step becomes the graph that it is of."""

import json

import pytest
from trace_cases import STEP
from trace_cases import constant
from trace_cases import write

from kmem.planning.simulate import simulate
from kmem.planning.traces import read_trace


@pytest.mark.parametrize("name", ["step.log", "step.log.gz"])
def test_a_trace_becomes_a_graph(tmp_path, name):
    graph = read_trace(write(tmp_path / name, STEP))
    names = [operation.name for operation in graph.operations]
    assert names == ["matmul", "relu_", "split", "sum"]
    assert graph.tensor_bytes == (100, 40, 40, 10, 30, 4)
    assert graph.constants == {0}
    # `b` was let go for the sum, which is all that has a name in the end.
    assert graph.results == {5}
    assert graph.num_forward == 2


def test_names_of_one_storage_are_one_tensor(tmp_path):
    graph = read_trace(write(tmp_path / "step.log", STEP))
    matmul, relu, split, add = graph.operations
    assert (matmul.inputs, matmul.outputs) == ((0,), (1,))
    # After the change in place, the view reads what the change made.
    assert (relu.inputs, relu.outputs) == ((1,), (2,))
    assert (split.inputs, split.outputs) == ((2, 0), (3, 4))
    assert (add.inputs, add.outputs) == ((3, 4), (5,))


def test_a_view_costs_the_maker_of_its_storage(tmp_path):
    graph = read_trace(write(tmp_path / "step.log", STEP))
    assert [operation.seconds for operation in graph.operations] == [3, 3, 5, 7]
    assert simulate(graph, graph.program).peak_bytes == 180


@pytest.mark.parametrize(
    "line",
    [
        '{"INSTRUCTION": "CALL"}',
        '{"INSTRUCTION": "RELEASE", "NAME": "nobody"}',
        '{"INSTRUCTION": "DANCE"}',
        '{"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": "-1"}',
        "not JSON",
        "[]",
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "bad.log"
    first = [json.dumps(instruction) for instruction in constant("w", 1)]
    path.write_text("\n".join([*first, line]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.log, line 3: "):
        read_trace(path)
