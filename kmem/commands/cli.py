"""The `kmem` command.

Help is told, and the command line read, without TensorFlow, Keras or NumPy:
the functions that do the work import what they need.
"""

import argparse
import importlib
import importlib.metadata
import platform
import sys

from kmem.base import building
from kmem.base import cache
from kmem.base import native
from kmem.base import versions
from kmem.base.sizes import format_size

# Commands that live in a module of their own, such as commands/demo.py, or
# in one about the same: it provides `add_demo(parser)`, which adds arguments
# and says by `parser.set_defaults(run=...)` what runs, and imports like this
# one.
_MODULES = {
    "demo": "Train the same model with and without kmem, and compare.",
    "estimate": "Tell what a saved model's training step is going to need.",
    "largest-batch": "Find the largest batch with which a saved model trains.",
    "launch": "Run a script in several processes that train one model.",
    "plan": "Plan what a saved model's training step recomputes.",
    "report": "Choose options for a saved model and a budget, and draw why.",
    "simulate": "Simulate DTR on a recorded step, under a budget.",
    "sweep": "Measure what DTR costs a saved model at several thresholds.",
}
_ABOUT_MODELS = ("estimate", "largest-batch", "plan", "report", "sweep")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: it worked. 1, or what the error has as `exit_code`: it did not, and
    standard error says why. 2: the command line is wrong, or a file that it
    names.
    """
    parser = _parser(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        if args.command in _MODULES:
            # What `import kmem` does in other programs.
            versions.check()
            native.prepare()
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except _expected() as error:
        print(f"kmem {args.command}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kmem",
        description="Train Keras models in less memory.",
        epilog="Example: kmem info",
    )
    parser.add_argument(
        "--version", action="version", version=f"kmem {versions.__version__}"
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND"
    )

    def add(name, run, text: str, more: str, example: str):
        command = commands.add_parser(
            name,
            help=f"{text}.",
            description=f"{text}{more}",
            epilog=f"Example: kmem {example}",
        )
        command.set_defaults(run=run)
        return command

    text = "Show versions, devices and the state of the native library"
    add("info", _info, text, ": what a bug report needs.", "info")
    text = "Compile the native library now rather than at the next import"
    more = ". It needs a C++ compiler: $CXX, g++ or clang++."
    build = add("build", _build, text, more, "build --force")
    force = "Compile even if that has been done."
    build.add_argument("--force", action="store_true", help=force)
    text = "Show, or clear, what kmem keeps on disk"
    more = (
        ": the native library, as it was compiled for each TensorFlow, and "
        "what `memory_budget` chose. KMEM_CACHE=0: that is chosen anew."
    )
    cached = add("cache", _cache, text, more, "cache clear")
    cached.add_argument("action", nargs="?", choices=("show", "clear"))

    for name, text in _MODULES.items():
        command = commands.add_parser(name, help=text, description=text)
        # Such a module is imported only when its command is asked for.
        if argv[:1] == [name]:
            own = name.replace("-", "_")
            module = "models" if name in _ABOUT_MODELS else own
            implementation = importlib.import_module(f"kmem.commands.{module}")
            getattr(implementation, f"add_{own}")(command)
    return parser


def _expected() -> tuple[type[Exception], ...]:
    """Errors whose message is for the user; any other one is kmem's own."""
    import tensorflow as tf

    return ImportError, OSError, RuntimeError, ValueError, tf.errors.OpError


def _build(args: argparse.Namespace) -> int:
    was_built = building.find_library() is not None
    path = building.build(force=args.force)
    print("already built:" if was_built and not args.force else "built:", path)
    return 0


def _cache(args: argparse.Namespace) -> int:
    before = cache.files()
    if args.action == "clear":
        cache.clear()
        print(f"removed {len(before) - len(cache.files())} files of", end=" ")
    print(cache.folder())
    for path in cache.files():
        print(f"{format_size(path.stat().st_size):>12} {path.name}")
    return 0


def _info(args: argparse.Namespace) -> int:
    import keras
    import numpy as np
    import tensorflow as tf

    native.prepare(builds=False)
    devices = [each.name for each in tf.config.list_physical_devices()]
    devices = [name.removeprefix("/physical_device:") for name in devices]
    allocator = "TensorFlow's own: kmem.memory cannot count on the CPU"
    if native.is_registered():
        allocator = "kmem's: kmem.memory counts and limits the CPU's memory"
    rows = [
        ("kmem", versions.__version__),
        ("TensorFlow", tf.__version__),
        ("Keras", keras.__version__),
        ("NumPy", np.__version__),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.machine()}"),
        ("matplotlib", _version("matplotlib")),
        ("devices", ", ".join(devices)),
        ("compiler", _compiler()),
        ("cache folder", cache.folder()),
        ("native library", _library()),
        ("allocator", allocator),
    ]
    for name, value in rows:
        print(f"{name:<15} {value}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    try:
        return " ".join(building.find_compiler() or ["none found"])
    except building.NativeLibraryError as error:
        return str(error)


def _library() -> str:
    try:
        return str(building.find_library() or "not built (run `kmem build`)")
    except building.NativeLibraryError as error:
        return str(error)
