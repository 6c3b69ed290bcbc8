"""Building, caching and loading the native library."""

import io
import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem.base import building
from kmem.base import cache
from kmem.base import native
from kmem.commands import cli

needs_compiler = pytest.mark.skipif(
    building.find_compiler() is None, reason="needs a C++ compiler"
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
    assert building.find_library() is None
    path = building.build()
    assert building.find_library() == path
    assert building.build() == path
    assert num_calls(compiler) == 1
    building.build(force=True)
    assert num_calls(compiler) == 2


def test_builds_at_the_same_time_build_once(compiler):
    start = threading.Barrier(4)
    paths = []

    def work():
        start.wait()
        paths.append(building.build())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert num_calls(compiler) == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_one_line_on_a_terminal_says_that_it_compiles(
    compiler, monkeypatch, is_terminal
):
    errors = io.StringIO()
    monkeypatch.setattr(errors, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    building.build()
    building.build()
    assert errors.getvalue().count("\n") == is_terminal
    assert ("kmem: compiling" in errors.getvalue()) == is_terminal


def test_a_compiler_must_be_a_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CXX", "g++ '")
    for function in (building.find_compiler, building.build):
        with pytest.raises(
            building.NativeLibraryError, match="CXX must be a command that"
        ):
            function()
    native.prepare()
    assert cli.main(["info"]) == 0
    assert "CXX must be a command that" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut short", "changed", "empty"])
def test_a_damaged_library_is_built_anew(compiler, damage):
    path = building.build()
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut short": content[:-5],
            "changed": b"x" + content[1:],
            "empty": b"",
        }[damage]
    )
    assert building.find_library() is None
    assert building.build() == path
    assert path.read_bytes() == content


def test_another_compiler_builds_another_library(compiler, monkeypatch):
    path = building.build()
    monkeypatch.setenv("CXX", os.environ["CXX"] + " -march=native")
    assert building.find_library() is None
    assert building.build() != path


def test_a_library_outlives_its_compiler(compiler, monkeypatch):
    path = building.build()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert building.find_compiler() is None
    assert building.find_library() == path


@pytest.fixture
def brought(compiler, tmp_path, monkeypatch):
    """The library in a wheel, from which kmem is installed."""
    package = tmp_path / "kmem"
    shutil.copytree(building.sources_folder(), package / "custom_ops")
    monkeypatch.setattr(
        building, "sources_folder", lambda: package / "custom_ops"
    )
    return building.build_for_wheel(package)


def test_a_wheels_library_is_for_its_tensorflow_and_needs_no_compiler(
    brought, monkeypatch
):
    assert tf.version.VERSION in brought.name
    cache.clear()
    monkeypatch.setenv("CXX", "/bin/false")
    assert building.find_library() == building.build() == brought
    # Where the paths and the C library are others.
    monkeypatch.setattr(tf.sysconfig, "get_lib", lambda: "/elsewhere")
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.99")
    assert building.find_library() == brought
    monkeypatch.setattr(tf.version, "GIT_VERSION", "another")
    assert building.find_library() is None


def test_what_the_user_builds_comes_before_what_the_wheel_brought(brought):
    cache.clear()
    assert building.build() == brought
    own = building.build(force=True)
    assert own != brought
    assert building.find_library() == own


def test_the_cache_folder_is_the_users_alone(compiler):
    folder = building.build().parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so"]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(compiler, mode):
    folder = cache.folder()
    folder.mkdir(parents=True)
    folder.chmod(mode)
    for function in (building.find_library, building.build):
        with pytest.raises(
            building.NativeLibraryError,
            match="can be written to by other users",
        ):
            function()
    native.prepare()
    assert num_calls(compiler) == 0


def test_a_folder_of_somebody_else_is_refused(compiler, monkeypatch):
    building.build()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(
        building.NativeLibraryError, match="belongs to another user"
    ):
        building.find_library()


def test_a_cache_folder_that_cannot_be_made_is_named(compiler, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(
        building.NativeLibraryError, match="cache folder /dev/null/kmem"
    ):
        building.build()


def test_a_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.folder() == pathlib.Path("/home/somebody/.cache/kmem")


def test_a_compiler_that_fails_is_quoted(tmp_path, compiler):
    script = pathlib.Path(os.environ["CXX"])
    script.write_text("#!/bin/sh\necho 'error: no such header' >&2; exit 1\n")
    with pytest.raises(building.NativeLibraryError) as caught:
        building.build()
    message = str(caught.value)
    assert "error: no such header" in message
    assert str(script) in message
    assert building._sources(".cc")[0].name in message
    assert building.find_library() is None
    assert {path.suffix for path in cache.folder().iterdir()} == {
        "",  # The lock.
        ".failed",
    }


def test_without_a_compiler_the_error_says_how_to_get_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    with pytest.raises(building.NativeLibraryError) as caught:
        building.build()
    for command in ("apt-get install g++", "dnf install", "conda install"):
        assert command in str(caught.value)


def test_tensorflows_own_pool_is_refused(native_library, monkeypatch):
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "1")
    with pytest.raises(
        building.NativeLibraryError, match="TF_CPU_ALLOCATOR_USE_BFC must not"
    ):
        native.stats()


def test_nothing_is_built_from_the_tests_of_the_sources():
    sources = building._sources(".cc", ".h")
    assert "budget_allocator.cc" in {path.name for path in sources}
    assert not [path for path in sources if path.parent.name == "tests"]


@needs_compiler
@pytest.mark.parametrize("name", ["budget_test", "storage_test", "pool_test"])
def test_the_core_passes_its_own_tests(tmp_path, name):
    folder = building.sources_folder()
    command = [
        *building.find_compiler(),
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
    print(kmem.base.native.is_registered())
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


FIRST_EXAMPLE = """
    import keras
    import kmem
    import numpy as np

    layers = [keras.layers.Dense(64, "tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", "mse")
    x = np.ones((16, 8), "float32")
    y = np.ones((16, 64), "float32")
    model = kmem.wrap(model)
    model.fit(x, y, verbose=0, memory_budget="8GB")
    print(kmem.base.native.is_registered(), model.memory_report.is_measured)
"""


def test_the_first_run_builds_at_import_and_counts_as_all_do(
    native_library, fresh_python, tmp_path
):
    # Compiled before, as a busy machine takes minutes.
    script, calls = instant_compiler(tmp_path, building.find_library())
    for _ in range(2):
        status, output, errors = fresh_python.run(
            FIRST_EXAMPLE, CXX=str(script)
        )
        assert (status, output) == (0, "True True\n"), errors
        assert "kmem" not in errors
    assert num_calls(calls) == 1


def test_a_compiler_that_fails_is_not_run_at_each_import(
    monkeypatch, compiler, tmp_path
):
    failing = tmp_path / "failing"
    failing.write_text(f"#!/bin/sh\necho x >> {tmp_path / 'calls'}\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))

    native.prepare()
    calls = (tmp_path / "calls").read_text()
    native.prepare()

    assert calls and (tmp_path / "calls").read_text() == calls
    with pytest.raises(building.NativeLibraryError, match="compiler failed"):
        building.build()


COMMAND = """
import sys
from kmem.commands.cli import main

sys.exit(main())
"""


@pytest.mark.parametrize("command", ["-m kmem", "-m kmem.commands.cli", "kmem"])
def test_the_command_builds_nothing_as_it_is_imported(
    compiler, tmp_path, command
):
    (tmp_path / "kmem").write_text(COMMAND)
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *command.split(), "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    imported = {line.split()[-1] for line in process.stderr.splitlines()}
    assert "kmem.base.native" in imported
    assert not imported & {"tensorflow", "keras", "numpy"}
    assert num_calls(compiler) == 0


def test_a_command_builds_before_its_first_operation(
    native_library, fresh_python, tmp_path, saved_model
):
    script, calls = instant_compiler(tmp_path, building.find_library())
    status, output, errors = fresh_python.run(
        f"""
        import sys
        sys.argv = ["kmem", "plan", {saved_model!r}, "--batch", "8"]
        from kmem.base import native
        from kmem.commands import cli
        print(native.is_registered())
        print(cli.main(), native.is_registered())
        """,
        CXX=str(script),
    )
    assert status == 0, errors
    assert output.startswith("False\n") and output.endswith("0 True\n")
    assert num_calls(calls) == 1


EVERYTHING_ELSE = """
    import sys
    import warnings
    import keras
    import numpy as np
    import tensorflow as tf
    {first}
    import kmem

    def made():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(64, "tanh") for _ in range(8)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("sgd", "mse")
        return kmem.wrap(model)

    x = np.random.default_rng(0).normal(size=(4096, 64)).astype("float32")

    def fit(**options):
        model = made()
        model.fit(x, x, 4096, shuffle=False, verbose=0, **options)
        return model

    def distance(model):
        pairs = zip(plain.get_weights(), model.get_weights(), strict=True)
        return max(abs(one - other).max() for one, other in pairs)

    def refused(run):
        try:
            run()
        except RuntimeError as error:
            return {reason!r} in str(error)

    plain = fit()
    assert distance(fit(microbatches=4)) < 1e-6
    assert distance(fit(gradient_accumulation_steps=2)) == 0
    assert distance(fit(mixed_precision="bfloat16")) < 1e-2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert distance(fit(remat=0.8)) == 0
        assert distance(fit(remat="auto")) == 0
        easy = fit(memory_budget="8GB")
        assert distance(easy) == 0
        tight = fit(memory_budget="18MB")
        assert distance(tight) < 1e-6
        plan = kmem.plan(made(), (x, x), 0.8)
        assert plan.segments
        assert plan.predicted_peak_bytes <= 0.8 * plan.unplanned_peak_bytes
        assert kmem.profile(made(), (x, x)).operations[0].forward_seconds > 0
    texts = [str(each.message) for each in caught]
    texts = [text for text in texts if "kmem cannot count" in text]
    assert len(texts) == 1 and {reason!r} in texts[0], texts
    assert not easy.memory_report.is_measured
    assert easy.memory_report.chosen.options == easy.memory_report.plain.options
    assert tight.memory_report.chosen.options.num_parts > 1
    assert tight.memory_report.chosen.predicted_peak_bytes < 18e6
    assert "is not undone" in tight.memory_report.summary()
    try:
        fit(memory_budget="1MB")
    except ValueError as error:
        assert "`memory_budget` must be at least" in str(error), error
    model = made()
    weights = model.get_weights()
    assert refused(lambda: model.fit(x, x, verbose=0, dtr=True))
    assert all(map(np.array_equal, weights, model.get_weights()))
    assert refused(lambda: kmem.memory.peak("CPU"))
    assert refused(lambda: kmem.memory.limit("1GB", "CPU"))
    print(easy.memory_report.chosen.predicted_peak_bytes)
"""


@pytest.fixture(scope="module")
def counted_peak_bytes():
    """The peak of the steps above, where bytes are counted."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "tanh") for _ in range(8)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile("sgd", "mse")
    x = np.zeros((4096, 64), "float32")
    model = kmem.wrap(model)
    model.fit(x, x, 4096, verbose=0, memory_budget="8GB")
    report = model.memory_report
    return report.chosen.predicted_peak_bytes - report.in_use_bytes


@pytest.mark.parametrize(
    ("first", "compiler", "reason"),
    [
        ("", "/bin/false", "The C++ compiler failed"),
        ("", "/nowhere/c++", "kmem needs a C++ compiler"),
        ("tf.constant(1.0) + 1.0", None, "before the first TensorFlow"),
    ],
    ids=["fails", "none", "late"],
)
def test_where_bytes_cannot_be_counted_they_are_predicted(
    native_library,
    counted_peak_bytes,
    fresh_python,
    tmp_path,
    first,
    compiler,
    reason,
):
    if compiler is None:
        script, _ = instant_compiler(tmp_path, building.find_library())
        compiler = str(script)
    code = EVERYTHING_ELSE.format(first=first, reason=reason)
    status, output, errors = fresh_python.run(code, CXX=compiler)
    assert status == 0, errors
    # Beside what other tests left in memory.
    assert int(output) == pytest.approx(counted_peak_bytes, rel=0.1)


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


@pytest.mark.parametrize("is_notebook", [False, True])
def test_a_late_import_in_a_notebook_says_what_to_do(
    native_library, python, is_notebook
):
    status, _, errors = python.run(
        f"""
        import sys
        import types
        if {is_notebook}:
            sys.modules["ipykernel"] = types.ModuleType("ipykernel")
        import tensorflow as tf
        tf.constant(1) + 1
        import kmem
        """
    )
    assert status == 0, errors
    line = "restart it, and import kmem first.\n"
    assert errors.count(line) == is_notebook


def test_sources_are_found_in_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "kmem"
    shutil.copytree(building.sources_folder(), package / "custom_ops")
    monkeypatch.setattr(building, "__file__", str(package / "base/building.py"))
    assert building.sources_folder() == package / "custom_ops"
