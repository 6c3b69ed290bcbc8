"""`fit(sharding=...)` begins, ends and is refused as it should be.

In one process, which has all of every shard.
"""

import functools
from contextlib import nullcontext

import cases
import keras
import numpy as np
import pytest
import sharding_cases
import tensorflow as tf
from own_gradients import LOOKS_FOR_VARIABLES
from reference import relative_error
from reference import state
from reference import train
from reference import whole
from versions import IS_KERAS_3_12

import kmem
from kmem import remat
from kmem.sharding import training
from kmem.sharding.slices import Slices
from kmem.sharding.variables import ShardedVariable

STAGES = ("full", "gradients", "optimizer")


class _Raise(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt


def fit(model, arguments, **options):
    options = {"sharding": "full", "verbose": 0, "shuffle": False} | options
    return kmem.wrap(model).fit(**arguments | options)


@functools.cache
def penalized(mode):
    """What training without shards comes to."""
    return whole(cases.penalties("sum"), mode=mode)[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_training_is_that_without_shards(stage, mode):
    model, _ = train(
        cases.penalties("sum"), mode=mode, batch_size=20, sharding=stage
    )

    assert relative_error(state(model), penalized(mode)) < 1e-12


@pytest.mark.parametrize(
    "mode, stage", [("graph", "full"), ("eager", "gradients")]
)
@pytest.mark.parametrize("looks", [*LOOKS_FOR_VARIABLES, remat.recompute])
def test_what_looks_for_variables_finds_those_of_a_unit(looks, mode, stage):
    option = kmem.Sharding(stage, units=("again",))
    case = functools.partial(sharding_cases.own_gradients, looks)
    want, _ = train(case, mode=mode)

    model, _ = train(case, mode=mode, sharding=option)

    assert relative_error(state(model), state(want)) < 1e-12


@pytest.mark.parametrize("looks", [keras.remat, remat.recompute])
def test_what_runs_again_reads_weights_as_they_travelled(looks):
    def weights(wrap):
        option = kmem.Sharding(gather_dtype="bfloat16", units=("again",))
        case = functools.partial(sharding_cases.own_gradients, wrap)
        return state(train(case, sharding=option)[0])

    assert relative_error(weights(looks), weights(lambda f: f)) < 1e-12


def _of_names(model):
    model.optimizer.exclude_from_weight_decay(var_names=["kernel"])


def _of_paths(model):
    names = [model.layers[0].name]
    model.optimizer.exclude_from_weight_decay(var_names=names)


def _of_weights(model):
    model.optimizer.exclude_from_weight_decay(var_list=model.weights[:1])


class OfMatrices(keras.optimizers.AdamW):
    def _use_weight_decay(self, variable):
        return len(variable.shape) > 1


def decaying(exclude, kind, scope=nullcontext):
    with scope():
        model = cases.dense(optimizer=kind(1e-2, weight_decay=0.5))
    exclude(model)
    return model, cases.regression()


@functools.cache
def decayed(exclude, kind):
    """What training without shards comes to."""
    model, _ = train(functools.partial(decaying, exclude, kind))
    return state(model)


@pytest.mark.parametrize("stage", [*STAGES, "built in shards"])
@pytest.mark.parametrize(
    "exclude, kind",
    [
        (_of_names, keras.optimizers.AdamW),
        (_of_paths, keras.optimizers.AdamW),
        (_of_weights, keras.optimizers.AdamW),
        (lambda model: None, OfMatrices),
    ],
)
def test_the_same_weights_decay(exclude, kind, stage):
    scope = nullcontext
    if stage == "built in shards":
        scope, stage = kmem.ShardedStrategy().scope, "full"
    case = functools.partial(decaying, exclude, kind, scope)

    model, _ = train(case, sharding=stage)

    assert relative_error(state(model), decayed(exclude, kind)) < 1e-12


@pytest.mark.exhaustive
def test_a_plan_s_segments_gather_as_they_run_again():
    want, _ = whole(cases.plain)

    model, _ = train(cases.plain, batch_size=20, sharding="full", remat="auto")

    assert relative_error(state(model), want) < 1e-12


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_is_plain_before_and_after(stage):
    model, arguments = cases.plain()
    model.fit(**arguments, verbose=0)
    values = [v.value for v in (*model.weights, *model.optimizer.variables)]
    function = model.train_function
    before = model.predict(arguments["x"], verbose=0)

    fit(model, arguments, sharding=stage)
    fit(model, arguments, sharding=stage)

    after = [v.value for v in (*model.weights, *model.optimizer.variables)]
    assert all(a is b for a, b in zip(after, values, strict=True))
    assert model.train_function is function
    changed = model.predict(arguments["x"], verbose=0)
    np.testing.assert_allclose(
        changed, model(arguments["x"]), rtol=1e-5, atol=1e-6
    )
    assert np.max(np.abs(changed - before)) > 0


def test_an_error_leaves_a_process_that_is_alone_the_whole_model():
    model, arguments = cases.plain()
    with pytest.raises(KeyboardInterrupt):
        fit(model, arguments, callbacks=[_Raise()])
    assert {type(v) for v in model.weights} == {keras.Variable}
    np.testing.assert_allclose(
        model.predict(arguments["x"], verbose=0),
        model(arguments["x"]),
        rtol=1e-5,
        atol=1e-6,
    )


class _LeaveNoMemory(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        kmem.memory.limit(kmem.memory.current("CPU"), "CPU")


@pytest.mark.parametrize("stage", STAGES)
def test_a_process_that_is_alone_needs_no_memory_to_be_whole(
    stage, native_library
):
    """Or a `fit` could raise after its updates, which nobody undoes."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512)])
    model.compile("adam", "mse")
    x = np.ones((8, 64), "float32")
    arguments = {"x": x, "y": np.tile(x, 8), "batch_size": 8}
    fit(model, arguments, sharding=stage)

    fit(model, arguments, sharding=stage, callbacks=[_LeaveNoMemory()])

    with pytest.raises(tf.errors.ResourceExhaustedError):
        tf.zeros(model.layers[0].kernel.shape)
    kmem.memory.limit(None, "CPU")
    assert {type(v) for v in model.variables} == {keras.Variable}


def test_shards_that_an_error_has_left_are_taken_up_by_the_next_fit(
    monkeypatch,
):
    model, arguments = cases.plain()
    with monkeypatch.context() as others, pytest.raises(KeyboardInterrupt):
        # As where there are others.
        others.setattr(training, "make_whole", lambda model: None)
        fit(model, arguments, callbacks=[_Raise()])
    assert all(isinstance(v, ShardedVariable) for v in model.weights)
    left = model.get_weights()

    kmem.wrap(model).fit(**arguments, verbose=0, epochs=0)

    assert {type(v) for v in model.weights} == {keras.Variable}
    for a, b in zip(model.get_weights(), left, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_callback_trains_in_shards():
    model, arguments = cases.plain()
    other, _ = cases.plain()
    other.set_weights(model.get_weights())

    model.fit(
        **arguments,
        callbacks=[kmem.callbacks.Sharding("full")],
        shuffle=False,
        verbose=0,
    )
    fit(other, arguments, sharding=None)

    assert {type(v) for v in model.weights} == {keras.Variable}
    assert relative_error(state(model), state(other)) < 1e-6


class _Cut(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        found = (*self.model.weights, *self.model.optimizer.variables)
        self.cut = [v for v in found if isinstance(v, ShardedVariable)]


def test_the_smallest_weights_stay_whole():
    model, arguments = sharding_cases.wide()
    callback = _Cut()

    fit(model, arguments, callbacks=[callback])

    # A kernel, and Adam's two variables of it.
    assert [v.shape for v in callback.cut] == 3 * [(3000, 2)]


def test_named_layers_are_gathered_as_one():
    model, arguments = cases.plain()

    fit(model, arguments, sharding=kmem.Sharding(units=(model.layers[0].name,)))


def test_a_model_built_in_shards_stays_in_them():
    strategy = kmem.ShardedStrategy()
    with strategy.scope():
        model, arguments = cases.plain()
    fit(model, arguments)
    assert all(isinstance(v, ShardedVariable) for v in model.weights)
    fit(model, arguments)

    with pytest.raises(ValueError, match="must be trained with `sharding`"):
        fit(model, arguments, sharding=None)
    with pytest.raises(ValueError, match="needs whole weights"):
        fit(model, arguments, sharding="optimizer")


def _compiled(**arguments):
    return lambda: cases.dense(**arguments)


def _updated_by(name):
    return lambda: cases.dense(optimizer=getattr(keras.optimizers, name)())


class OfCentered(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        grads = [g - keras.ops.mean(g, axis=0) for g in grads]
        return super().apply(grads, trainable_variables)


class Half(keras.constraints.NonNeg):
    def __call__(self, w):
        return w / 2


def _of_half():
    model = cases.dense()
    model.layers[0].kernel.constraint = Half()
    return model


def _overwritten():
    model = cases.dense()
    model.layers[0].kernel.overwrite_with_gradient = True
    return model


def _constrained():
    return cases.constraints()[0]


def _spectral():
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(1))
    model = keras.Sequential([keras.Input((5,)), dense])
    model.compile("sgd", "mse")
    return model


def _replicated():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return cases.dense()


@pytest.mark.parametrize(
    "make, options, message",
    [
        (_updated_by("Adafactor"), {}, "optimizer=Adafactor"),
        (_updated_by("Lamb"), {}, "optimizer=Lamb"),
        (_updated_by("Muon"), {}, "optimizer=Muon"),
        (_compiled(optimizer=OfCentered()), {}, "whose `apply` is its own"),
        (_of_half, {}, "Half"),
        (_overwritten, {}, "overwrite_with_gradient=True"),
        (_compiled(jit_compile=True), {}, "jit_compile=True"),
        (_constrained, {}, "which `NonNeg` does"),
        (_replicated, {}, "MirroredStrategy"),
        (_spectral, {"sharding": "full"}, 'use `sharding="optimizer"`'),
        (_spectral, {"sharding": "gradients"}, 'use `sharding="optimizer"`'),
        (
            _compiled(),
            {"sharding": kmem.Sharding(units=("nobody",))},
            "names of layers.*nobody",
        ),
        (
            _compiled(optimizer=keras.optimizers.SGD(use_ema=True)),
            {"callbacks": [keras.callbacks.SwapEMAWeights()]},
            "cannot be used with `SwapEMAWeights`",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(make, options, message):
    model = make()

    with pytest.raises(ValueError, match=message):
        fit(model, cases.regression(), **options)

    assert not any(isinstance(v, ShardedVariable) for v in model.weights)


def _unbuilt():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    return kmem.wrap(model)


@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_a_model_is_built_of_its_first_batch(way):
    def weights(sharding):
        model, data = _unbuilt(), cases.regression()
        if way == "fit":
            fit(model, data, sharding=sharding)
        else:
            options = sharding and kmem.MemoryOptions(sharding=sharding)
            model.memory_options = options
            model.train_on_batch(**data)
        return model.get_weights()

    for plain, in_shards in zip(weights(None), weights("full"), strict=True):
        np.testing.assert_allclose(in_shards, plain, atol=1e-6)


def test_a_model_whose_batches_are_not_known_is_refused_unless_it_is_built():
    callback = kmem.callbacks.MemoryOptions(sharding="full")

    with pytest.raises(ValueError, match="a model that is built"):
        fit(_unbuilt(), cases.regression(), sharding=None, callbacks=[callback])
    ragged = tf.ragged.constant([[1.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="a model that is built"):
        fit(_unbuilt(), {"x": ragged, "y": tf.zeros([2, 3])})


def test_keras_distribution_is_refused():
    if IS_KERAS_3_12:
        pytest.skip("Keras 3.12 has no distribution on TensorFlow")
    distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    model, arguments = cases.plain()
    keras.distribution.set_distribution(distribution)
    try:
        with pytest.raises(ValueError, match="`keras.distribution` exclude"):
            fit(model, arguments)
    finally:
        keras.distribution.set_distribution(None)


def test_layers_that_see_one_process_s_examples_are_named_once(monkeypatch):
    class AsOfTwo(Slices):
        def __init__(self, *args):
            super().__init__(*args)
            self.num_processes = 2

    monkeypatch.setattr(training, "Slices", AsOfTwo)
    normalize = keras.layers.BatchNormalization
    model = keras.Sequential(
        [
            keras.Input((5,)),
            normalize(name="alone"),
            normalize(synchronized=True),
            keras.layers.Dense(3),
        ]
    )
    model.compile("sgd", "mse")

    with pytest.warns(UserWarning, match="each process's own") as warnings:
        fit(model, cases.regression())
    fit(model, cases.regression())

    told = [each for each in warnings if each.category is UserWarning]
    (message,) = [str(warning.message) for warning in told]
    assert "synchronized=True" in message
    assert message.endswith("2 processes, layers alone (BatchNormalization)")


def test_frozen_weights_are_in_shards_too_and_do_not_change():
    model, arguments = cases.plain()
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    before = model.get_weights()
    kinds = set()

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kinds.update(type(v) for v in self.model.weights)

    fit(model, arguments, callbacks=[Look()])

    assert kinds == {ShardedVariable}
    changes = [
        np.max(np.abs(a - b))
        for a, b in zip(model.get_weights(), before, strict=True)
    ]
    assert [change > 0 for change in changes] == [False, False, True, True]
    model.layers[0].trainable = True
    model.compile("sgd", "mse")
    fit(model, arguments)
    assert np.max(np.abs(model.get_weights()[0] - before[0])) > 0
