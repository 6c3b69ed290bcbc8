"""Starts the ranks of a run, watches them, and ends them together.

The first failure is the one that is told: after it, the other ranks fail for
its sake, or wait for it for ever. So they are ended, politely at first, and
perhaps all are started again. What this module does not do: choose devices.
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
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import IO

from kmem.launching import cluster
from kmem.launching.addresses import Network

_RANK = pathlib.Path(__file__).with_name("rank.py")
# How long a rank may take until the first line of its code.
_START_SECONDS = 300.0
# How often to look whether a process has ended: its report usually tells.
_LOOK_SECONDS = 0.05
# A rank that misses another can be seen to fail before the one that is gone.
_SETTLE_SECONDS = 0.2
# What a rank says that has waited for others for too long, and how long those
# may take to fail that have waited as well.
_WAITED = "DeadlineExceededError"
_MISSED_SECONDS = 3.0
# A line that grows beyond this is passed on in pieces.
_LONGEST_LINE = 1 << 16
# How long a process that has left a rank's group may keep its output open.
_OUTPUT_SECONDS = 1.0

_writing = threading.Lock()


@dataclasses.dataclass(eq=False, repr=False)
class RankFailed(RuntimeError):
    """A process that a launch has started has failed.

    Attributes:
        rank: The one that failed first.
        cause: Its exception or signal, in a line.
        exit_code: What a shell would show: 128 and the signal's number of a
            process that was killed.
    """

    rank: int
    cause: str
    exit_code: int
    traceback: str = ""
    # When the rank said so; 0 of one that ended and did not.
    seconds: float = 0.0
    # Those that had ended before, and have not failed.
    ended: list[int] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"rank {self.rank} failed first: {self.cause}"]
        if self.ended:
            listed = ", ".join(map(str, self.ended))
            lines.append(f"Ended before that, without an error: {listed}")
        if self.traceback:
            lines.append(self.traceback.rstrip())
        return "\n".join(lines)


def run(
    task: dict,
    num_processes: int,
    gpus: list[str],
    restarts: int,
    private: bool,
    grace_seconds: float,
) -> list:
    """What a task, made for `rank.py`, returned in each rank. Of `gpus`, CUDA's
    names, each rank gets one, if there are any. Raises `RankFailed` if a rank
    fails in the last attempt."""
    attempt = 0
    while True:
        # A new one: what is left of the last may hold its ports.
        network = Network(num_processes, private)
        private = private and not network.refusal
        try:
            with (
                contextlib.closing(network),
                _noted_signals() as noted,
                contextlib.closing(Ranks(task, network, gpus)) as ranks,
            ):
                return ranks.values(grace_seconds, noted)
        except RankFailed as error:
            if attempt == restarts:
                raise
            attempt += 1
            print(
                f"{error}\nAll ranks start again ({attempt} of {restarts}).",
                file=sys.stderr,
                flush=True,
            )


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
        report: Where it says so, until it has ended.
    """

    def __init__(
        self, number: int, task: int, environment: dict, network: Network
    ):
        self.number = number
        self.has_started = False
        self.has_ended = False
        self.failure: RankFailed | None = None
        self.value: bytes | None = None
        self._network = network
        self.report, writer = multiprocessing.Pipe(duplex=False)
        with writer:
            descriptors = (writer.fileno(), task, *network.namespaces)
            self._process = subprocess.Popen(
                [sys.executable, str(_RANK), *map(str, descriptors)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                pass_fds=descriptors,
                start_new_session=True,
            )
        network.guard(self._process.pid)
        self._outputs = [
            threading.Thread(
                target=_pass_on,
                args=(getattr(self._process, stream), stream, f"[{number}] "),
                daemon=True,
            )
            for stream in ("stdout", "stderr")
        ]
        for output in self._outputs:
            output.start()

    def signal(self, number: int) -> None:
        """Sends it to the whole group."""
        # A group that has ended may have given its number away.
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def listen(self) -> None:
        """Takes in what it has reported, and sees whether it has ended."""
        self._hear()
        ends = os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED
        if self.has_ended or self._state() not in ends:
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
        return not self.has_ended and self._state() == os.CLD_STOPPED

    def close(self) -> None:
        """Kills what is left of the group, and takes in its last words."""
        if self.has_ended:
            return
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.has_ended = True
        self._network.guard(-self._process.pid)
        self._hear()
        self.report.close()
        for output in self._outputs:
            output.join(_OUTPUT_SECONDS)

    def _state(self) -> int | None:
        """How the process was last seen to stop or end; `None` if it runs."""
        # Until it is reaped, a process keeps its number.
        options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        state = os.waitid(os.P_PID, self._process.pid, options)
        return state.si_code if state else None

    def _hear(self) -> None:
        try:
            while self.report.poll():
                kind, *content = self.report.recv()
                self.has_started = True
                if kind == "returned":
                    (self.value,) = content
                elif kind == "failed":
                    self._fail(*content)
        except (EOFError, OSError):
            # It has closed its end, perhaps in the middle of a report.
            self.report.close()

    def _fail(self, cause: str, exit_code: int, *details) -> None:
        if self.failure is None:
            self.failure = RankFailed(self.number, cause, exit_code, *details)


def _pass_on(pipe: IO[str], stream: str, prefix: str) -> None:
    """Writes what a process writes, in whole lines, to a stream of this one.

    A progress bar's carriage return ends a line, as nothing can be drawn over
    what another rank has written since.
    """
    with pipe:
        while line := pipe.readline(_LONGEST_LINE):
            with _writing:
                # Looked up at each line.
                target = getattr(sys, stream)
                target.write(prefix + line.removesuffix("\n") + "\n")
                target.flush()


class Ranks:
    """All ranks; arguments as those of `run`. Once closed, none is left."""

    def __init__(self, task: dict, network: Network, gpus: list[str]):
        self._deadline = time.monotonic() + _START_SECONDS
        self._ranks: list[Rank] = []
        try:
            with open(os.memfd_create("task"), "wb") as file:
                file.write(pickle.dumps(task))
                file.flush()
                for number, settings in enumerate(network.environments):
                    # What a rank prints is seen at once.
                    settings |= {cluster.LAUNCHED: "1", "PYTHONUNBUFFERED": "1"}
                    if gpus:
                        settings["CUDA_VISIBLE_DEVICES"] = gpus[number]
                    environment = {**os.environ, **settings}
                    self._ranks.append(
                        Rank(number, file.fileno(), environment, network)
                    )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills all that are left."""
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.close()

    def values(self, grace_seconds: float, noted: list[int]) -> list:
        """What each has returned; `None` for a script. Raises `RankFailed`.

        A noted signal ends them, and one that comes meanwhile at once.
        """
        failure = self._watch(noted)
        if noted:
            self._end(noted[0], grace_seconds, noted)
            return []
        if failure is None:
            values = [rank.value for rank in self._ranks]
            return [v if v is None else pickle.loads(v) for v in values]
        failure.ended = [
            rank.number
            for rank in self._ranks
            if rank.has_ended and rank.failure is None
        ]
        self._end(signal.SIGTERM, grace_seconds, noted)
        raise failure

    def _watch(self, noted: list[int]) -> RankFailed | None:
        """Waits until all have ended, one has failed, or a signal is noted."""
        failure = None
        while failure is None and not noted and self._are_running():
            self._listen()
            failure = self._first_failure() or self._late_start()
        if failure is None:
            return None
        settled = time.monotonic() + _SETTLE_SECONDS
        while failure.seconds and time.monotonic() < settled:
            self._listen()
        return self._blamed(self._first_failure() or failure)

    def _blamed(self, failure: RankFailed) -> RankFailed:
        """The failure, of the rank that another one has waited for in vain."""
        for rank in self._ranks:
            if rank.is_stopped():
                cause = "stopped by a signal, such as SIGSTOP"
            elif _WAITED in failure.cause and self._is_missed(rank):
                cause = "it did not take part, and has not failed"
            else:
                continue
            cause += f"; rank {failure.rank} waited for it: {failure.cause}"
            return RankFailed(
                rank.number, cause, failure.exit_code, failure.traceback
            )
        return failure

    def _is_missed(self, rank: Rank) -> bool:
        """Whether it does not fail as those do that wait."""
        end = time.monotonic() + _MISSED_SECONDS
        while time.monotonic() < end:
            if rank.failure or rank.has_ended:
                return False
            self._listen()
        return True

    def _end(self, number: int, grace_seconds: float, noted: list[int]) -> None:
        """Ends all ranks, by a signal and after a while by SIGKILL."""
        deadline, first = time.monotonic() + grace_seconds, noted[:1]
        for rank in self._ranks:
            rank.signal(number)
        while self._are_running() and noted == first:
            if time.monotonic() > deadline:
                break
            self._listen()
        self.close()

    def _are_running(self) -> bool:
        return not all(rank.has_ended for rank in self._ranks)

    def _listen(self) -> None:
        reports = [rank.report for rank in self._ranks]
        wait([each for each in reports if not each.closed], _LOOK_SECONDS)
        for rank in self._ranks:
            rank.listen()

    def _first_failure(self) -> RankFailed | None:
        failures = [rank.failure for rank in self._ranks if rank.failure]
        return min(failures, key=lambda x: x.seconds, default=None)

    def _late_start(self) -> RankFailed | None:
        late = [rank.number for rank in self._ranks if not rank.has_started]
        if not late or time.monotonic() <= self._deadline:
            return None
        return RankFailed(late[0], f"not started after {_START_SECONDS:g} s", 1)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Lists the SIGINT and SIGTERM that come, and raises for them at its end.

    An exception at any line, as Python's handlers raise it, could leave a
    process that has just started, and that nobody knows of yet.
    """
    noted: list[int] = []
    # Handlers of the program's own stay; other threads cannot set any.
    is_main = threading.current_thread() is threading.main_thread()
    defaults = (signal.default_int_handler, signal.SIG_DFL) if is_main else ()
    numbers = signal.SIGINT, signal.SIGTERM
    before = {n: signal.getsignal(n) for n in numbers}
    taken = [n for n in numbers if before[n] in defaults]
    for number in taken:
        signal.signal(number, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        for number in taken:
            signal.signal(number, before[number])
        if noted[:1] == [signal.SIGINT]:
            raise KeyboardInterrupt
        if noted:
            sys.exit(128 + noted[0])
