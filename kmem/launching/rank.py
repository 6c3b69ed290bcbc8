"""The first code of a process that a launch starts: one rank of several.

Python runs this file itself. It imports nothing of kmem, and with it
TensorFlow, before the process is in its network: one with several threads may
not enter another. Then it runs a script as `python script.py` would, or calls
a function as `multiprocessing` would, and reports how that ended.
"""

import ctypes
import errno
import io
import os
import pickle
import socket
import sys
import time
import traceback
import types
from multiprocessing import spawn
from multiprocessing.connection import Connection

_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH)
_NO_INTERNET = (
    "The processes have a network of their own, without the internet. Load "
    "what they need before, or start them in the host's network: "
    '`network="host"`, `kmem launch --network host`.'
)


def main() -> None:
    report_descriptor, task_descriptor, *namespaces = map(int, sys.argv[1:])
    # Where Python has put this file's folder.
    del sys.path[0]
    with Connection(report_descriptor, readable=False) as report:
        report.send(("started",))
        for descriptor in namespaces:
            _enter(descriptor)
        # Opened anew: the ranks share the descriptor's position.
        with open(f"/proc/self/fd/{task_descriptor}", "rb") as file:
            task = pickle.load(file)
        status = perform(task, report, is_alone=bool(namespaces))
    # Outside of every handler, whose exception would keep the task's frames.
    sys.exit(status)


def perform(task: dict, report: Connection, is_alone: bool) -> int:
    """Runs the task, reports how it ended, and returns the exit status."""
    try:
        if "script" in task:
            _run_script(task["script"], task["arguments"])
        else:
            spawn.prepare(task["preparation"])
            result = pickle.loads(task["function"])()
            report.send(("returned", pickle.dumps(result)))
        return 0
    except KeyboardInterrupt:
        # The launcher's own: everyone knows of it.
        return 130
    except SystemExit as stop:
        status = stop.code
        if status is None or isinstance(status, int):
            cause = f"sys.exit({status})"
        else:
            print(status, file=sys.stderr)
            cause, status = f"sys.exit({status!r})", 1
        if status:
            report.send(("failed", cause, status, "", time.monotonic()))
        return status or 0
    except BaseException as error:
        summary = traceback.TracebackException.from_exception(error)
        # It begins with the task's own code.
        package = os.path.dirname(os.path.dirname(__file__))
        own = __file__, os.path.join(package, "distributed.py")
        while summary.stack and summary.stack[0].filename in own:
            del summary.stack[0]
        text = "".join(summary.format())
        if is_alone and _is_for_lack_of_network(error):
            text += _NO_INTERNET + "\n"
        print(text, end="", file=sys.stderr, flush=True)
        cause = f"{type(error).__name__}: {_headline(error)}".rstrip(": ")
        report.send(("failed", cause, 1, text, time.monotonic()))
        return 1


def _headline(error: BaseException) -> str:
    """One line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines()]
    # Of TensorFlow's long messages, that which is neither "in user code:" nor
    # the name of an operation.
    lines = [line for line in lines if line and not line.startswith("[[")]
    if not lines:
        return ""
    return lines[-1] if lines[0].endswith(":") else lines[0]


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, vars(module))


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")


def _is_for_lack_of_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno in _UNREACHABLE:
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
