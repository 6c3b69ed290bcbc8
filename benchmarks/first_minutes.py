"""What a newcomer waits for: set-up, the demonstration, the commands.

    python benchmarks/first_minutes.py --output benchmarks/first_minutes.md

It makes a virtual environment, an empty cache folder and an installation of its
own, and times each step of the README there as a whole process. Set-up depends
on what pip has in its cache, and on the network.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from table import add_output
from table import made_by
from table import writer

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
NOTEBOOK = ROOT / "examples" / "notebooks" / "where_the_memory_goes.ipynb"
HEADER = """\
# What a newcomer waits for

{made_by}

A fresh virtual environment and an empty cache of kmem, pip with what it had in
its cache; each step is a whole process, in this order. User: seconds of the
processor, of all cores.

| step | seconds | user |
|---|---|---|
"""


def first_example():
    """The README's first block of Python."""
    text = README.read_text(encoding="utf-8")
    return text.split("```python\n")[1].split("```")[0]


def steps(folder):
    """Gives what each step is called, and its command."""
    bin_folder = folder / "venv" / "bin"
    python, kmem = str(bin_folder / "python"), str(bin_folder / "kmem")
    script = folder / "first.py"
    script.write_text(first_example())
    yield "a virtual environment", [sys.executable, "-m", "venv", "venv"]
    install = [python, "-m", "pip", "install", "-q", f"{ROOT}[demo]"]
    yield '`pip install ".[demo]"`', install
    yield "`kmem --help`, for the first time", [kmem, "--help"]
    yield "`kmem --help`", [kmem, "--help"]
    yield "`kmem build`: compiles the native library", [kmem, "build"]
    yield "`kmem demo`", [kmem, "demo"]
    yield "README's first example", [python, str(script)]
    tensorflow = "import tensorflow, keras"
    yield "`import tensorflow, keras`", [python, "-c", tensorflow]
    yield (
        "`import tensorflow, keras, kmem`",
        [python, "-c", f"{tensorflow}, kmem"],
    )
    install = [python, "-m", "pip", "install", "-q", f"{ROOT}[test]"]
    yield '`pip install ".[test]"`, beside it', install
    execute = [python, "-m", "jupyter", "execute", str(NOTEBOOK)]
    yield f"the notebook `{NOTEBOOK.name}`", execute


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser)
    arguments = parser.parse_args()
    write = writer(arguments.output, HEADER.format(made_by=made_by(__file__)))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR")
            or str(pathlib.Path.home() / ".cache" / "pip"),
            "MPLBACKEND": "Agg",
        }
        environment.pop("PYTHONPATH", None)
        for title, command in steps(folder):
            before, start = os.times(), time.perf_counter()
            subprocess.run(
                command,
                cwd=folder,
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            seconds = time.perf_counter() - start
            user = os.times().children_user - before.children_user
            write(f"| {title} | {seconds:.1f} | {user:.1f} |\n")


if __name__ == "__main__":
    main()
