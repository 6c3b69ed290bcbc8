"""Runs code in processes that have imported TensorFlow and Keras already.

To import them takes longer than most of what a test runs in a process of its
own. A server imports them once, runs no operation, and is forked for each run.
"""

import gc
import multiprocessing
import os
import pathlib
import sys
import tempfile
import types

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tensorflow", "keras"])
# Ends a process that hangs, however busy the machine is.
SECONDS = 1200


def run(
    code: str, environment: dict[str, str], argv: tuple[str, ...] = ("-c",)
) -> tuple[int, str, str]:
    """Runs code as `python -c` would.

    Args:
        code: The source.
        environment: All of its environment variables.
        argv: What it finds in `sys.argv`.

    Returns:
        The exit status, standard output and standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder, name) for name in ("output", "errors")]
        arguments = code, environment, argv, paths
        process = _context.Process(target=_run, args=arguments)
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        output, errors = (path.read_text() for path in paths)
        return process.exitcode, output, errors


def _run(code, environment, argv, paths) -> None:
    gc.freeze()  # TensorFlow and Keras: what is not collected is not copied.
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = argv
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))
