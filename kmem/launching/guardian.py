"""A small process beside the ranks, which outlives the one that launched them.

It does two things that the launcher cannot do itself. It moves into a new
network that has nothing but a loopback interface, where the ranks follow it:
TensorFlow's server listens on every interface and asks nobody for a password.
And it reads the ranks' process groups from its standard input: when that ends,
as it does however the launcher ends, whatever is left of them is killed.

Python runs this file itself, so that it starts in no time: it imports only
what it needs, and nothing of kmem.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

# From <sched.h>, <linux/sockios.h> and <net/if.h>.
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


def main() -> None:
    answer = ""
    if "--private" in sys.argv:
        try:
            enter_private_network()
        except OSError as error:
            answer = str(error)
    print(answer, flush=True)
    kill_at_the_end(sys.stdin)


def enter_private_network() -> None:
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        # Whoever may not make a network may make a space of users, and a
        # network in it. Everyone stays who they were, there and on disk.
        user, group = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def kill_at_the_end(lines) -> None:
    """A line is a group to kill, or minus one that has ended."""
    groups: set[int] = set()
    for line in lines:
        number = int(line)
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "unshare")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
