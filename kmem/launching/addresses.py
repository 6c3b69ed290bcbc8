"""The network in which the processes of one machine find each other.

Private: a network namespace with nothing but a loopback interface, which only
those processes are in. They reach no other host, and no other host or user
reaches them. Or the host's own, where ports are held until the processes have
ended: bound with SO_REUSEPORT, and not listened on, they can be bound once
more by the same user's TensorFlow and by nobody else.
"""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import warnings
from typing import Any

from kmem.launching.cluster import tf_config

_GUARDIAN = pathlib.Path(__file__).with_name("guardian.py")
# In a network of their own every port is free. This one is below those that
# Linux gives to outgoing connections.
_FIRST_PORT = 20000


class Network:
    """Addresses for processes, and the guardian that ends them.

    Args:
        num_processes: How many addresses are needed.
        private: Whether to try for a network of their own.

    Attributes:
        addresses: `"127.0.0.1:port"` of each.
        namespaces: File descriptors of what a process must enter to be in it.
        refusal: Why the network is not private although that was asked for.
        environments: What TensorFlow is told about it in each process.
    """

    def __init__(self, num_processes: int, private: bool):
        self.namespaces: tuple[int, ...] = ()
        with contextlib.ExitStack() as self._resources:
            self._guardian = self._start_guardian(private)
            # The guardian's one line: why it has no network of its own.
            self.refusal = self._guardian.stdout.readline().strip()
            if private and not self.refusal:
                self._open_namespaces()
                ports = range(_FIRST_PORT, _FIRST_PORT + num_processes)
                settings = {}
            else:
                ports = [self._held_port() for _ in range(num_processes)]
                settings = {"TF_GRPC_REUSE_PORT": "1"}
            self.addresses = [f"127.0.0.1:{port}" for port in ports]
            self.environments = [
                {"TF_CONFIG": tf_config(self.addresses, rank), **settings}
                for rank in range(num_processes)
            ]
            # Without an error they stay until `close`.
            self._resources = self._resources.pop_all()
        if private and self.refusal:
            warnings.warn(
                "TensorFlow's servers listen on every network interface of "
                "this machine and ask nobody for a password, as the kernel "
                "does not let the processes have a network of their own "
                f'({self.refusal}). If this is safe, give `network="host"`.',
                RuntimeWarning,
                stacklevel=4,
            )

    def guard(self, group: int) -> None:
        """Has a process group killed when this process ends; minus its number
        says that it has ended, and forgets it."""
        # Without a guardian there is nobody to tell; the ranks still end
        # with a launcher that ends as it should.
        with contextlib.suppress(BrokenPipeError):
            self._guardian.stdin.write(f"{group}\n")
            self._guardian.stdin.flush()

    def close(self) -> None:
        """Ends all that is left of the guarded groups, and the network."""
        self._resources.close()

    def _start_guardian(self, private: bool) -> Any:
        command = [sys.executable, "-I", "-S", str(_GUARDIAN)]
        guardian = subprocess.Popen(
            [*command, "--private"] if private else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # What ends the launcher's group must not end it.
            start_new_session=True,
        )
        # Closes its standard input, at which it ends, and waits.
        self._resources.callback(guardian.communicate)
        return guardian

    def _open_namespaces(self) -> None:
        for kind in ("user", "net"):
            path = f"/proc/{self._guardian.pid}/ns/{kind}"
            if os.stat(path).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
                descriptor = os.open(path, os.O_RDONLY)
                self._resources.callback(os.close, descriptor)
                self.namespaces += (descriptor,)

    def _held_port(self) -> int:
        holder = self._resources.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        return holder.getsockname()[1]
