"""Collectives give in every process what their names say."""

import contextlib
import io
import pickle
import sys

import collectives
import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem.commands import cli
from kmem.launching import cluster
from kmem.sharding.engine import Engine
from kmem.sharding.engine import engine

SIZE = 2


# What a user writes: nothing in it is about processes but `sharding`.
SCRIPT = """
x = tf.random.stateless_normal((16, 6), (0, 1))
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(5),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Dense(2),
    ]
)
model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)
history = kmem.wrap(model).fit(
    data, epochs=2, shuffle=False, sharding="full", verbose=0
)
"""
LAUNCHED = f"""
import kmem
import keras
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(2)
{SCRIPT}
print("losses", *history.history["loss"])
print("processes", kmem.ShardedStrategy().num_processes)

import pathlib, pickle, sys
sys.path += {sys.path!r}
import collectives
results = collectives.main()
path = pathlib.Path(sys.argv[1], str(results["rank"]))
path.write_bytes(pickle.dumps(results))
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The lines that a script prints, and what collectives give, in processes
    that start once for both."""
    folder = tmp_path_factory.mktemp("launched")
    path = folder / "train.py"
    path.write_text(LAUNCHED)
    command = ["launch", "--processes", str(SIZE), str(path), str(folder)]
    output = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
    ):
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert cli.main(command) == 0
    results = [
        pickle.loads((folder / str(rank)).read_bytes()) for rank in range(SIZE)
    ]
    return output.getvalue().splitlines(), results


@pytest.fixture(scope="module")
def results(launched):
    return launched[1]


def test_processes_are_numbered_as_tf_config_says(results):
    assert [(r["rank"], r["size"]) for r in results] == [(0, SIZE), (1, SIZE)]


@pytest.mark.parametrize("dtype", collectives.DTYPES)
@pytest.mark.parametrize("mode", [0, 1], ids=["eager", "graph"])
def test_collectives_of_every_dtype(results, dtype, mode):
    own = [np.arange(3) + 10 * rank for rank in range(SIZE)]
    rows = np.arange(2 * SIZE).reshape(SIZE, 2)
    for rank, result in enumerate(results):
        gathered, scattered, total, highest = result[dtype][mode]

        np.testing.assert_array_equal(gathered, own)
        np.testing.assert_array_equal(scattered, SIZE * rows[rank])
        np.testing.assert_array_equal(total, sum(own))
        np.testing.assert_array_equal(highest, own[-1])


def test_a_large_array_is_sent_in_pieces(results):
    row = np.arange(collectives.LARGE) % 7
    for rank, result in enumerate(results):
        for scattered in result["large"]:
            want = SIZE * (row + rank) + 10 * sum(range(SIZE))
            np.testing.assert_array_equal(scattered, want)


def test_all_are_given_what_the_first_process_has(results):
    for result in results:
        for name, value in result.items():
            if name.startswith("broadcast"):
                assert value == [1, 0]


@pytest.fixture(autouse=True)
def _no_engine_remains():
    yield
    engine.cache_clear()


def test_a_process_alone_needs_no_others(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    engine.cache_clear()

    assert type(engine()) is Engine
    assert engine().size == 1


def test_tasks_of_other_kinds_are_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": [], "ps": []}}')
    engine.cache_clear()

    with pytest.raises(ValueError, match="kinds `chief` and `worker`.*ps"):
        engine()


def test_joining_late_is_refused(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1", "b:1"]},'
        ' "task": {"type": "worker", "index": 0}}',
    )
    engine.cache_clear()
    tf.zeros([])

    with pytest.raises(RuntimeError, match="before TensorFlow's first"):
        engine()


@pytest.mark.parametrize("config", ["{", "[]", "null", "[", '{"cluster": []}'])
def test_a_wrong_tf_config_is_refused(config, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config)
    engine.cache_clear()

    with pytest.raises(ValueError, match="TF_CONFIG must be a JSON object"):
        engine()


@pytest.mark.parametrize("text", ["abc", "-1", "0", "nan", "inf", ""])
def test_a_wrong_timeout_is_refused(text, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", cluster.tf_config(["a:1", "b:1"], 0))
    monkeypatch.setenv("KMEM_TIMEOUT_SECONDS", text)
    engine.cache_clear()

    with pytest.raises(ValueError, match="Received: KMEM_TIMEOUT_SECONDS="):
        engine()


def test_a_script_needs_no_more_than_the_launcher(launched):
    lines, _ = launched
    alone = {"kmem": kmem, "keras": keras, "tf": tf}
    exec(SCRIPT, alone)

    for rank in range(SIZE):
        assert f"[{rank}] processes {SIZE}" in lines
        (line,) = [x for x in lines if x.startswith(f"[{rank}] losses")]
        losses = [float(loss) for loss in line.split()[2:]]
        want = alone["history"].history["loss"]
        np.testing.assert_allclose(losses, want, rtol=1e-5)
