"""A recorded step becomes the graph that it is of."""

import gzip
import json

import pytest

from kmem.planning.simulate import simulate
from kmem.planning.traces import read_trace


def constant(name, num_bytes):
    return [
        {"INSTRUCTION": "CONSTANT", "NAME": name},
        {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(num_bytes)},
    ]


def call(name, arguments, results, time):
    """`results`: name -> bytes, or the argument whose storage it shares."""
    lines = [
        {
            "INSTRUCTION": "CALL",
            "NAME": name,
            "ARGS": arguments,
            "RESULT": list(results),
            "TIME": str(time),
        }
    ]
    for result, (num_bytes, alias) in results.items():
        lines += [
            {"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": num_bytes},
            {"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": alias},
        ]
    return lines


def copy(name, of, instruction="COPY"):
    return [{"INSTRUCTION": instruction, "DST": name, "SRC": of}]


def release(*names):
    return [{"INSTRUCTION": "RELEASE", "NAME": name} for name in names]


def annotate(text):
    return [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": text}]


STEP = [
    *annotate("START"),
    *constant("w", 100),
    *call("matmul", ["w"], {"h": (40, -1)}, 2e9),
    *call("view", ["h"], {"v": (0, 0)}, 1e9),
    *copy("h2", "h"),
    {
        "INSTRUCTION": "MUTATE",
        "NAME": "relu_",
        "ARGS": ["h"],
        "MUTATE": [0],
        "TIME": 3e9,
    },
    *release("h"),
    *annotate("BACKWARD"),
    *call("split", ["v", "w"], {"a": (10, -1), "b": (30, -1)}, 5e9),
    *release("h2", "v"),
    *call("sum", ["a", "b"], {"s": (4, -1)}, 7e9),
    *release("a"),
    *copy("b", "s", "COPY_FROM"),
    *release("s"),
]


def write(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    text = text.replace(".0", "")
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


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
