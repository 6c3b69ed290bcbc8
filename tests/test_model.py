"""`fit` takes options, and gives the model back as it was."""

import contextlib
import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from reference import relative_error
from reference import state

import kmem

KERAS_FUNCTIONS = ("train_function", "test_function", "predict_function")


def snapshot(model):
    """What Keras's own use of a model depends on."""
    return (
        {name: getattr(model, name) for name in KERAS_FUNCTIONS},
        {k: id(v) for k, v in vars(model.optimizer).items()},
        [id(layer.dtype_policy) for layer in model._flatten_layers()],
        type(model),
        model.optimizer,
        model.jit_compile,
    )


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    model = kmem.wrap(cases.dense())
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def arguments():
    return cases.regression() | {"batch_size": 20, "verbose": 0}


OPTIONS = [
    {"microbatches": 3},
    {"gradient_accumulation_steps": 2},
    {"mixed_precision": "bfloat16"},
    {"mixed_precision": "float16", "microbatches": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_model_is_plain_after_fit(model, arguments, options):
    before = snapshot(model)

    model.fit(**arguments, **options)

    assert snapshot(model) == before


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_model_is_plain_after_a_callback_raised(
    model, arguments, options, error
):
    class Raise(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise error

    before = snapshot(model)

    with pytest.raises(error):
        model.fit(**arguments, **options, callbacks=[Raise()])

    assert snapshot(model) == before


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_model_is_plain_after_running_out_of_memory(
    model, arguments, options, native_library
):
    class Shrink(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kmem.memory.limit(kmem.memory.current("CPU") + 64, device="CPU")

    before = snapshot(model)

    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.fit(**arguments, **options, callbacks=[Shrink()])

    kmem.memory.limit(None, device="CPU")
    assert snapshot(model) == before
    model.fit(**arguments, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_callbacks_see_a_plain_model(model, arguments, options):
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(snapshot(self.model)[1:])

    seen = []
    before = snapshot(model)[1:]

    model.fit(**arguments, **options, callbacks=[Look()])

    assert seen == [before] * 3


class Overriding(keras.Model):
    """A model with a `fit` of its own, which prepares what it is given."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def fit(self, x, *args, **kwargs):
        return super().fit(np.asarray(x, "float64"), *args, **kwargs)

    def train_on_batch(self, *args, **kwargs):
        return super().train_on_batch(*args, **kwargs)


def overriding():
    keras.utils.set_random_seed(0)
    model = Overriding()
    model.compile("sgd", "mse")
    return model


NUMBERS = np.random.default_rng(0).normal(size=(16, 4)).tolist()
TARGETS = np.arange(16.0)[:, None]


def fit_overriding(model, batch_size=8, **options):
    how = {"epochs": 2, "verbose": 0, "shuffle": False}
    model.fit(NUMBERS, TARGETS, batch_size, **how, **options)
    return state(model)


@functools.cache
def plain_overriding():
    return fit_overriding(overriding())


@pytest.mark.parametrize(
    "options",
    [{}, *OPTIONS[:2], {"remat": "8GB"}, {"memory_budget": "8GB"}],
    ids=str,
)
def test_a_model_that_overrides_fit_takes_options(options, native_library):
    """What it hands on to Keras is what counts, here for the plan's batch."""
    batch_size = 8 // options.get("gradient_accumulation_steps", 1)

    got = fit_overriding(kmem.wrap(overriding()), batch_size, **options)

    assert relative_error(got, plain_overriding()) < 1e-6
    assert "fit" not in vars(keras.Model)


def test_a_model_that_overrides_fit_raises_what_keras_would():
    model = kmem.wrap(overriding())

    with pytest.raises(TypeError, match="'microbatch'"):
        model.fit(NUMBERS, TARGETS, microbatch=2)


def test_a_model_that_overrides_train_on_batch_takes_options(native_library):
    plain, model = overriding(), kmem.wrap(overriding())
    model.memory_options = kmem.MemoryOptions(remat="8GB", microbatches=2)
    x = np.asarray(NUMBERS)

    plain.train_on_batch(x, TARGETS)
    model.train_on_batch(x, TARGETS)

    assert relative_error(state(model), state(plain)) < 1e-6


def test_options_that_no_keras_fit_was_given_are_told():
    class Looping(Overriding):
        def fit(self, x, y):
            return self.train_on_batch(np.asarray(x), y)

    model = Looping()
    model.compile("sgd", "mse")

    with pytest.warns(UserWarning, match="Memory options had no effect"):
        kmem.wrap(model).fit(NUMBERS, TARGETS, microbatches=2)


@pytest.mark.parametrize(
    "options", [OPTIONS[0], {"memory_budget": "8GB"}], ids=str
)
def test_a_callback_that_takes_options_off_is_refused(
    model, arguments, options
):
    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[1].trainable = False
            self.model.make_train_function(force=True)

    before = snapshot(model)
    with pytest.raises(ValueError, match="between two calls of `fit`"):
        model.fit(**arguments, **options, callbacks=[Freeze()])

    model.layers[1].trainable = True
    assert snapshot(model) == before
    model.make_train_function(force=True)


class Late(keras.Sequential):
    def make_train_function(self, force=False):
        self.train_function = lambda iterator: self.train_step(next(iterator))


class Wraps(keras.Sequential):
    def make_train_function(self, force=False):
        super().make_train_function(force)
        keras_function = self.train_function
        self.train_function = lambda iterator: keras_function(iterator)


class Set(keras.Sequential):
    num_made = 0

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        make = self.make_train_function

        def counted(force=False):
            self.num_made += 1
            return make(force)

        self.make_train_function = counted


@pytest.mark.parametrize("kind", [Late, Wraps, Set])
def test_a_train_function_of_ones_own_takes_the_options_step(kind):
    model = kind([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    says = contextlib.nullcontext()
    if kind is Late:
        says = pytest.raises(ValueError, match="must read `self.train_step`")

    with says:
        kmem.wrap(model).fit(
            *(np.ones((8, 1)), np.ones(8)),
            gradient_accumulation_steps=4,
            batch_size=2,
            verbose=0,
        )
        assert int(model.optimizer.iterations) == 1
        assert kind is not Set or model.num_made


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_ragged_batches_and_losses_that_are_no_tensors_are_taken(options):
    model = keras.Sequential([keras.layers.Identity()])
    model.compile("sgd", loss=lambda y, y_pred: 0)
    x = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]])

    with pytest.warns(UserWarning, match="not have any trainable weights"):
        kmem.wrap(model).fit(x, x, verbose=0, batch_size=3, **options)

    assert isinstance(model.predict(x, verbose=0), tf.RaggedTensor)


@pytest.mark.parametrize("option", ["remat", "memory_budget"])
@pytest.mark.parametrize("in_data_set", [False, True])
def test_batches_without_a_fixed_shape_are_refused(option, in_data_set):
    class Mean(keras.layers.Layer):
        def call(self, x):
            return tf.reduce_mean(x, axis=1)

    model = keras.Sequential([Mean(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = tf.ragged.constant([[[1.0]], [[2.0], [3.0]]], 1), tf.ones((2, 1))
    data = {"x": x, "y": y}
    if in_data_set:
        data = {"x": tf.data.Dataset.from_tensors((x, y))}

    with pytest.raises(ValueError, match="use `microbatches` or `dtr`"):
        kmem.wrap(model).fit(**data, **{option: "8GB"})


def test_a_list_of_callbacks_is_given_back_as_it_was(model, arguments):
    history = keras.callbacks.History()
    callbacks = keras.callbacks.CallbackList([history], model=model)

    model.fit(**arguments, microbatches=2, callbacks=callbacks)
    model.fit(**arguments, callbacks=callbacks)

    assert callbacks.callbacks == [history]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_callback_gives_options_to_a_plain_model(arguments, options):
    keras.utils.set_random_seed(0)
    wrapped = kmem.wrap(cases.dense())
    keras.utils.set_random_seed(0)
    plain = cases.dense()
    before = snapshot(plain)

    wrapped.fit(**arguments, **options, epochs=2, shuffle=False)
    plain.fit(
        **arguments,
        epochs=2,
        shuffle=False,
        callbacks=[kmem.callbacks.MemoryOptions(**options)],
    )

    for got, want in zip(state(plain), state(wrapped), strict=True):
        np.testing.assert_array_equal(got, want)
    assert snapshot(plain)[0] | before[0] == before[0]


def test_options_have_callbacks_of_their_names(arguments):
    model = cases.dense()

    model.fit(**arguments, callbacks=[kmem.callbacks.GradientAccumulation(2)])
    assert model.optimizer.iterations.numpy() == 2

    model.fit(**arguments, callbacks=[kmem.callbacks.MicroBatches(2)])
    assert model.optimizer.iterations.numpy() == 5


def test_a_callback_that_was_cut_short_does_not_reach_the_next_fit(arguments):
    class Raise(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    model = cases.dense()
    accumulate = kmem.callbacks.GradientAccumulation(3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(**arguments, callbacks=[accumulate, Raise()])
    assert model.optimizer.iterations.numpy() == 1

    model.fit(**arguments)

    assert model.optimizer.iterations.numpy() == 4


def test_a_functional_model_is_made_as_with_keras():
    inputs = keras.Input((5,))
    model = kmem.Model(inputs, keras.layers.Dense(3)(inputs))

    assert isinstance(model, kmem.Model)
    assert type(model) is type(keras.Model(inputs, model.outputs))


class Subclassed(kmem.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


class FunctionalSubclass(kmem.Model):
    def __init__(self):
        inputs = keras.Input((5,))
        outputs = keras.layers.Dense(3)(inputs)
        super().__init__(inputs=inputs, outputs=outputs)


@pytest.mark.parametrize(
    "make", [FunctionalSubclass, Subclassed, FunctionalSubclass]
)
def test_a_subclass_takes_options(arguments, make):
    model = make()
    model.compile("sgd", "mse")

    model.fit(**arguments, microbatches=4)

    assert isinstance(model, kmem.Model)
    assert issubclass(make, kmem.Model)
    assert model.optimizer.iterations.numpy() == 3


def test_a_plain_model_is_no_kmem_model():
    assert not isinstance(cases.dense(), kmem.Model)


def test_wrapping_twice_is_wrapping_once(model):
    fit = model.fit

    assert kmem.wrap(model) is model
    assert model.fit is fit


def test_only_models_are_wrapped():
    with pytest.raises(ValueError, match="must be a `keras.Model`"):
        kmem.wrap(keras.layers.Dense(3))


def test_fit_without_options_is_kerass_own(arguments):
    keras.utils.set_random_seed(0)
    plain = cases.dense()
    plain.fit(**arguments, shuffle=False)
    keras.utils.set_random_seed(0)
    wrapped = kmem.wrap(cases.dense())
    wrapped.fit(**arguments, shuffle=False)

    for got, want in zip(state(wrapped), state(plain), strict=True):
        np.testing.assert_array_equal(got, want)


def test_train_on_batch_follows_the_options_of_the_model(model, arguments):
    x, y = arguments["x"][:20], arguments["y"][:20]
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    plain.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    sizes = []
    model.layers[0].call = watching_rows(model.layers[0].call, sizes)
    model.run_eagerly = True

    model.memory_options = kmem.MemoryOptions(microbatches=5)
    got = model.train_on_batch(x, y)[:2]
    want = plain.train_on_batch(x, y)

    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert set(sizes) == {4}


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", ["plain", "masked_sum_over_batch_size"])
def test_train_on_batch_in_parts_is_train_on_batch(name, jit_compile):
    states = []
    for options in (None, kmem.MemoryOptions(microbatches=4)):
        keras.utils.set_random_seed(0)
        model, arguments = cases.ALL[name]()
        model.jit_compile = jit_compile
        kmem.wrap(model).memory_options = options
        model.train_on_batch(arguments["x"][:21], arguments["y"][:21])
        states.append(state(model))

    whole, parts = states
    assert relative_error(parts, whole) < 1e-6


def test_train_on_batch_is_plain_again_without_options(model, arguments):
    x, y = arguments["x"][:20], arguments["y"][:20]
    model.memory_options = kmem.MemoryOptions(gradient_accumulation_steps=3)
    model.train_on_batch(x, y)
    model.memory_options = None
    model.train_on_batch(x, y)

    assert model.optimizer.iterations.numpy() == 1


def watching_rows(call, sizes):
    def watched(x, *args, **kwargs):
        sizes.append(int(x.shape[0]))
        return call(x, *args, **kwargs)

    return watched


def test_a_new_option_is_traced_anew(model, arguments):
    model.fit(**arguments, gradient_accumulation_steps=3)
    assert model.optimizer.iterations.numpy() == 1
    model.fit(**arguments, gradient_accumulation_steps=2)
    assert model.optimizer.iterations.numpy() == 3
    model.fit(**arguments)
    assert model.optimizer.iterations.numpy() == 6


def test_a_model_that_is_compiled_again_is_traced_anew(model, arguments):
    # Same optimizer, same kind of loss: the compile step alone tells.
    model.fit(**arguments, microbatches=2)
    model.compile(model.optimizer, "mse", metrics=["mape"])
    logs = model.fit(**arguments, microbatches=2).history

    assert list(logs) == ["loss", "mape"]


def test_the_same_options_are_traced_once(arguments):
    class CountingStep(keras.Sequential):
        def train_step(self, data):
            runs.append(None)
            return super().train_step(data)

    runs = []
    model = CountingStep([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    kmem.wrap(model)

    model.fit(**arguments, microbatches=2)
    once = len(runs)
    model.fit(**arguments)
    model.fit(**arguments, microbatches=2)

    # Plain `fit` in between has its own trace, and takes no part's.
    assert len(runs) == once + 1


LOAD = """
    import sys, warnings
    import keras, numpy as np
    warnings.simplefilter("error")
    for index, suffix in enumerate({suffixes}):
        path = f"{{index}}{{suffix}}"
        if suffix == ".keras":
            model = keras.models.load_model(path)
        else:
            model = keras.Sequential(
                [
                    keras.Input((5,)),
                    keras.layers.Dense(7, activation="tanh"),
                    keras.layers.Dense(3),
                ]
            )
            model.compile(keras.optimizers.Adam(1e-2), "mse")
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        values = model.get_weights()
        values += [v.numpy() for v in model.optimizer.variables]
        want = np.load(f"{{index}}.npz")
        assert len(want.files) == len(values), path
        for got, name in zip(values, want.files):
            np.testing.assert_array_equal(got, want[name], path)
        assert model.layers[0].dtype_policy.name == "float32", path
    assert "kmem" not in sys.modules
"""


def test_saved_models_load_without_kmem(
    arguments, tmp_path, python, monkeypatch
):
    """Also those that a callback saves in the middle of training."""
    monkeypatch.chdir(tmp_path)
    saved = [
        *((".keras", options) for options in OPTIONS),
        (".weights.h5", OPTIONS[0]),
    ]
    for index, (suffix, options) in enumerate(saved):
        model = kmem.wrap(cases.dense())
        checkpoint = keras.callbacks.ModelCheckpoint(
            f"{index}{suffix}", save_weights_only=suffix == ".weights.h5"
        )
        model.fit(**arguments, **options, callbacks=[checkpoint])
        np.savez(f"{index}.npz", *state(model))

    # One process for all, as it takes longer to start than to load them.
    suffixes = [suffix for suffix, _ in saved]
    code, _, errors = python.run(LOAD.format(suffixes=suffixes))

    assert code == 0, errors


BAD = [
    ({"microbatches": 0}, ValueError, "positive integer"),
    ({"microbatches": "4"}, ValueError, "positive integer"),
    ({"microbatches": 21}, ValueError, "not be larger than the batch size"),
    ({"microbatch": 4}, TypeError, "Did you mean `microbatches`?"),
    ({"epoch": 4}, TypeError, "Did you mean `epochs`?"),
    ({"mixed_precision": "fp16"}, ValueError, "must be one of"),
    ({"memory_budget": "5 GBs"}, ValueError, "number of bytes"),
    ({"remat": "auto", "dtr": True}, ValueError, "exclude each other"),
    ({"dtr": "1KB"}, ValueError, "larger than what is in use"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=str)
def test_bad_options_change_nothing(model, arguments, options, error, message):
    before, values = snapshot(model), state(model)

    with pytest.raises(error, match=message):
        model.fit(**arguments, **options)

    assert snapshot(model) == before
    for got, want in zip(state(model), values, strict=True):
        np.testing.assert_array_equal(got, want)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        arguments = cases.regression()
        return arguments["x"][:20], arguments["y"][:20]


def arrays():
    arguments = cases.regression()
    return arguments["x"], arguments["y"]


def dataset():
    data = tf.data.Dataset.from_tensor_slices(arrays())
    return (data.batch(20, drop_remainder=True),)


@pytest.mark.parametrize("data", [arrays, dataset, lambda: (Batches(),)])
def test_too_many_parts_are_refused_whatever_the_data_is(model, data):
    with pytest.raises(ValueError, match="not be larger than the batch size"):
        model.fit(*data(), microbatches=33)


def test_a_model_must_be_compiled():
    model = kmem.wrap(keras.Sequential([keras.layers.Dense(1)]))

    with pytest.raises(ValueError, match=r"call `model.compile\(\)` first"):
        model.fit(np.ones((4, 1)), np.ones(4), microbatches=2)


def test_a_step_with_two_updates_is_refused():
    class TwoOptimizers(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.second = keras.optimizers.SGD()

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            variables = self.trainable_variables
            zeros = [tf.zeros_like(v) for v in variables]
            self.optimizer.apply(zeros, variables)
            self.second.apply(zeros, variables)
            return {}

    model = kmem.wrap(TwoOptimizers())
    model.compile("sgd")
    model(np.ones((4, 1)))
    before = model.get_weights()

    with pytest.raises(ValueError, match="makes one update"):
        model.fit(np.ones((4, 1)), np.ones(4), microbatches=2, verbose=0)

    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
