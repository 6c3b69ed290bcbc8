"""Runs a task in several processes of this machine, again if one fails."""

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

from kmem.launching import cluster
from kmem.launching.network import Network
from kmem.launching.ranks import Failure
from kmem.launching.ranks import Ranks


class RankFailed(RuntimeError):
    """A process that a launch has started has failed.

    Attributes:
        rank: The one that failed first.
        cause: Its exception or signal, in a line.
        exit_code: What a shell would show: 128 and the signal's number of a
            process that was killed.
    """

    def __init__(self, failure: Failure, ended: list[int]):
        message = f"rank {failure.rank} failed first: {failure.cause}"
        if ended:
            listed = ", ".join(map(str, ended))
            message += f"\nEnded before that, without an error: {listed}"
        if failure.traceback:
            message += f"\n{failure.traceback.rstrip()}"
        super().__init__(message)
        self.rank = failure.rank
        self.cause = failure.cause
        self.exit_code = failure.exit_code


def run(
    task: dict,
    num_processes: int,
    gpus: list[str],
    restarts: int,
    private: bool,
    grace_seconds: float,
) -> list:
    """Returns what the task returned in each rank.

    Args:
        task: For `rank.py`.
        num_processes: How many ranks there are.
        gpus: CUDA's names of those to share out, one for each rank; or none.
        restarts: How often to start all of them again.
        private: Whether they get a network of their own, if that can be.
        grace_seconds: What ranks are given to end themselves.

    Raises:
        RankFailed: If a rank fails in the last attempt.
    """
    attempt = 0
    while True:
        # A new network as well: what is left of the last may hold its ports.
        network = Network(num_processes, private)
        if network.refusal and attempt == 0:
            warnings.warn(
                "TensorFlow's servers listen on every network interface of "
                "this machine and ask nobody for a password, as the kernel "
                "does not let the processes have a network of their own "
                f'({network.refusal}). `network="host"` says that this is '
                "meant.",
                RuntimeWarning,
                stacklevel=3,
            )
        with contextlib.closing(network):
            environments = _environments(network, gpus)
            try:
                return _attempt(task, environments, network, grace_seconds)
            except RankFailed as error:
                if attempt == restarts:
                    raise
                attempt += 1
                print(
                    f"{error}\nAll ranks start again "
                    f"({attempt} of {restarts}).",
                    file=sys.stderr,
                    flush=True,
                )


def _attempt(
    task: dict, environments: list, network: Network, grace_seconds: float
) -> list:
    with _ended_by_sigterm(), Ranks(task, environments, network) as ranks:
        try:
            failure = ranks.watch()
        except KeyboardInterrupt:
            ranks.end(signal.SIGINT, grace_seconds)
            raise
        except SystemExit:
            ranks.end(signal.SIGTERM, grace_seconds)
            raise
        if failure is None:
            return ranks.values()
        ended = ranks.without_error()
        ranks.end(signal.SIGTERM, grace_seconds)
        raise RankFailed(failure, ended)


def _environments(network: Network, gpus: list[str]) -> list[dict[str, str]]:
    environments = []
    for rank in range(len(network.addresses)):
        environment = {
            **os.environ,
            **network.environment,
            "TF_CONFIG": cluster.tf_config(network.addresses, rank),
            cluster.LAUNCHED: "1",
            # What a rank prints is seen at once.
            "PYTHONUNBUFFERED": "1",
        }
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[rank]
        environments.append(environment)
    return environments


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM an exception, so that the ranks are ended as well."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame) -> None:
    sys.exit(128 + number)
