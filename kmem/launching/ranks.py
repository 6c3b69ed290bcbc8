"""Starts the ranks of a run, passes their output on, and ends them together.

The first failure is the one that is told: after it, the other ranks fail for
its sake, or wait for it for ever. So they are ended, politely at first. What
this module does not do: choose devices and networks, or start a run again.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing.connection import wait

from kmem.launching.network import Network
from kmem.launching.output import Lines

_RANK = pathlib.Path(__file__).with_name("rank.py")
# How long a rank may take until the first line of its code.
_START_SECONDS = 300.0
# How often to look whether a process has ended: its pipes usually tell.
_LOOK_SECONDS = 0.1
# A rank that misses another can be seen to fail before the one that is gone.
_SETTLE_SECONDS = 0.2
# What a rank says that has waited for others for too long, and how long those
# may take to fail that have waited as well.
_WAITED = "DeadlineExceededError"
_MISSED_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """How a rank failed, and what a shell would see of it."""

    rank: int
    cause: str
    exit_code: int
    traceback: str = ""
    # When the rank said so; 0 of one that ended and did not.
    seconds: float = 0.0


class Rank:
    """One process, the leader of a group and a session of its own.

    Args:
        number: Which of the ranks it is.
        task: A descriptor of the file that says what to do.
        environment: All of its environment.
        network: Where it finds the others.

    Attributes:
        has_started: Whether its code runs.
        has_ended: Whether its process, and its group with it, has ended.
        failure: How it failed.
        value: What its function returned, pickled.
    """

    def __init__(
        self, number: int, task: int, environment: dict, network: Network
    ):
        self.number = number
        self.has_started = False
        self.has_ended = False
        self.failure: Failure | None = None
        self.value: bytes | None = None
        self._network = network
        self._report, writer = multiprocessing.Pipe(duplex=False)
        with writer:
            descriptors = (writer.fileno(), task, *network.namespaces)
            self._process = subprocess.Popen(
                [sys.executable, str(_RANK), *map(str, descriptors)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                start_new_session=True,
            )
        network.guard(self._process.pid)
        self._output = [
            Lines(getattr(self._process, stream), f"[{number}] ", stream)
            for stream in ("stdout", "stderr")
        ]
        self.sources = [self._report, *self._output]

    def signal(self, number: signal.Signals) -> None:
        """Sends it to the whole group."""
        # A group that has ended may have given its number away.
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def listen(self) -> None:
        """Passes on what it has written, and takes in what it reports."""
        for source in list(self.sources):
            hear = self._hear if source is self._report else source.forward
            if not hear():
                self.sources.remove(source)

    def look(self) -> None:
        """Sees whether the process has ended, and how."""
        # Until it is reaped, a process keeps its number.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.has_ended or not os.waitid(
            os.P_PID, self._process.pid, options
        ):
            return
        self.close()
        status = self._process.returncode
        if status < 0:
            name = signal.Signals(-status).name
            self._fail(f"killed by {name}", 128 - status)
        elif status > 0:
            self._fail(f"exit code {status}", status)

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, which may go on yet."""
        if self.has_ended:
            return False
        # After the name, which is in brackets and may hold anything.
        status = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in "Tt"

    def close(self) -> None:
        """Kills what is left of the group, and takes in its last words."""
        if self.has_ended:
            return
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.has_ended = True
        self._network.release(self._process.pid)
        self.listen()
        self.sources.clear()
        self._report.close()
        for lines in self._output:
            lines.close()

    def _hear(self) -> bool:
        """Takes in reports; returns whether there can be more."""
        try:
            while self._report.poll():
                kind, *content = self._report.recv()
                self.has_started = True
                if kind == "returned":
                    (self.value,) = content
                elif kind == "failed":
                    self._fail(*content)
        except (EOFError, OSError):
            # It has closed its end, perhaps in the middle of a report.
            return False
        return True

    def _fail(self, cause: str, exit_code: int, *details) -> None:
        if self.failure is None:
            self.failure = Failure(self.number, cause, exit_code, *details)


class Ranks:
    """All ranks of a run. On leaving the context, none is left.

    Args:
        task: What each of them does, for `rank.py`.
        environments: The environment of each.
        network: Where they find each other.
    """

    def __init__(self, task: dict, environments: list[dict], network: Network):
        self._deadline = time.monotonic() + _START_SECONDS
        self._ranks: list[Rank] = []
        try:
            with open(os.memfd_create("task"), "wb") as file:
                file.write(pickle.dumps(task))
                file.flush()
                for number, environment in enumerate(environments):
                    self._ranks.append(
                        Rank(number, file.fileno(), environment, network)
                    )
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.close()

    def watch(self) -> Failure | None:
        """Waits until all have ended, or one has failed."""
        while self._are_running():
            self._listen()
            failure = self._first_failure() or self._late_start()
            if failure is None:
                continue
            settled = time.monotonic() + _SETTLE_SECONDS
            while failure.seconds and time.monotonic() < settled:
                self._listen()
            return self._blamed(self._first_failure() or failure)
        return None

    def _blamed(self, failure: Failure) -> Failure:
        """The failure, of the rank that another one has waited for in vain."""
        for rank in self._ranks:
            if rank.is_stopped():
                cause = "stopped by a signal, such as SIGSTOP"
            elif _WAITED in failure.cause and self._is_missed(rank):
                cause = "it did not take part, and has not failed"
            else:
                continue
            return dataclasses.replace(
                failure,
                rank=rank.number,
                cause=f"{cause}; rank {failure.rank} waited for it: "
                f"{failure.cause}",
            )
        return failure

    def _is_missed(self, rank: Rank) -> bool:
        """Whether it does not fail as those do that wait."""
        end = time.monotonic() + _MISSED_SECONDS
        while not (rank.failure or rank.has_ended) and time.monotonic() < end:
            self._listen()
        return not (rank.failure or rank.has_ended)

    def end(self, number: signal.Signals, grace_seconds: float) -> None:
        """Ends all ranks, by a signal and after a while by SIGKILL."""
        deadline = time.monotonic() + grace_seconds
        for rank in self._ranks:
            rank.signal(number)
        while self._are_running() and time.monotonic() < deadline:
            self._listen()
        self.__exit__()

    def without_error(self) -> list[int]:
        """Those that have ended, and have not failed."""
        return [
            rank.number
            for rank in self._ranks
            if rank.has_ended and rank.failure is None
        ]

    def values(self) -> list:
        """What each has returned; `None` for a script."""
        return [
            None if rank.value is None else pickle.loads(rank.value)
            for rank in self._ranks
        ]

    def _are_running(self) -> bool:
        return not all(rank.has_ended for rank in self._ranks)

    def _listen(self) -> None:
        wait([x for rank in self._ranks for x in rank.sources], _LOOK_SECONDS)
        for rank in self._ranks:
            rank.listen()
            rank.look()

    def _first_failure(self) -> Failure | None:
        failures = [rank.failure for rank in self._ranks if rank.failure]
        return min(failures, key=lambda x: x.seconds, default=None)

    def _late_start(self) -> Failure | None:
        if time.monotonic() > self._deadline:
            for rank in self._ranks:
                if not rank.has_started:
                    cause = f"not started after {_START_SECONDS:g} s"
                    return Failure(rank.number, cause, 1)
        return None
