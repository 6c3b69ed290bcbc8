"""A recorded step becomes the numbers that the native core reads."""

import gzip
import json
from random import Random

import pytest
from trace_cases import STEP
from trace_cases import call
from trace_cases import constant
from trace_cases import copy
from trace_cases import release
from trace_cases import write

from kmem.dtr.simulator import simulate
from kmem.dtr.trace import read_program

CONSTANT, CALL, RETAIN, RELEASE = range(4)


@pytest.mark.parametrize("name", ["step.log", "step.log.gz"])
def test_a_trace_becomes_numbers(tmp_path, name):
    program = read_program(write(tmp_path / name, STEP))
    assert program.num_operators == 5
    assert program.seconds == 18
    assert program.numbers.tolist() == [
        *(CONSTANT, 100),  # w is 0
        *(CALL, 2 * 10**9, 1, 0, 1, 40, -1),  # h is 1
        *(CALL, 10**9, 1, 1, 1, 40, 0),  # v is 2, a view
        *(RETAIN, 1),  # h2 is h
        *(CALL, 3 * 10**9, 1, 1, 1, 40, -1),  # h is 3 now, h2 is not
        *(RELEASE, 1),
        *(RELEASE, 3),
        *(CALL, 5 * 10**9, 2, 2, 0, 2, 10, -1, 30, -1),  # a, b are 4, 5
        *(RELEASE, 1),
        *(RELEASE, 2),
        *(CALL, 7 * 10**9, 2, 4, 5, 1, 4, -1),  # s is 6
        *(RELEASE, 4),
        *(RETAIN, 6),  # b is s
        *(RELEASE, 5),
        *(RELEASE, 6),
    ]


def test_what_changes_a_view_is_as_large_as_its_storage(tmp_path):
    lines = [
        *constant("w", 1),
        *call("matmul", ["w"], {"h": (40, -1)}, 0),
        *call("slice", ["h"], {"v": (10, 0)}, 0),
        {
            "INSTRUCTION": "MUTATE",
            "NAME": "add_",
            "ARGS": ["w", "v"],
            "MUTATE": [1],
            "TIME": 0,
        },
    ]
    program = read_program(write(tmp_path / "step.log", lines))
    assert program.numbers.tolist()[-10:] == [
        *(CALL, 0, 2, 0, 2, 1, 40, -1),
        *(RELEASE, 2),
    ]


MAKES_TWO = call("split", ["w"], {"a": (1, -1), "b": (1, -1)}, 1)


@pytest.mark.parametrize(
    "lines",
    [
        [{"INSTRUCTION": "CALL"}],
        release("nobody"),
        [{"INSTRUCTION": "DANCE"}],
        call("f", ["w"], {"a": (-1, -1)}, 1)[:2],
        call("f", ["w"], {"a": (1, 1)}, 1),
        call("f", ["w"], {"a": (1, -2)}, 1),
        call("f", ["w"], {"a": (1, -1)}, -1)[:1],
        call("f", ["w"], {"w": (1, -1)}, 1),
        copy("w", "w"),
        [*MAKES_TWO[:3], *release("w")],
        [*MAKES_TWO[:1], *MAKES_TWO[3:]],
        [{"INSTRUCTION": "ALIAS", "NAME": "w", "ALIAS": -1}],
        [constant("c", 1)[0], *constant("w", 1)[1:]],
        [constant("c", 1)[0], *release("w")],
    ],
)
def test_a_bad_line_is_named(tmp_path, lines):
    path = write(tmp_path / "bad.log", [*constant("w", 1), *lines])
    last = 2 + len(lines)
    with pytest.raises(ValueError, match=rf"bad\.log, line {last}: "):
        read_program(path)


@pytest.mark.parametrize("line", ["not JSON", "[]", "{}"])
def test_a_line_that_is_no_instruction_is_named(tmp_path, line):
    path = write(tmp_path / "bad.log", constant("w", 1))
    path.write_text(path.read_text(encoding="utf-8") + line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.log, line 3: "):
        read_program(path)


def test_a_trace_that_breaks_off_is_refused(tmp_path):
    path = tmp_path / "half.log"
    path.write_text(json.dumps(constant("w", 1)[0]), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"must end with a whole instruction.*half\.log"
    ):
        read_program(path)


MEMORY = '{"INSTRUCTION": "MEMORY", "NAME": "w", "MEMORY": %s}'
TAKES = '{"INSTRUCTION": "CALL", "NAME": "f", "RESULT": [], "ARGS": %s, %s}'


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"INSTRUCTION": ' * 100_000,
        *(MEMORY % x for x in ("Infinity", "-Infinity", "NaN", "null", "[]")),
        *(MEMORY % x for x in ("1e30", '"1e3"', "1" * 31, "1" * 5000, "-1")),
        *(TAKES % ('["w"]', f'"TIME": {x}') for x in ("Infinity", 10**30)),
        *(TAKES % (x, '"TIME": 1') for x in ('"w"', '[["w"]]', "null", "{}")),
        TAKES.replace("[]", '"ab"') % ('["w"]', '"TIME": 1'),
        '{"INSTRUCTION": "CONSTANT", "NAME": null}',
        '{"INSTRUCTION": "COPY", "SRC": "w", "DST": 5}',
        '{"INSTRUCTION": "MUTATE", "NAME": "f", "ARGS": ["w"], "TIME": 1, '
        '"MUTATE": [-1]}',
        "null",
        '"INSTRUCTION"',
        "",
    ],
    ids=lambda line: line[:60],
)
def test_a_line_of_wrong_types_or_numbers_is_named(tmp_path, line):
    path = tmp_path / "bad.log"
    first = [json.dumps(each) for each in constant("w", 1)]
    path.write_text("\n".join([*first, line, "{}"]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.log, line 3: "):
        read_program(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("half.log.gz", gzip.compress(b"{}\n" * 1000)[:-20]),
        ("none.log.gz", b"{}"),
        ("cut.log.gz", gzip.compress(b"{}")[:3]),
        ("changed.log.gz", gzip.compress(b"{}")[:10] + b"\xff" * 20),
        (
            "other.log",
            "\N{LATIN SMALL LETTER U WITH DIAERESIS}".encode("latin1"),
        ),
        ("wide.log", '{"INSTRUCTION": "ANNOTATE"}'.encode("utf-16")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=name) as caught:
        read_program(path)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("name", ["step.log", "step.log.gz"])
def test_a_trace_with_random_changes_is_read_or_refused(
    native_library, tmp_path, name
):
    random = Random(0)
    path = write(tmp_path / name, STEP)
    whole, num_read = path.read_bytes(), 0
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(content))
            what = random.randrange(4)
            if what == 0:
                content[at] = random.randrange(256)
            elif what == 1:
                content[at:at] = random.choice([b"9", b'"', b"-", b"[", b"\n"])
            elif what == 2:
                del content[at : at + random.randrange(9)]
            else:
                del content[at:]
            content = content or bytearray(b"\n")
        path.write_bytes(content)
        try:
            program = read_program(path)
        except ValueError as error:
            assert name in str(error)
        else:
            num_read += 1
            assert simulate(program).num_evictions == 0
    assert num_read > 0
