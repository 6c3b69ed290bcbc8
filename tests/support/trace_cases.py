"""Recorded steps to read, and what they are written with."""

import gzip
import json


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


def training_step(num_layers, num_bytes=10, nanoseconds=100):
    """A chain forward, and backward through all that it saved."""
    lines = constant("x0", num_bytes)
    for i in range(num_layers):
        made = {f"x{i + 1}": (num_bytes, -1)}
        lines += call("forward", [f"x{i}"], made, nanoseconds)
    gradient = f"x{num_layers}"
    for i in range(num_layers - 1, 0, -1):
        made = {f"g{i}": (num_bytes, -1)}
        lines += call("backward", [gradient, f"x{i}"], made, nanoseconds)
        lines += release(gradient, f"x{i}")
        gradient = f"g{i}"
    return lines
