"""Processes are started, watched and ended; none of them needs TensorFlow."""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import types

import pytest

import kmem
from kmem.commands import cli
from kmem.distributed import RankFailed
from kmem.distributed import launch
from kmem.launching import addresses
from kmem.launching import cluster
from kmem.launching import ranks

# Rank 0 waits for ever: only the launcher ends it.
OTHERS_WAIT = """
import json, os, signal, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if rank != 1:
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(*parts: str) -> str:
        path = tmp_path / "train.py"
        path.write_text("".join(map(textwrap.dedent, parts)))
        return str(path)

    return write


@pytest.fixture
def own_signals():
    """The handlers of a program that has set none."""
    int_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    term_handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, int_handler)
    signal.signal(signal.SIGTERM, term_handler)


def run(script: str, num_processes: int = 2, *options: str) -> int:
    """`kmem launch`, in the host's network: no rank here listens on it."""
    command = ["launch", "--processes", str(num_processes), "--network", "host"]
    return cli.main([*command, "--grace", "30", *options, script])


def waiting(folder: pathlib.Path, then: str) -> str:
    """A script that leaves files: when it is ready, and when it is ended."""
    begin = f"""
    import json, os, pathlib, signal, sys, time
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = pathlib.Path({str(folder)!r})
    try:
        (folder / f"ready{{rank}}").touch()
    """
    end = """
        time.sleep(1000)
    finally:
        (folder / f"end{rank}").touch()
    """
    then = textwrap.indent(textwrap.dedent(then), " " * 4)
    return textwrap.dedent(begin) + then + textwrap.dedent(end)


def test_values_are_returned_in_the_order_of_the_ranks():
    main = functools.partial(os.getenv, "TF_CONFIG")
    found = [json.loads(x) for x in launch(main, 3, network="host")]
    assert [x["task"]["index"] for x in found] == [0, 1, 2]
    workers = {tuple(x["cluster"]["worker"]) for x in found}
    assert len(workers) == 1
    assert len(set(workers.pop())) == 3


def test_a_failure_is_raised():
    with pytest.raises(RankFailed, match=r"rank \d failed first") as caught:
        launch(functools.partial(os._exit, 4), 2, network="host")
    assert caught.value.exit_code == 4
    assert caught.value.cause == "exit code 4"


def fail():
    raise ValueError("a bug")


def test_the_traceback_begins_in_the_function():
    with pytest.raises(RankFailed) as caught:
        launch(fail, 1, network="host")
    first_frame = caught.value.traceback.splitlines()[1]
    assert f'"{__file__}"' in first_frame and "in fail" in first_frame


def test_a_rank_may_end_while_the_failed_one_is_looked_for(monkeypatch):
    first_failure = ranks.Ranks._first_failure

    def once_all_have_ended(self):
        found = first_failure(self)
        for rank in self._ranks if found else []:
            if not rank.has_ended:
                os.waitid(
                    *(os.P_PID, rank._process.pid, os.WEXITED | os.WNOWAIT)
                )
        return found

    monkeypatch.setattr(ranks.Ranks, "_first_failure", once_all_have_ended)
    with pytest.raises(RankFailed, match=r"rank \d failed first: exit code 4"):
        launch(functools.partial(os._exit, 4), 2, network="host")


def test_in_a_cluster_main_runs_in_this_process(monkeypatch):
    config = cluster.tf_config(["a:1", "b:1"], 1)
    monkeypatch.setenv("TF_CONFIG", config)
    assert launch(os.getpid, num_processes=7) == [os.getpid()]


@pytest.mark.parametrize(
    "ending, cause, exit_code",
    [
        ('raise ValueError("a bug")', "ValueError: a bug", 1),
        (
            'raise OSError("in user code:\\n\\n no space")',
            "OSError: no space",
            1,
        ),
        ("raise KeyboardInterrupt", "exit code 130", 130),
        ("raise MemoryError", "MemoryError\n", 1),
        ("import nothing_like_it", "ModuleNotFoundError: No module", 1),
        ("if True", "SyntaxError: expected ':'", 1),
        ("sys.exit(3)", "sys.exit(3)", 3),
        ('sys.exit("no data")', "sys.exit('no data')", 1),
        ("os._exit(4)", "exit code 4", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", 137),
        ("os.abort()", "killed by SIGABRT", 134),
    ],
)
def test_the_first_failure_is_named(script, capsys, ending, cause, exit_code):
    # A script that cannot be compiled fails in whichever rank is first.
    assert run(script(OTHERS_WAIT, ending + "\n")) == exit_code
    errors = capsys.readouterr().err
    assert re.search(r"kmem launch: rank [01] failed first: ", errors)
    assert cause in errors


def test_the_traceback_begins_in_the_script(script, capsys):
    path = script(OTHERS_WAIT, 'raise ValueError("a bug")\n')
    assert run(path) == 1
    message = capsys.readouterr().err.partition("kmem launch: ")[2]
    assert message == (
        "rank 1 failed first: ValueError: a bug\n"
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 6, in <module>\n'
        '    raise ValueError("a bug")\n'
        "ValueError: a bug\n"
    )


def test_a_rank_that_had_ended_without_an_error_is_told_of(
    script, tmp_path, capsys
):
    path = script(
        f"""
        import json, os, pathlib, time
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        file = pathlib.Path({str(tmp_path / "pid")!r})
        if rank == 1:
            file.with_suffix(".new").write_text(str(os.getpid()))
            file.with_suffix(".new").rename(file)
        else:
            while not file.exists():
                time.sleep(0.01)
            while pathlib.Path("/proc", file.read_text()).exists():
                time.sleep(0.01)
            raise TimeoutError("rank 1 does not answer")
        """
    )
    assert run(path) == 1
    errors = capsys.readouterr().err
    assert "rank 0 failed first: TimeoutError: rank 1 does not" in errors
    assert "Ended before that, without an error: 1" in errors


def test_what_a_rank_has_started_ends_with_it(script, tmp_path):
    path = script(
        f"""
        import fcntl, json, os, pathlib, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        with open(f"{tmp_path}/lock{{rank}}", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            subprocess.Popen(["sleep", "1000"], pass_fds=[file.fileno()])
        sys.exit(3 * rank)
        """
    )
    assert run(path) == 3
    for rank in range(2):
        with open(tmp_path / f"lock{rank}", "w") as file:
            # Waits for whoever still holds it.
            fcntl.flock(file, fcntl.LOCK_EX)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(script):
    path = script(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        OTHERS_WAIT,
        "sys.exit(3)\n",
    )
    assert run(path, 3, "--grace", "0.5") == 3


def test_a_rank_that_never_starts_is_named(
    script, tmp_path, monkeypatch, capsys
):
    # Python imports it before it runs anything.
    (tmp_path / "sitecustomize.py").write_text(OTHERS_WAIT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(ranks, "_START_SECONDS", 1.5)
    assert run(script("import time\ntime.sleep(1000)\n")) == 1
    expected = "rank 0 failed first: not started after 1.5 s"
    assert expected in capsys.readouterr().err


WAITS = """
import json, os, signal, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
class DeadlineExceededError(Exception):
    pass
"""


def test_a_rank_that_is_stopped_is_named(script, capsys):
    path = script(
        WAITS,
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while rank == 0:
            parent = os.getppid()
            with open(f"/proc/{parent}/task/{parent}/children") as f:
                children = f.read().split()
            states = []
            for child in children:
                with open(f"/proc/{child}/stat") as f:
                    states.append(f.read().rpartition(")")[2].split()[0])
            if "T" in states:
                raise OSError("no answer")
        """,
    )
    assert run(path, 2, "--grace", "0.1") == 1
    errors = capsys.readouterr().err
    assert "rank 1 failed first: stopped by a signal, such as SIG" in errors
    assert "rank 0 waited for it: OSError: no answer" in errors


def test_a_rank_that_lets_the_others_wait_is_named(script, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "_MISSED_SECONDS", 1.0)
    path = script(
        WAITS,
        """
        if rank == 1:
            time.sleep(1000)
        raise DeadlineExceededError("20 s")
        """,
    )
    assert run(path, 3, "--grace", "0.1") == 1
    errors = capsys.readouterr().err
    assert "rank 1 failed first: it did not take part" in errors


def test_ranks_start_again_after_a_failure(script, tmp_path, capsys):
    path = script(
        f"""
        import json, os, sys
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        with open(f"{tmp_path}/starts{{rank}}", "a+") as file:
            file.write("x")
            file.seek(0)
            if rank == 1 and len(file.read()) < 3:
                sys.exit(5)
        """
    )
    assert run(path, 2, "--restarts", "2") == 0
    assert (tmp_path / "starts1").read_text() == "xxx"
    assert "All ranks start again (2 of 2)" in capsys.readouterr().err
    (tmp_path / "starts1").unlink()
    assert run(path, 2, "--restarts", "1") == 5


@pytest.mark.parametrize(
    "number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_ctrl_c_and_sigterm_reach_all_ranks(
    script, tmp_path, own_signals, number, exit_code
):
    then = f"""
    while not (folder / f"ready{{1 - rank}}").exists():
        time.sleep(0.01)
    if rank == 0:
        os.kill(os.getppid(), {int(number)})
    """
    path = script(waiting(tmp_path, then))
    try:
        status = run(path, 2, "--restarts", "5")
    except SystemExit as stop:
        status = stop.code
    assert status == exit_code
    assert (tmp_path / "end0").exists()
    assert (tmp_path / "end1").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_while_ranks_start_reaches_them(
    script, tmp_path, own_signals, monkeypatch, number
):
    """The one that has just started is known to nobody yet."""
    path = script(waiting(tmp_path, ""))
    start = subprocess.Popen

    def started(*arguments, **options):
        process = start(*arguments, **options)
        if "/rank.py" in str(arguments):
            while not (tmp_path / "ready0").exists():
                assert process.poll() is None
            os.kill(os.getpid(), number)
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        ranks.run(
            {"script": path, "arguments": []}, 1, [], 0, False, grace_seconds=30
        )
    assert (tmp_path / "end0").exists()


def test_a_signal_kills_what_is_being_ended_after_a_failure(
    script, tmp_path, own_signals
):
    path = script(
        f"""
        folder = {str(tmp_path)!r}
        """,
        """
        import json, os, pathlib, signal, sys, time
        ready = pathlib.Path(folder, "ready")
        def end(number, _):
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(20)
            pathlib.Path(folder, "late").touch()
            os.kill(os.getppid(), signal.SIGINT)
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            signal.signal(signal.SIGTERM, end)
            ready.touch()
            time.sleep(1000)
        while not ready.exists():
            time.sleep(0.01)
        sys.exit(3)
        """,
    )
    assert run(path, 2, "--grace", "1000") == 130
    assert not (tmp_path / "late").exists()


# As `kmem launch` does, without the time that TensorFlow takes to import.
LAUNCHER = f"""
import sys, types
sys.modules["kmem"] = types.ModuleType("kmem")
sys.modules["kmem"].__path__ = {kmem.__path__!r}
from kmem.launching import ranks
task = {{"script": sys.argv[1], "arguments": []}}
ranks.run(task, 2, [], restarts=0, private=True, grace_seconds=1.0)
"""


def test_nothing_is_left_of_a_launcher_that_is_killed(script, tmp_path):
    path = script(
        f"""
        import fcntl, json, os, signal, time
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        file = open(f"{tmp_path}/lock{{rank}}", "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        """
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, path], stdout=subprocess.PIPE
    )
    with launcher:
        lines = {launcher.stdout.readline() for _ in range(2)}
        launcher.kill()
    assert lines == {b"[0] ready\n", b"[1] ready\n"}
    for rank in range(2):
        with open(tmp_path / f"lock{rank}", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def test_output_is_passed_on_in_whole_lines(script, capsys):
    path = script(
        """
        import sys
        for i in range(300):
            sys.stdout.write(f"{i} ")
            sys.stdout.write("is a number\\n")
        sys.stdout.write("10%\\r20%\\r\\n")
        print("\u00e9", file=sys.stderr)
        sys.stdout.write("without an end")
        """
    )
    assert run(path) == 0
    output, errors = capsys.readouterr()
    for rank in range(2):
        mine = [
            line.removeprefix(f"[{rank}] ")
            for line in output.splitlines()
            if line.startswith(f"[{rank}] ")
        ]
        numbers = [f"{i} is a number" for i in range(300)]
        assert mine == [*numbers, "10%", "20%", "without an end"]
    assert sorted(errors.splitlines()) == ["[0] \u00e9", "[1] \u00e9"]


def test_the_script_runs_as_python_runs_it(script, capsys, tmp_path):
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    path = script(
        """
        import beside, pickle, sys

        class Pickled:
            pass

        assert isinstance(pickle.loads(pickle.dumps(Pickled())), Pickled)
        assert sys.stdin.read() == ""
        print(__name__, __file__, sys.argv[1:], beside.word)
        """
    )
    command = ["launch", "--processes", "1", path, "--epochs", "3"]
    assert cli.main(command) == 0
    expected = f"[0] __main__ {path} ['--epochs', '3'] beside\n"
    assert capsys.readouterr().out == expected


def test_a_private_network_has_only_its_processes(script, tmp_path, capsys):
    with contextlib.closing(addresses.Network(1, private=True)) as private:
        if private.refusal:
            pytest.skip(f"no network of its own: {private.refusal}")
        assert private.namespaces
    path = script(
        """
        import json, os, socket, urllib.request
        cluster = json.loads(os.environ["TF_CONFIG"])
        host, port = cluster["cluster"]["worker"][0].split(":")
        with socket.create_server((host, int(port))):
            socket.create_connection((host, int(port))).close()
        print(socket.if_nameindex(), os.getuid(), os.getgid())
        urllib.request.urlopen("http://example.com")
        """
    )
    assert cli.main(["launch", "--processes", "1", path]) == 1
    output, errors = capsys.readouterr()
    assert output == f"[0] [(1, 'lo')] {os.getuid()} {os.getgid()}\n"
    assert "`kmem launch --network host`" in errors


def test_a_kernel_that_refuses_is_told_of_once(script, tmp_path, monkeypatch):
    guardian = tmp_path / "guardian.py"
    guardian.write_text("print('not here', flush=True)\ninput()\n")
    monkeypatch.setattr(addresses, "_GUARDIAN", guardian)
    path = script("raise SystemExit(3)\n")
    with pytest.warns(RuntimeWarning, match=r"every network.*not here") as told:
        assert (
            cli.main(["launch", "--processes", "1", "--restarts", "1", path])
            == 3
        )
    assert len(told) == 1


def test_ports_of_the_host_are_held_for_the_ranks():
    with contextlib.closing(addresses.Network(3, private=False)) as held:
        assert held.namespaces == ()
        assert len(set(held.addresses)) == 3
        for address in held.addresses:
            taken = int(address.split(":")[1])
            with socket.socket() as other, pytest.raises(OSError):
                other.bind(("", taken))
            with socket.socket() as tensorflow:
                tensorflow.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                tensorflow.bind(("", taken))


def test_each_rank_has_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")
    main = functools.partial(os.getenv, "CUDA_VISIBLE_DEVICES")
    assert launch(main, network="host") == ["4", "GPU-ab"]
    with pytest.raises(ValueError, match="at most 2, the number of GPUs"):
        launch(main, 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_processes": 0}, "`num_processes` must be a positive integer"),
        ({}, "`num_processes` must be given on a machine without a GPU"),
        ({"restarts": -1}, "`restarts` must be an integer, 0 or more"),
        ({"network": "lan"}, "`network` must be one of 'private', 'host'"),
        ({"grace_seconds": -1.0}, "`grace_seconds` must be a number of"),
        ({"main": lambda: None}, "`main` must be a function of a module"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments, message, monkeypatch):
    # What a script has is imported; a notebook's lambda is copied.
    script = types.ModuleType("__main__")
    script.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(ValueError, match=message):
        launch(**{"main": os.getpid, **arguments})


def test_a_notebook_without_cloudpickle_is_told_to_install_it(monkeypatch):
    # A notebook has no file that a new process could import.
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r'pip install "kmem\[notebook\]"'):
        launch(os.getpid, 1)


def test_what_cannot_be_copied_from_a_notebook_is_refused(monkeypatch):
    pytest.importorskip("cloudpickle")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(ValueError, match="can import or copy.*lock"):
        launch(functools.partial(print, threading.Lock()), 1)


@pytest.mark.parametrize(
    "options", [[], ["--processes", "0"], ["--processes", "1", "--grace", "-1"]]
)
def test_bad_use_of_the_command_exits_with_2(script, capsys, options):
    assert cli.main(["launch", *options, script("")]) == 2
    assert capsys.readouterr().err.startswith("kmem launch: `")


def test_a_script_that_does_not_exist_is_bad_use(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["launch", "--processes", "2", "nothing.py"])
    assert caught.value.code == 2


def test_in_a_cluster_the_command_becomes_the_script(script, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", cluster.tf_config(["a:1", "b:1"], 0))
    monkeypatch.setenv(cluster.LAUNCHED, "")
    path = script("")

    def execv(program, command):
        assert os.environ[cluster.LAUNCHED]
        assert command == [program, path, "--epochs", "3"]
        raise SystemExit(7)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit, match="7"):
        cli.main(["launch", path, "--epochs", "3"])
