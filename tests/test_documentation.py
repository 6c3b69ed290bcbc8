"""What README, docs/ and the docstrings show is run, and holds.

A Markdown file's Python blocks are one program, from top to bottom; so are a
docstring's. An expression followed by a literal, as in `1 + 1  # 2`, must have
that value. A block below `<!-- not run: reason -->` is not run.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import itertools
import pathlib
import re
import shlex

import pytest
from versions import IS_KERAS_3_12

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Where there is a GPU, which Keras compiles models for by default.
pytestmark = pytest.mark.filterwarnings("ignore:Training steps run without XLA")
SET_UP = (
    'pip install ".[demo]" && kmem demo',
    'pip install ".[test]" && pytest',
)

FENCE = re.compile(
    r"(?P<skip>^ *<!-- *not run *:?(?P<reason>[^\n]*?)-->\s*?\n)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(?:#[^)\s]*)?\)")


@dataclasses.dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    reason: str | None = None


def find_blocks(text: str) -> list[Block]:
    """The fenced blocks of a text, with the line at which each one starts."""
    blocks = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        code = "".join(
            line[indent:] if line.strip() else "\n"
            for line in match["code"].splitlines(keepends=True)
        )
        line = text.count("\n", 0, match.start("code")) + 1
        reason = match["reason"].strip() if match["skip"] else None
        if reason == "":
            raise ValueError(f"line {line}: `not run` needs a reason")
        blocks.append(Block(match["language"], code, line, reason))
    return blocks


def run_block(block: Block, namespace: dict, path: str) -> None:
    """Runs a block, and compares expressions with the literals beside them."""
    # Tracebacks then name the line of the file, not of the block.
    source = "\n" * (block.line - 1) + block.code
    lines = source.splitlines()
    for node in ast.parse(source, path).body:
        if not isinstance(node, ast.Expr):
            module = ast.Module([node], type_ignores=[])
            exec(compile(module, path, "exec"), namespace)
            continue
        value = eval(
            compile(ast.Expression(node.value), path, "eval"), namespace
        )
        beside = lines[node.end_lineno - 1].encode()[node.end_col_offset :]
        comment = re.fullmatch(r"\s*#\s*(.+)", beside.decode())
        if comment is None or value is None:
            continue
        with contextlib.suppress(ValueError, SyntaxError):
            shown = ast.literal_eval(comment[1])
            assert value == shown, f"{path}, line {node.lineno}"


def run_python(text: str, path: str, namespace: dict) -> None:
    namespace["__name__"] = "__main__"
    for block in find_blocks(text):
        if block.language == "python" and block.reason is None:
            run_block(block, namespace, path)


def markdown_files() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def all_markdown_files() -> list[pathlib.Path]:
    """With those whose Python is not meant to be run."""
    return [*markdown_files(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def markdown_name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def public_docstrings() -> list:
    """(text, name) of each public docstring of kmem with a Python block."""
    root = pathlib.Path(importlib.util.find_spec("kmem").origin).parent
    found = []

    def visit(node, name):
        text = ast.get_docstring(node)
        if text and any(b.language == "python" for b in find_blocks(text)):
            found.append(pytest.param(text, name, id=name))
        for child in ast.iter_child_nodes(node):
            if isinstance(
                child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            ) and (not child.name.startswith("_") or child.name == "__init__"):
                visit(child, f"{name}.{child.name}")

    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        visit(ast.parse(path.read_text(encoding="utf-8")), ".".join(parts))
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a text's console blocks, and the inline `kmem ...`."""
    lines = []
    for block in find_blocks(text):
        if block.language in ("console", "bash"):
            code = block.code.replace("\\\n", " ")
            # In a console block, a line without a prompt is output.
            prompted = re.findall(r"^\$ (.*)", code, re.MULTILINE)
            lines += prompted or code.splitlines()
    words = []
    for line in lines:
        parts = re.split(r"&&|\|\||[;|]", line)
        words += [shlex.split(part, comments=True) for part in parts]
    inline = re.findall(r"(?<!`)`(kmem [^`\n]+)`(?!`)", text)
    words += [inside.split() for inside in inline]
    # `VARIABLE=value command`: the command alone.
    stripped = (
        list(itertools.dropwhile(lambda word: "=" in word, command))
        for command in words
    )
    return [command for command in stripped if command]


def assert_command_exists(command: list[str]) -> None:
    if command[:1] == ["kmem"]:
        from kmem.commands.cli import main

        subcommand = [word for word in command[1:2] if word != "--help"]
        try:
            status = main([*subcommand, "--help"])
        except SystemExit as stop:
            status = stop.code
        assert not status, f"`{' '.join(command)}` is not a command"
    if command[:1] in (["python"], ["python3"]):
        for word in command[1:]:
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), f"{word} does not exist"


@pytest.fixture
def quiet_keras(monkeypatch):
    """No progress bars; the global settings that a text changes, restored."""
    import keras

    import kmem

    for name in (
        *("eviction_threshold", "evictee_minimum_size"),
        *("enable_sqrt_sampling", "heuristic"),
    ):
        monkeypatch.setattr(kmem.dtr, name, getattr(kmem.dtr, name))
    interactive = keras.config.is_interactive_logging_enabled()
    policy = keras.config.dtype_policy()
    keras.config.disable_interactive_logging()
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy(policy)
    if interactive:
        keras.config.enable_interactive_logging()


def skip_without_native_library(text: str) -> None:
    from kmem.base import native

    if re.search(r"kmem\.memory|MemoryMonitor", text):
        if not native.is_registered():
            pytest.skip("needs the native library, or a compiler")


@pytest.mark.parametrize("path", markdown_files(), ids=markdown_name)
def test_python_of_a_page_runs(path, quiet_keras, tmp_path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    skip_without_native_library(text)
    if "filters=" in text and IS_KERAS_3_12:
        pytest.skip("the page says that it is for Keras 3.13 or later")
    monkeypatch.chdir(tmp_path)
    run_python(text, str(path), {})


@pytest.mark.parametrize("text, name", public_docstrings())
def test_example_of_a_docstring_runs(
    text, name, quiet_keras, tmp_path, monkeypatch
):
    skip_without_native_library(text)
    monkeypatch.chdir(tmp_path)
    run_python(text, f"<docstring of {name}>", {})


@pytest.mark.parametrize("path", all_markdown_files(), ids=markdown_name)
def test_commands_of_a_page_exist(path, capsys):
    for command in commands(path.read_text(encoding="utf-8")):
        assert_command_exists(command)


@pytest.mark.parametrize("path", all_markdown_files(), ids=markdown_name)
def test_links_of_a_page_lead_somewhere(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    missing = [
        link for link in LINK.findall(text) if not (path.parent / link).exists()
    ]
    assert missing == []


def test_readme_sets_up_with_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Set-up\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    lines = [
        line
        for block in find_blocks(section[1])
        for line in block.code.splitlines()
        if line and not line.startswith("#")
    ]
    assert tuple(lines) == SET_UP


def test_readme_and_the_first_page_lead_to_every_page():
    first_pages = [ROOT / "README.md", ROOT / "docs/index.md"]
    linked = {
        (page.parent / link).resolve()
        for page in first_pages
        for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert first_pages[1] in linked
    assert set(markdown_files()) - linked == {ROOT / "README.md"}


def quoted_messages() -> list[str]:
    """The errors that the page on troubleshooting has, in text blocks."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    blocks = find_blocks(text)
    return [b.code.strip() for b in blocks if b.language == "text"]


def messages_of_kmem() -> str:
    """The sources, with strings that are joined written as one."""
    package = pathlib.Path(importlib.util.find_spec("kmem").origin).parent
    paths = [*package.rglob("*.py"), *(ROOT / "custom_ops").rglob("*.cc")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    joined = re.sub(r"([\"'])\s*f?\1", "", text)
    return joined.replace("\\\n", "")


def test_troubleshooting_quotes_messages_that_exist():
    sources = messages_of_kmem()
    of_tensorflow = (
        "OOM when allocating tensor with shape[...] and type float",
        "Collective ops is aborted by: ...",
    )
    unknown = [
        part
        for message in quoted_messages()
        if not message.startswith(of_tensorflow)
        for part in map(str.strip, message.split("..."))
        if part.strip("`'. ") and part not in sources
    ]
    assert unknown == []


def page(*lines: str) -> str:
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "text, error, message",
    [
        (page("```python", "1 + 1  # 3", "```"), AssertionError, "line 2"),
        (page("```python", "1 / 0", "```"), ZeroDivisionError, "division"),
        (
            page("```python", "x = 1", "```", "", "```python", "y", "```"),
            NameError,
            "'y'",
        ),
        (
            page("<!-- not run: -->", "```python", "1 / 0", "```"),
            ValueError,
            "needs a reason",
        ),
    ],
    ids=["value", "exception", "unknown name", "no reason"],
)
def test_a_wrong_page_fails(text, error, message):
    with pytest.raises(error, match=message):
        run_python(text, "page.md", {})


@pytest.mark.parametrize(
    "text",
    [
        page("```python", "x = 1", "```", "", "```python", "x  # 1", "```"),
        page("```python", "1 + 1  # two, in words", "```"),
        page("<!-- not run: takes hours -->", "```python", "1 / 0", "```"),
        page("   ```python", "   if True:", "       x = 1", "   ```"),
    ],
    ids=["one program", "words", "not run", "indented"],
)
def test_a_right_page_passes(text):
    run_python(text, "page.md", {})


def test_commands_are_read_from_console_blocks_and_inline():
    text = page(
        "Then `kmem info`.",
        "```console",
        "$ KMEM_CXX=clang++ kmem build && python examples/a.py --rows 3",
        "what it prints",
        "```",
    )
    assert commands(text) == [
        ["kmem", "build"],
        ["python", "examples/a.py", "--rows", "3"],
        ["kmem", "info"],
    ]
    with pytest.raises(AssertionError, match=r"examples/a.py does not exist"):
        assert_command_exists(["python", "examples/a.py"])
