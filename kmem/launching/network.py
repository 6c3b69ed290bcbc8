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
from typing import Any

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
        environment: What TensorFlow needs to be told about it.
    """

    def __init__(self, num_processes: int, private: bool):
        self._resources = contextlib.ExitStack()
        self.namespaces: tuple[int, ...] = ()
        self.environment: dict[str, str] = {}
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._guardian = self._start_guardian(private)
            # The guardian's one line: why it has no network of its own.
            self.refusal = self._guardian.stdout.readline().strip()
            if private and not self.refusal:
                self._open_namespaces()
                ports = range(_FIRST_PORT, _FIRST_PORT + num_processes)
            else:
                ports = [self._held_port() for _ in range(num_processes)]
                self.environment["TF_GRPC_REUSE_PORT"] = "1"
            self.addresses = [f"127.0.0.1:{port}" for port in ports]
            on_error.pop_all()

    def guard(self, group: int) -> None:
        """Has a process group killed when this process ends."""
        self._tell(group)

    def release(self, group: int) -> None:
        """Forgets a group which has ended."""
        self._tell(-group)

    def close(self) -> None:
        """Ends all that is left of the guarded groups, and the network."""
        self._resources.close()

    def _tell(self, number: int) -> None:
        # Without a guardian there is nobody to tell; the ranks still end
        # with a launcher that ends as it should.
        with contextlib.suppress(BrokenPipeError):
            self._guardian.stdin.write(f"{number}\n")
            self._guardian.stdin.flush()

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
