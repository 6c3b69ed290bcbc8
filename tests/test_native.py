"""Building, caching and loading the native library."""

import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import threading

import pytest

from kmem import cache
from kmem import native

needs_compiler = pytest.mark.skipif(
    native.find_compiler() is None, reason="needs a C++ compiler"
)


def instant_compiler(folder, result):
    """A compiler with a result that is given; counts what it has linked in a
    file."""
    script, calls = folder / "c++", folder / "calls"
    calls.touch()
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *" -c "*) ;; *) echo call >> '
        f"{shlex.quote(str(calls))};; esac\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {shlex.quote(str(result))} "$2"\n'
    )
    script.chmod(0o755)
    return script, calls


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """The calls of a compiler whose result is no library."""
    result = tmp_path / "result"
    result.write_text("what was compiled")
    script, calls = instant_compiler(tmp_path, result)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def num_calls(calls):
    return len(calls.read_text().splitlines())


def test_the_library_is_built_once_and_kept(compiler):
    assert native.find_library() is None
    path = native.build()
    assert native.find_library() == path
    assert native.build() == path
    assert num_calls(compiler) == 1
    native.build(force=True)
    assert num_calls(compiler) == 2


def test_builds_at_the_same_time_build_once(compiler):
    start = threading.Barrier(4)
    paths = []

    def work():
        start.wait()
        paths.append(native.build())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert num_calls(compiler) == 1


def test_one_line_says_that_it_compiles(compiler, capfd):
    native.build()
    native.build()
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("kmem: compiling its native library")


@pytest.mark.parametrize("damage", ["cut short", "changed", "empty"])
def test_a_damaged_library_is_built_anew(compiler, damage):
    path = native.build()
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut short": content[:-5],
            "changed": b"x" + content[1:],
            "empty": b"",
        }[damage]
    )
    assert native.find_library() is None
    assert native.build() == path
    assert path.read_bytes() == content


def test_another_compiler_builds_another_library(compiler, monkeypatch):
    path = native.build()
    monkeypatch.setenv("CXX", os.environ["CXX"] + " -march=native")
    assert native.find_library() is None
    assert native.build() != path


def test_a_library_outlives_its_compiler(compiler, monkeypatch):
    path = native.build()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert native.find_compiler() is None
    assert native.find_library() == path


def test_the_cache_folder_is_the_users_alone(compiler):
    folder = native.build().parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so"]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(compiler, mode):
    folder = cache.folder()
    folder.mkdir(parents=True)
    folder.chmod(mode)
    for function in (native.find_library, native.build):
        with pytest.raises(
            native.NativeLibraryError, match="can be written to by other users"
        ):
            function()
    native.register_if_built()
    assert num_calls(compiler) == 0


def test_a_folder_of_somebody_else_is_refused(compiler, monkeypatch):
    native.build()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(
        native.NativeLibraryError, match="belongs to another user"
    ):
        native.find_library()


def test_a_cache_folder_that_cannot_be_made_is_named(compiler, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(
        native.NativeLibraryError, match="cache folder /dev/null/kmem"
    ):
        native.build()


def test_a_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.folder() == pathlib.Path("/home/somebody/.cache/kmem")


def test_a_compiler_that_fails_is_quoted(tmp_path, compiler):
    script = pathlib.Path(os.environ["CXX"])
    script.write_text("#!/bin/sh\necho 'error: no such header' >&2; exit 1\n")
    with pytest.raises(native.NativeLibraryError) as caught:
        native.build()
    message = str(caught.value)
    assert "error: no such header" in message
    assert str(script) in message
    assert native._sources(".cc")[0].name in message
    assert native.find_library() is None
    assert [path.name for path in cache.folder().iterdir()] == ["lock"]


def test_without_a_compiler_the_error_says_how_to_get_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(native.NativeLibraryError) as caught:
        native.build()
    for command in ("apt-get install g++", "dnf install", "conda install"):
        assert command in str(caught.value)


def test_tensorflows_own_pool_is_refused(native_library, monkeypatch):
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "1")
    with pytest.raises(
        native.NativeLibraryError, match="TF_CPU_ALLOCATOR_USE_BFC must not"
    ):
        native.stats()


def test_nothing_is_built_from_the_tests_of_the_sources():
    sources = native._sources(".cc", ".h")
    assert "budget_allocator.cc" in {path.name for path in sources}
    assert not [path for path in sources if path.parent.name == "tests"]


@needs_compiler
@pytest.mark.parametrize("name", ["budget_test", "storage_test"])
def test_the_core_passes_its_own_tests(tmp_path, name):
    folder = native.sources_folder()
    command = [
        *native.find_compiler(),
        *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"),
        *("-I", folder, folder / "tests" / f"{name}.cc", "-o", tmp_path / name),
    ]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / name], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


IMPORTS_SILENTLY = """
    import os
    import sys
    import keras
    import tensorflow

    # Keras imports some of these itself, if they are installed.
    heavy = ("matplotlib", "sklearn")
    for name in heavy:
        sys.modules.pop(name, None)
    read, write = os.pipe()
    terminal = os.dup(1)
    os.dup2(write, 1)
    os.dup2(write, 2)
    import kmem
    {more}
    sys.stdout.flush()
    os.dup2(terminal, 1)
    os.set_blocking(read, False)
    try:
        print("printed", os.read(read, 10000).decode())
    except BlockingIOError:
        pass
    print([name for name in heavy if name in sys.modules])
    print(kmem.native.is_registered())
    from tensorflow.python.eager import context
    print(context.context()._initialized)
"""


def test_import_registers_silently_and_imports_nothing_heavy(
    native_library, python
):
    status, output, errors = python.run(IMPORTS_SILENTLY.format(more=""))
    assert (status, output) == (0, "[]\nTrue\nFalse\n"), errors


def test_the_test_above_can_fail(python):
    status, output, errors = python.run(
        IMPORTS_SILENTLY.format(more="import matplotlib; print('hello')")
    )
    assert status == 0, errors
    assert output.startswith("printed hello\n\n['matplotlib']\n")


def test_the_first_use_builds_and_registers(
    native_library, fresh_python, tmp_path
):
    # Compiled before, as a busy machine takes minutes.
    script, calls = instant_compiler(tmp_path, native.find_library())
    code = """
        import kmem
        print(kmem.native.is_registered())
        print(kmem.memory.current())
        import tensorflow as tf
        x = tf.fill([250000], 1.0)
        print(kmem.memory.current() >= 1000000)
    """
    status, output, errors = fresh_python.run(code, CXX=str(script))
    assert (status, output) == (0, "False\n0\nTrue\n"), errors
    assert errors.count("kmem: compiling") == num_calls(calls) == 1


def test_without_a_compiler_the_rest_works(fresh_python):
    status, output, errors = fresh_python.run(
        """
        import keras
        import kmem
        import numpy as np
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        try:
            kmem.memory.limit("1GB", device="CPU")
        except RuntimeError as error:
            print("apt-get install g++" in str(error))
        """,
        PATH="",
        CXX="",
    )
    assert (status, output) == (0, "True\n"), errors


@pytest.mark.parametrize(
    "before",
    [
        "tf.constant(1.0) + 1.0",
        # Allocates without a device.
        "tf.train.load_checkpoint({path!r}).get_tensor('x')",
    ],
    ids=["operation", "checkpoint"],
)
def test_too_late_is_a_clear_error(native_library, python, tmp_path, before):
    import tensorflow as tf

    path = str(tmp_path / "checkpoint")
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=["x"],
        shape_and_slices=[""],
        tensors=[tf.constant([1.0])],
    )
    status, output, errors = python.run(f"""
        import tensorflow as tf
        {before.format(path=path)}
        import kmem
        for _ in range(2):
            try:
                kmem.memory.peak("CPU")
            except RuntimeError as error:
                print(error)
        print(tf.constant(1.0).numpy())
    """)
    assert status == 0, errors
    first, second, value = output.splitlines()
    assert first == second
    assert "Import kmem before any TensorFlow operation" in first
    assert value == "1.0"


def test_sources_are_found_in_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "kmem"
    shutil.copytree(native.sources_folder(), package / "custom_ops")
    monkeypatch.setattr(native, "__file__", str(package / "native.py"))
    assert native.sources_folder() == package / "custom_ops"
