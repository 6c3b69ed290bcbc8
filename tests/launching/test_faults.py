"""What happens to one process ends all of them, and is told."""

import faulty
import pytest

from kmem.commands import cli

pytestmark = pytest.mark.exhaustive

# Longer than the runtime's heartbeats need to find a process that is frozen.
# Nothing but this limit finds one that does not take part.
TIMEOUT_SECONDS = "20"


@pytest.mark.parametrize(
    "fault, expected",
    [
        ("killed", ["rank 1 failed first: killed by SIGKILL"]),
        ("raises", ["rank 1 failed first: ZeroDivisionError"]),
        ("stalled", ["rank 1 failed first: it did not", "DeadlineExceeded"]),
        ("stalled in fit", ["rank 1 failed first: it did not", "Deadline"]),
        ("frozen", ["rank 1 failed first: stopped by a signal", "Unavail"]),
        ("ends", ["rank 0 failed first: ", "without an error: 1\n"]),
        ("late", ["rank 0 failed first: exit code 1"]),
        ("port taken", ["rank 1 failed first: UnknownError", "gRPC server"]),
    ],
)
def test_one_process_with_a_fault_ends_all(
    fault, expected, monkeypatch, capsys
):
    monkeypatch.setenv("KMEM_TIMEOUT_SECONDS", TIMEOUT_SECONDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["launch", "--processes", "2", "--grace", "1"]
    assert cli.main([*command, faulty.__file__, fault]) != 0
    message = capsys.readouterr().err.rpartition("kmem launch: ")[2]
    for part in expected:
        assert part in message
