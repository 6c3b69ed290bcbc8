"""An environment of its own for PyTorch: neither kmem nor its tests need it."""

import contextlib
import pathlib
import subprocess
import tempfile
import venv

TORCH = "torch==2.13.0"


@contextlib.contextmanager
def environment(python=None, betty=None):
    """The Python of an environment that has PyTorch.

    Args:
        python: That of one which is there; else one is made, and deleted in
            the end.
        betty: What pip installs Betty from, if that is wanted.
    """
    if python:
        yield python
        return
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = pathlib.Path(folder, "bin", "python")
        install = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, TORCH, "numpy"], check=True)
        if betty:
            # It asks for an older Python, and for loggers that are not used.
            install += ["--no-deps", "--ignore-requires-python"]
            subprocess.run([*install, betty], check=True)
        yield python
