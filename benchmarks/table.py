"""The file that a benchmark writes: how it was made, and a table."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys


def made_by(script, packages=("kmem", "tensorflow", "keras")):
    """When, on what and by which script a table was made."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in packages
    )
    return (
        f"{datetime.date.today()}; {platform.machine()}, {os.cpu_count()} "
        f"cores, {_gpus()}; {versions}; Python {platform.python_version()}. "
        f"Made by `benchmarks/{pathlib.Path(script).name}`."
    )


def _gpus():
    try:
        import tensorflow as tf
    except ModuleNotFoundError:
        return "no GPU"  # PyTorch's environments, which train on the CPU

    names = [
        tf.config.experimental.get_device_details(gpu)["device_name"]
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    return ", ".join(names) or "no GPU"


def add_output(parser):
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help="a file for the table; one that exists is added to",
    )


def writer(output, header):
    """A function that shows a text, and adds it to the file if there is one.

    A new file begins with the header.
    """

    def write(text):
        print(text, end="", flush=True)
        if output:
            with output.open("a", encoding="utf-8") as file:
                file.write(text)

    if not (output and output.exists()):
        write(header)
    return write


def lines_of(script, *arguments):
    """The lines that a script prints, in a process in which nothing else is
    in memory."""
    command = [sys.executable, script, *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True
    ) as process:
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
