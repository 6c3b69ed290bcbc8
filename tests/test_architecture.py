"""Imports point one way, and kmem stays small: read from the sources."""

import ast
import graphlib
import importlib.metadata
import importlib.util
import pathlib
import re

import pytest

# From low to high: folders of `kmem/`, and the modules at its top. What stands
# in one of them imports only what stands before it, or in the same folder.
ROOMS = (
    "base",
    "memory",
    "launching",
    "optimizers",
    "planning",
    "options",
    "graph",
    "remat",
    "step",
    "precision",
    "losses",
    "attention",
    "keras_graph",
    "dtr",
    "sharding",
    "distributed",
    "fit",
    "budget",
    "multilevel",
    "callbacks",
    "model",
    "reporting",
    "commands",
    "__init__",
    "__main__",
)
RANK = {name: rank for rank, name in enumerate(ROOMS)}

MAX_TOP_FILES = 9
MAX_MODULES = 157
MAX_FILE_LINES = 400
# A budget makes every addition ask what it is worth, and whether something
# can go. Raise it in the change that needs it, and say why there.
# The last ones: programs whose layers gather their weights
# (multilevel/workers.py), images in tiles (remat/tiles.py, planning/tiles.py),
# labels with marks (step/examples.py); what foreign code showed to be wrong
# without a word: tensors that layers leave on themselves (remat/state.py),
# losses and layers that were not tried (step/comparing.py), random numbers of
# steps that are taken again (fit/undoing.py), what Keras puts on tensors
# (remat/structure.py).
MAX_TOTAL_LINES = 33757

FRAMEWORKS = {"tensorflow", "keras"}
# What is private in them is imported, and touched, by these alone.
DOORS = {"kmem.base.private_keras", "kmem.base.private_tf"}
_PRIVATE_MODULES = re.compile(r"(keras\.src|(tf|tensorflow)\.python)\b")
_PRIVATE_NAME = re.compile(r"_(?!_|kmem)\w*[^\W_]\w*|__internal__")
# Python's own: of a named tuple, and of modules.
_OF_PYTHON = {"_replace", "_getframe", "_exit"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Heavy or optional: imported by the function that needs them.
ONLY_IN_FUNCTIONS = {"matplotlib"}


def read_sources() -> dict[str, str]:
    """Dotted module name -> source, of the package that is installed."""
    spec = importlib.util.find_spec("kmem")
    root = pathlib.Path(spec.origin).parent
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 2:
            parts = parts[:-1]
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources


SOURCES = read_sources()


def room(module: str) -> str:
    """`kmem.planning.graph` -> `planning`; `kmem` itself is `__init__`."""
    return (module.split(".") + ["__init__"])[1]


def imported_names(tree: ast.AST, functions: bool = True) -> list[str]:
    """Dotted names that a module imports; those that it runs at its top
    only, without `functions`."""
    names = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [f"{base}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and "import" in ast.unparse(node.func).split(".")[-1]
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            names.append(str(node.args[0].value))
        if functions or not (
            isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            or is_for_types(node)
        ):
            names += imported_names(node, functions)
    return names


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(
        node.test
    )


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of kmem that it imports."""
    graph = {}
    for module, source in sources.items():
        graph[module] = set()
        for name in imported_names(ast.parse(source)):
            if name.split(".")[0] != "kmem":
                continue
            # `from kmem.base.sizes import parse_size` imports the module; a
            # name that no module has comes from the package's own __init__.
            while name not in sources and "." in name:
                name = name.rpartition(".")[0]
            target = "kmem.__init__" if name == "kmem" else name
            if target != module:
                graph[module].add(target)
    return graph


def direction_violations(sources: dict[str, str]) -> list[str]:
    found = []
    for module, source in sources.items():
        if room(module) not in RANK:
            found.append(f"{module} has no room: place it in ROOMS")
        for name in imported_names(ast.parse(source)):
            if name.startswith("."):
                found.append(f"{module} imports {name}: write it in full")
    if found:
        return found
    graph = import_graph(sources)
    found = [
        f"{module} imports {target}, a higher room"
        for module, targets in graph.items()
        for target in targets
        if RANK.get(room(target), -1) > RANK[room(module)]
    ]
    # Within a folder the order is free, but not a circle.
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"modules in a circle: {' <- '.join(error.args[1])}")
    return found


def framework_violations(sources: dict[str, str]) -> list[str]:
    """What `planning/` imports, or what that imports, must be plain."""
    graph = import_graph(sources)
    waiting = [name for name in sources if room(name) == "planning"]
    seen, found = set(waiting), []
    while waiting:
        module = waiting.pop()
        for name in imported_names(ast.parse(sources[module])):
            if name.split(".")[0] in FRAMEWORKS:
                found.append(f"planning reaches {name} by way of {module}")
        new = (graph[module] & sources.keys()) - seen
        seen |= new
        waiting += new
    return found


def private_names(tree: ast.AST) -> list[tuple[ast.expr, str]]:
    """What may be private somewhere: attributes, and strings such as those
    that `getattr` is given, but for parts of longer ones."""
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    found = []
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            name = node.value
        if isinstance(name, str) and _PRIVATE_NAME.fullmatch(name):
            found.append((node, name))
    return found


def own_names(tree: ast.AST) -> set[str]:
    """What a module defines itself, of its classes and their objects too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_self(node.value)
        ):
            names.add(node.attr)
    return names


def is_self(node: ast.AST) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")


def private_violations(sources: dict[str, str]) -> list[str]:
    trees = {name: ast.parse(source) for name, source in sources.items()}
    at_doors = {
        name
        for module in DOORS & trees.keys()
        for _, name in private_names(trees[module])
        if name not in _OF_PYTHON
    }
    own = {module: own_names(tree) for module, tree in trees.items()}
    of_kmem = set().union(*own.values()) | _OF_PYTHON
    found = []
    for module, tree in trees.items():
        if module in DOORS:
            continue
        touched = imported_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                touched.append(ast.unparse(node))
            if isinstance(node, ast.ClassDef):
                found += [
                    f"{module} overrides {each.name}, which a door touches"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                    and each.name in at_doors
                ]
        for name in touched:
            if _PRIVATE_MODULES.match(name):
                found.append(f"{module} reaches {name} past the doors")
        for node, name in private_names(tree):
            inherits = isinstance(node, ast.Attribute) and is_self(node.value)
            if name not in (of_kmem if inherits else own[module] | _OF_PYTHON):
                found.append(
                    f"{module}, line {node.lineno}: {name} is private "
                    "somewhere else: it goes through a door"
                )
    return found


def top_level_violations(sources: dict[str, str]) -> list[str]:
    return [
        f"{module} imports {name} at its top: import it where it is used"
        for module, source in sources.items()
        for name in imported_names(ast.parse(source), functions=False)
        if name.split(".")[0] in ONLY_IN_FUNCTIONS
    ]


def is_folder(module: str, sources: dict[str, str]) -> bool:
    return any(name.startswith(f"{module}.") for name in sources)


def size_violations(sources: dict[str, str]) -> list[str]:
    lines = {name: len(text.splitlines()) for name, text in sources.items()}
    found = [
        f"{name} has {count} lines, more than {MAX_FILE_LINES}"
        for name, count in lines.items()
        if count > MAX_FILE_LINES
    ]
    if len(sources) > MAX_MODULES:
        found.append(
            f"kmem has {len(sources)} modules, more than {MAX_MODULES}"
        )
    # A folder shows by a module that lies in it.
    top = [name for name in sources if name.count(".") == 1]
    top = [name for name in top if not is_folder(name, sources)]
    if len(top) > MAX_TOP_FILES:
        found.append(f"kmem has {len(top)} files at its top: {sorted(top)}")
    total = sum(lines.values())
    if total > MAX_TOTAL_LINES:
        found.append(f"kmem has {total} lines, more than {MAX_TOTAL_LINES}")
    return found


def ascii_violations(sources: dict[str, str]) -> list[str]:
    return [
        f"{module}, line {number}: not ASCII: {line.strip()}"
        for module, source in sources.items()
        for number, line in enumerate(source.splitlines(), 1)
        if not line.isascii()
    ]


CHECKS = (
    direction_violations,
    framework_violations,
    private_violations,
    top_level_violations,
    size_violations,
    ascii_violations,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_kmem_has_no(check):
    assert check(SOURCES) == []


@pytest.mark.parametrize(
    "check, sources, message",
    [
        (
            direction_violations,
            {
                "kmem.base.sizes": "def f():\n import kmem.model",
                "kmem.model": "",
            },
            "kmem.base.sizes imports kmem.model, a higher room",
        ),
        (
            direction_violations,
            {"kmem.base.sizes": "from kmem import Model", "kmem.__init__": ""},
            "kmem.base.sizes imports kmem.__init__, a higher room",
        ),
        (
            direction_violations,
            {
                "kmem.base.sizes": "import importlib\n"
                "importlib.import_module('kmem.commands.cli')",
                "kmem.commands.cli": "",
            },
            "kmem.base.sizes imports kmem.commands.cli, a higher room",
        ),
        (
            direction_violations,
            {
                "kmem.base.sizes": "from kmem.base import native",
                "kmem.base.native": "from kmem.base.sizes import parse_size",
            },
            "modules in a circle: ",
        ),
        (
            direction_violations,
            {"kmem.utils": ""},
            "kmem.utils has no room: place it in ROOMS",
        ),
        (
            direction_violations,
            {"kmem.base.sizes": "from .model import Model"},
            "kmem.base.sizes imports .model.Model: write it in full",
        ),
        (
            framework_violations,
            {
                "kmem.planning.graph": "from kmem import memory",
                "kmem.memory": "def f():\n import tensorflow as tf",
            },
            "planning reaches tensorflow by way of kmem.memory",
        ),
        (
            private_violations,
            {"kmem.fit.session": "from keras.src.backend import common"},
            "kmem.fit.session reaches keras.src.backend.common past the doors",
        ),
        (
            private_violations,
            {"kmem.memory": "def f():\n import tensorflow.python.client"},
            "kmem.memory reaches tensorflow.python.client past the doors",
        ),
        (
            private_violations,
            {"kmem.graph.names": "x = tf.python.eager.context"},
            "kmem.graph.names reaches tf.python.eager.context past the doors",
        ),
        (
            private_violations,
            {"kmem.graph.names": "x = tf.__internal__.FuncGraph"},
            "kmem.graph.names, line 1: __internal__ is private somewhere else",
        ),
        (
            private_violations,
            {"kmem.fit.session": "def f(m):\n return m._functional"},
            "kmem.fit.session, line 2: _functional is private somewhere else",
        ),
        (
            private_violations,
            {"kmem.fit.session": "with attribute(v, '_value', 1): pass"},
            "kmem.fit.session, line 1: _value is private somewhere else",
        ),
        (
            private_violations,
            {
                "kmem.fit.session": "class V(keras.Variable):\n"
                " def f(self): self._maybe_autocast()"
            },
            "kmem.fit.session, line 2: _maybe_autocast is private",
        ),
        (
            private_violations,
            {
                "kmem.base.private_keras": "x = v._value",
                "kmem.fit.session": "class V(keras.Variable):\n"
                " def _value(self): pass",
            },
            "kmem.fit.session overrides _value, which a door touches",
        ),
        (
            top_level_violations,
            {"kmem.report": "try:\n import matplotlib.pyplot\nfinally: pass"},
            "kmem.report imports matplotlib.pyplot at its top",
        ),
        (
            size_violations,
            {"kmem.base.sizes": "\n" * (MAX_FILE_LINES + 1)},
            f"kmem.base.sizes has {MAX_FILE_LINES + 1} lines",
        ),
        (
            size_violations,
            {f"kmem.m{i}": "\n" * 300 for i in range(MAX_TOTAL_LINES // 250)},
            f"kmem has {MAX_TOTAL_LINES // 250 * 300} lines, more than",
        ),
        (
            size_violations,
            {f"kmem.m{i}": "" for i in range(MAX_TOP_FILES + 1)},
            f"kmem has {MAX_TOP_FILES + 1} files at its top",
        ),
        (
            size_violations,
            {f"kmem.base.m{i}": "" for i in range(MAX_MODULES + 1)},
            f"kmem has {MAX_MODULES + 1} modules, more than {MAX_MODULES}",
        ),
        (
            ascii_violations,
            {"kmem.base.sizes": "# \N{MULTIPLICATION SIGN}"},
            "kmem.base.sizes, line 1: not ASCII",
        ),
    ],
)
def test_a_made_up_violation_is_found(check, sources, message):
    assert re.search(re.escape(message), "\n".join(check(sources)))


def test_what_is_allowed_is_not_a_violation():
    sources = {
        "kmem.__init__": "from kmem.base import versions\nimport kmem.model",
        "kmem.base.versions": "import tensorflow",
        "kmem.model": "from kmem.planning import graph",
        "kmem.planning": "from kmem.planning.graph import Node",
        "kmem.planning.graph": "from kmem.base.sizes import parse_size",
        "kmem.base.sizes": "def f():\n import matplotlib",
        "kmem.base.private_tf": "from tensorflow.python.eager import context\n"
        "x = op._update_input",
        "kmem.fit.session": "class A:\n def __init__(self): self._own = 1\n"
        " def __eq__(self, other): return f'{self}_x' and other._own\n"
        "x = getattr(model, '_kmem_session')",
        "kmem.fit.monitor": "class B(A):\n def f(self): return self._own",
    }
    for check in CHECKS:
        assert check(sources) == []


def test_the_installed_package_is_the_one_that_is_tested():
    distribution = importlib.metadata.distribution("kmem")
    installed = pathlib.Path(str(distribution.locate_file("kmem/__init__.py")))
    # An editable installation has no such file: there, the checkout is it.
    if installed.exists():
        origin = importlib.util.find_spec("kmem").origin
        assert installed.samefile(origin)
