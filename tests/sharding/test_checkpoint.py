"""A checkpoint of any number of processes is loaded by any other.

The processes are threads here, each with a model of its own. They take turns:
TensorFlow's dispatch of operations is not safe where several threads meet a
kind of variable for the first time.
"""

import concurrent.futures
import json
import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem import distributed
from kmem import precision
from kmem.sharding import agreeing
from kmem.sharding import checkpoint
from kmem.sharding import variables
from kmem.sharding.engine import Engine
from kmem.sharding.variables import MirroredVariable
from kmem.sharding.variables import ShardedVariable
from kmem.step.accumulation import build_optimizer

# Of the seeds of two processes.
DISTANCE = 3_000_000_000


class Threads(Engine):
    """Collectives of threads, which meet in a list."""

    def __init__(self, size, rank, turn, barrier, sent):
        super().__init__(size, rank)
        self._turn = turn
        self._barrier = barrier
        self._sent = sent

    def gather(self, tensor, name):
        self._sent[self.rank] = (name, tf.convert_to_tensor(tensor))
        self._meet()
        names, tensors = zip(*self._sent, strict=True)
        self._meet()
        assert set(names) == {name}
        return tf.stack(tensors)

    def _meet(self):
        self._turn.release()
        try:
            self._barrier.wait(60)
        finally:
            self._turn.acquire()

    def broadcast(self, tensor, name):
        return self.gather(tensor, name)[0]


def run(size, function, monkeypatch):
    """Calls it with the rank, in threads that are processes to kmem."""
    own = threading.local()
    turn, barrier = threading.Lock(), threading.Barrier(size)
    sent = [None] * size

    def call(rank):
        own.engine = Threads(size, rank, turn, barrier, sent)
        with turn:
            try:
                return function(own.engine)
            except BaseException:
                barrier.abort()
                raise

    with (
        monkeypatch.context() as patch,
        concurrent.futures.ThreadPoolExecutor(size) as pool,
    ):
        for module in (checkpoint, agreeing):
            patch.setattr(module, "engine", lambda: own.engine)
        calls = [pool.submit(call, rank) for rank in range(size)]
        concurrent.futures.wait(calls)
    # The first cause, not that it was missed.
    errors = [each.exception() for each in calls if each.exception()]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [each.result() for each in calls]


def make_model(seed=0, units=5):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(units, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=seed),
            layers.Dense(1, use_bias=False, dtype="bfloat16"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.1 + seed), "mse", metrics=["mae"])
    return model


def trained(seed=0, units=5):
    """Numbers as training might leave them."""
    model = make_model(seed, units)
    build_optimizer(model.optimizer, model.trainable_variables)
    rng = np.random.default_rng(seed)
    for _, variable in checkpoint._variables(model):
        variable.assign(rng.integers(100, size=variable.shape))
    return model


def seeds(model):
    return [v for v in model.variables if v.name == "seed_generator_state"]


def shard(model, group, mirrored=False):
    """As `fit(sharding=...)` does."""
    slots = [v for v in model.optimizer.variables if len(v.shape)]
    for number, variable in enumerate(model.trainable_variables + slots):
        is_slot = number >= len(model.trainable_variables)
        own = mirrored and not is_slot
        variables.shard(variable, group, f"variable {number}", own)
    for seed in seeds(model):
        seed.assign([seed[0] + DISTANCE * group.rank, seed[1]])


def unshard(model):
    for variable in model.variables + model.optimizer.variables:
        if isinstance(variable, ShardedVariable):
            variables.restore(variable)


def state(model):
    """Its numbers, without its metrics."""
    return [
        np.asarray(variable.value)
        for _, variable in checkpoint._variables(model)
    ]


def assert_equal(found, wanted, seeds_too=True):
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        if seeds_too or x.dtype != "int64" or x.shape != (2,):
            np.testing.assert_array_equal(x, y)


def content(folder):
    return json.loads((folder / "index.json").read_text())["content"]


@pytest.fixture(scope="module")
def save_in(tmp_path_factory):
    """Saves one model from several processes; returns its numbers."""
    saved = {}

    def save(size, folder, mirrored=False, units=5):
        key = size, mirrored, units
        if key not in saved:
            origin = tmp_path_factory.mktemp("saved")
            with pytest.MonkeyPatch.context() as patch:
                saved[key] = origin, save_anew(origin, patch, *key)
        origin, wanted = saved[key]
        shutil.copytree(origin, folder, dirs_exist_ok=True)
        return wanted

    return save


def save_anew(folder, monkeypatch, size, mirrored, units):
    models = [trained(units=units) for _ in range(size)]
    wanted = state(models[0])

    def save(group):
        model = models[group.rank]
        if size > 1:
            shard(model, group, mirrored)
        distributed.save(model, folder, {"epoch": 3})

    run(size, save, monkeypatch)
    return wanted


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("saved, loaded", [(1, 3), (3, 1), (2, 4), (4, 2)])
def test_any_number_of_processes_loads_it(
    saved, loaded, mirrored, tmp_path, monkeypatch, save_in
):
    wanted = save_in(saved, tmp_path, mirrored)
    models = [trained(seed=1) for _ in range(loaded)]

    def load(group):
        model = models[group.rank]
        if loaded > 1:
            shard(model, group, mirrored)
        assert distributed.load(model, tmp_path) == {"epoch": 3}
        for variable in model.trainable_variables:
            expected = MirroredVariable if mirrored else ShardedVariable
            assert loaded == 1 or type(variable) is expected
        unshard(model)
        return state(model), seeds(model)[0].numpy()

    found = run(loaded, load, monkeypatch)
    assert_equal(found[0][0], wanted)
    seed = found[0][1]
    for rank, (each, own_seed) in enumerate(found):
        assert_equal(each, wanted, seeds_too=False)
        assert own_seed[0] == seed[0] + DISTANCE * rank
        assert own_seed[1] == seed[1]


def test_each_process_writes_its_share(tmp_path, save_in):
    wanted = save_in(4, tmp_path, units=500)
    index = content(tmp_path)
    sizes = [file["num_bytes"] for file in index["files"]]
    assert sum(sizes) == sum(x.nbytes for x in wanted)
    # The first has the statistics of normalization, too: 2 x 500 numbers.
    assert sizes[0] - 4 * 1000 <= 1.01 * max(sizes[1:])
    assert max(sizes[1:]) <= sum(sizes) / 4
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["index.json", *(file["name"] for file in index["files"])]
    )


def test_an_optimizer_is_built_for_what_is_loaded(tmp_path):
    saved = trained()
    distributed.save(saved, tmp_path)
    model = make_model(seed=1)
    distributed.load(model, tmp_path)
    assert_equal(state(model), state(saved))


def test_a_model_without_an_optimizer_loads_the_weights(tmp_path):
    saved = trained()
    distributed.save(saved, tmp_path)
    model = keras.models.clone_model(saved)
    distributed.load(model, tmp_path)
    assert_equal(model.get_weights(), saved.get_weights())


def test_the_scale_of_a_loss_goes_on_in_any_number_of_processes(
    tmp_path, monkeypatch
):
    def overflow(model):
        x = np.full((8, 3), np.inf, "float32")
        options = {"mixed_precision": "float16", "verbose": 0}
        kmem.wrap(model).fit(x, x[:, :1], **options)
        return precision.scale_of(model.optimizer)

    models = [make_model(seed) for seed in range(5)]
    first, scale, steps = overflow(models[0])
    assert scale == first / 2
    distributed.save(models[0], tmp_path)

    def load_and_save(group):
        model = models[1 + group.rank]
        build_optimizer(model.optimizer, model.trainable_variables)
        shard(model, group)
        distributed.load(model, tmp_path)
        found = precision.scale_of(model.optimizer)
        distributed.save(model, tmp_path)
        return found

    found = run(3, load_and_save, monkeypatch)
    assert found == 3 * [[first, scale, steps]]
    run(1, lambda group: distributed.load(models[4], tmp_path), monkeypatch)
    assert overflow(models[4]) == [first, scale / 2, steps]


@pytest.mark.parametrize("harm", ["missing", "truncated", "altered"])
def test_a_harmed_file_is_named_and_nothing_is_loaded(
    harm, tmp_path, monkeypatch, save_in
):
    save_in(2, tmp_path)
    index = content(tmp_path)
    path = tmp_path / index["files"][1]["name"]
    contents = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(contents[:-1])
    else:
        path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    models = [trained(seed=1) for _ in range(4)]
    before = state(models[0])
    errors = {}

    def load(group):
        model = models[group.rank]
        shard(model, group)
        try:
            distributed.load(model, tmp_path)
        except (ValueError, RuntimeError) as error:
            errors[group.rank] = error
        unshard(model)
        return state(model)

    found = run(4, load, monkeypatch)
    for each in found:
        assert_equal(each, before, seeds_too=False)
    assert errors.keys() == {0, 1, 2, 3}
    for error in errors.values():
        if isinstance(error, ValueError):
            assert path.name in str(error)
        else:
            assert "an error in rank" in str(error)
    assert any(isinstance(error, ValueError) for error in errors.values())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    distributed.save(trained(), tmp_path)
    with pytest.raises(ValueError, match=r"kernel is float32 of \[3, 6\]"):
        distributed.load(make_model(units=6), tmp_path)
    other = keras.Sequential([keras.Input((3,)), layers.Dense(5)])
    with pytest.raises(ValueError, match="with 2 variables"):
        distributed.load(other, tmp_path)


def test_there_must_be_an_index(tmp_path, monkeypatch):
    model = make_model()
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        distributed.load(model, tmp_path)
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json \("):
        distributed.load(model, tmp_path)
    (tmp_path / "index.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.files, "_FORMAT", 7)
        distributed.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"index\.json \(format=7\)"):
        distributed.load(model, tmp_path)


def paths(folder):
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def others():
    """Models of other numbers, whose optimizer is built, and is not."""
    return trained(seed=1), make_model(seed=1)


def assert_refused(folder, named, models):
    """No model is changed."""
    for model in models:
        before = state(model)
        with pytest.raises(ValueError, match="copy the checkpoint again") as e:
            distributed.load(model, folder)
        assert named.name in str(e.value)
        assert_equal(state(model), before)


def test_a_flipped_bit_is_found_in_any_file(tmp_path, save_in, others):
    save_in(3, tmp_path)
    rng = np.random.default_rng(0)
    model = trained(seed=1)
    before = state(model)
    for path in paths(tmp_path):
        contents = path.read_bytes()
        for bit in rng.integers(8 * len(contents), size=150):
            flipped = bytearray(contents)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match="copy the checkpoint") as e:
                distributed.load(model, tmp_path)
            assert path.name in str(e.value)
        assert_equal(state(model), before)
        assert_refused(tmp_path, path, others)
        path.write_bytes(contents)
    assert distributed.load(model, tmp_path) == {"epoch": 3}


@pytest.mark.parametrize("number", range(4))
def test_what_is_not_as_it_was_written_is_found(
    number, tmp_path, save_in, others
):
    ours, foreign = tmp_path / "ours", tmp_path / "foreign"
    save_in(3, ours)
    save_in(3, foreign, units=6)
    path, other = paths(ours)[number], paths(foreign)[number]
    contents = path.read_bytes()
    path.write_bytes(contents[: len(contents) // 2])
    assert_refused(ours, path, others)
    path.write_bytes(contents + b" ")
    assert_refused(ours, path, others)
    path.write_bytes(other.read_bytes())
    if path.name == "index.json":
        # Its files are missing.
        assert_refused(ours, paths(foreign)[1], others)
    else:
        assert_refused(ours, path, others)
        path.unlink()
        assert_refused(ours, path, others)


def named(*names, optimizer=None):
    stack = [layers.Dense(4, name=name) for name in names]
    model = keras.Sequential([keras.Input((4,)), *stack], name="stack")
    model.compile(optimizer or keras.optimizers.Adam(), "mse")
    build_optimizer(model.optimizer, model.trainable_variables)
    return model


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda: named("b", "a"), "stack/b/kernel in this place.*stack/a/ker"),
        (lambda: named("a_3", "b_2"), None),
        (lambda: named("a", "b", optimizer="adamw"), "AdamW: .* Adam$"),
        (
            lambda: named(
                "a", "b", optimizer=keras.optimizers.Adam(amsgrad=True)
            ),
            "with 14 variables.* with 10$",
        ),
        (lambda: named("a", "c"), "stack/c/kernel in this place.*stack/b/ker"),
    ],
)
@pytest.mark.parametrize("is_built", [True, False])
def test_layers_and_optimizer_are_those_that_were_saved(
    other, message, is_built, tmp_path
):
    distributed.save(named("a", "b"), tmp_path)
    model = other()
    if not is_built:
        kind, config = type(model.optimizer), model.optimizer.get_config()
        model.compile(kind.from_config(config), "mse")
    before = state(model)
    if message is None:
        distributed.load(model, tmp_path)
        return
    with pytest.raises(ValueError, match=message):
        distributed.load(model, tmp_path)
    assert_equal(state(model), before)
    assert model.optimizer.built is is_built


def test_layers_that_keras_has_numbered_are_told_apart(tmp_path):
    def numbered(*order):
        keras.utils.clear_session()
        made = {i: layers.Dense(4) for i in range(12)}
        inputs = keras.Input((4,))
        outputs = inputs
        for i in order:
            outputs = made[i](outputs)
        return keras.Model(inputs, outputs)

    distributed.save(numbered(0, 9, 10), tmp_path)
    distributed.load(numbered(2, 3, 11), tmp_path)
    with pytest.raises(ValueError, match="in this place"):
        distributed.load(numbered(0, 10, 9), tmp_path)


def test_two_averages_of_one_class_of_optimizer_are_told_apart(tmp_path):
    momentum = keras.optimizers.SGD(momentum=0.9)
    distributed.save(named("a", "b", optimizer=momentum), tmp_path)
    average = keras.optimizers.SGD(use_ema=True)
    with pytest.raises(ValueError, match="kernel_average in this place"):
        distributed.load(named("a", "b", optimizer=average), tmp_path)


def test_files_of_others_stay(tmp_path):
    foreign = [tmp_path / name for name in ("a.part", "b.shard", "index.part")]
    for path in foreign:
        path.write_text("of another")
    for seed in range(2):
        distributed.save(trained(seed), tmp_path)
    assert [path.read_text() for path in foreign] == 3 * ["of another"]
    assert len(paths(tmp_path)) == 3 + 2


def test_an_index_of_others_is_not_replaced(tmp_path):
    path = tmp_path / "index.json"
    path.write_text('{"title": "a page"}')
    with pytest.raises(ValueError, match=r"Received: .*index\.json"):
        distributed.save(trained(), tmp_path)
    assert paths(tmp_path) == [path]
    assert path.read_text() == '{"title": "a page"}'


@pytest.mark.parametrize(
    "position",
    [{"epoch": np.int64(3)}, {"a": np.float32(0.1), "b": [1, None, "c"]}],
)
def test_a_position_is_what_json_holds(position, tmp_path):
    distributed.save(trained(), tmp_path, position)
    found = distributed.load(trained(), tmp_path)
    assert found == position
    assert not any(isinstance(x, np.generic) for x in found.values())


@pytest.mark.parametrize(
    "position", [[3], {3: 4}, {"a": (1, 2)}, {"a": np.zeros(3)}, {"a": {1}}, 0]
)
def test_another_position_is_refused_before_anything_is_written(
    position, tmp_path
):
    with pytest.raises(ValueError, match="Received: position="):
        distributed.save(trained(), tmp_path, position)
    assert paths(tmp_path) == []


def test_the_last_complete_checkpoint_stays(tmp_path, monkeypatch):
    first = trained()
    distributed.save(first, tmp_path)
    before = sorted(tmp_path.iterdir())

    def no_space(folder, content):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.files, "write_index", no_space)
        with pytest.raises(OSError, match="no space"):
            distributed.save(trained(seed=1), tmp_path)
    model = make_model(seed=2)
    distributed.load(model, tmp_path)
    assert_equal(state(model), state(first))
    distributed.save(model, tmp_path)
    after = sorted(tmp_path.iterdir())
    assert len(after) == len(before) == 2
    assert after != before


def test_an_error_in_one_process_is_one_in_all(tmp_path, monkeypatch):
    models = [trained() for _ in range(3)]
    errors = {}

    def save(group):
        folder = tmp_path if group.rank != 1 else tmp_path / "file"
        if group.rank == 1:
            folder.touch()
        try:
            distributed.save(models[group.rank], folder)
        except (OSError, RuntimeError) as error:
            errors[group.rank] = error

    run(3, save, monkeypatch)
    assert isinstance(errors[1], FileExistsError)
    assert "write a checkpoint together" in str(errors[0])
    assert "an error in rank 1" in str(errors[2])


@pytest.mark.parametrize("size", [1, 3])
def test_whole_weights_are_written_by_one_process(size, tmp_path, monkeypatch):
    path = tmp_path / "model.weights.h5"
    models = [trained() for _ in range(size)]
    wanted = state(models[0])

    def save(group):
        shard(models[group.rank], group)
        distributed.save_weights(models[group.rank], path)

    run(size, save, monkeypatch)
    assert list(tmp_path.iterdir()) == [path]
    model = trained(seed=1)
    model.load_weights(path)
    assert_equal(state(model), wanted, seeds_too=False)


def test_all_processes_learn_that_weights_cannot_be_written(
    tmp_path, monkeypatch
):
    models = [trained() for _ in range(2)]

    def save(group):
        shard(models[group.rank], group)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            distributed.save_weights(models[group.rank], tmp_path / "a.h5")
        return str(caught.value)

    own, other = run(2, save, monkeypatch)
    assert "must end in `.weights.h5`" in own
    assert "an error in rank 0" in other
