"""What is looked at of the data before a model trains, and what it leaves."""

import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.base import private_tf
from kmem.fit import pipeline

Dataset = tf.data.Dataset
X = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
OPTIONS = [{"remat": "auto"}, {"memory_budget": "8GB"}]


def slices():
    return Dataset.from_tensor_slices((X, X[:, :1]))


def shuffled():
    return slices().shuffle(30, seed=1).batch(8).map(lambda x, y: (2 * x, y))


def noisy():
    noise = tf.random.Generator.from_seed(1)

    def add(x, y):
        return x + noise.normal(tf.shape(x)), y

    return slices().batch(8).map(add).prefetch(1)


class Augmented(keras.utils.PyDataset):
    """Draws other numbers each time that it is asked."""

    def __init__(self):
        super().__init__()
        self._rng = np.random.default_rng(1)
        self.epochs = []

    def __len__(self):
        return 3

    def __getitem__(self, index):
        x = X[10 * index :][:10]
        return x + self._rng.normal(size=x.shape), x[:, :1]

    def on_epoch_end(self):
        self.epochs.append(len(self.epochs))


def trained(make, **options):
    keras.utils.set_random_seed(0)
    data = make()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    options |= {"epochs": 2, "shuffle": False, "verbose": 0}
    history = kmem.wrap(model).fit(data, **options)
    return [*model.get_weights(), history.history["loss"]]


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: [*each][0])
@pytest.mark.parametrize("make", [shuffled, noisy, Augmented])
def test_a_model_trains_on_the_data_in_the_order_of_plain_keras(make, options):
    for got, want in zip(trained(make, **options), trained(make), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_data_set_that_was_looked_at_is_told_of_its_epochs():
    inner, plain = Augmented(), Augmented()
    arguments = {"x": inner}
    batch = pipeline.fit_batch(arguments)
    assert [spec.shape for spec in batch] == [(10, 4), (10, 1)]

    trained(lambda: arguments["x"])
    trained(lambda: plain)
    assert inner.epochs == plain.epochs


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.cache().shuffle(3).take(2).skip(1).repeat(2),
        lambda data: data.map(lambda x, y: (x, y), num_parallel_calls=2),
        lambda data: data.filter(lambda x, y: True).prefetch(1).shard(2, 0),
        lambda data: Dataset.zip((data, data)),
        lambda data: data.concatenate(data).with_options(tf.data.Options()),
        lambda data: data.take_while(lambda x, y: True).ignore_errors(),
        lambda data: data.apply(tf.data.experimental.assert_cardinality(4)),
    ],
)
@pytest.mark.parametrize("parallel", [None, 2])
def test_the_size_of_batches_is_known_of_a_data_set(change, parallel):
    data = slices().batch(8, num_parallel_calls=parallel)
    assert private_tf.batch_size_of(change(data)) == 8


@pytest.mark.parametrize(
    "data",
    [
        slices(),
        slices().batch(8).unbatch(),
        slices().batch(8).rebatch(4),
        Dataset.zip((slices().batch(8), slices().batch(4))),
    ],
    ids=["none", "unbatch", "rebatch", "zip of two"],
)
def test_else_it_is_not_known(data):
    assert private_tf.batch_size_of(data) is None


def test_a_single_batch_may_be_smaller_than_a_batch():
    specs = pipeline.fit_batch({"x": slices().batch(64)})
    assert [spec.shape[0] for spec in specs] == [30, 30]


@pytest.mark.parametrize("words", [["red"], ["red", "blue"]])
def test_words_and_lengths_that_are_not_known_are_looked_up(words):
    words = [words] * 3
    data = Dataset.from_tensor_slices((words, [1.0] * 3)).batch(2)
    spec, _ = pipeline.fit_batch({"x": data})
    assert spec.shape == (2, len(words[0]))
    assert spec.example.tolist() == [[w.encode() for w in words[0]]]

    lengths = Dataset.from_tensor_slices([1, 3, 2]).map(tf.ones)
    spec = pipeline.fit_batch({"x": lengths.padded_batch(2, [None])})
    assert spec.shape == (2, 3)


class Small(layers.Layer):
    def call(self, x):
        tf.debugging.assert_less(x, 0.0)
        return x


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: [*each][0])
def test_a_step_that_refuses_random_numbers_is_refused_by_name(options):
    model = keras.Sequential([keras.Input((4,)), Small(), layers.Dense(1)])
    model.compile("sgd", "mse")
    x = -np.abs(X)
    with pytest.raises(ValueError, match="must take random numbers .*x < y"):
        kmem.wrap(model).fit(x, x[:, :1], verbose=0, **options)
    with pytest.warns(UserWarning, match="perhaps the loss of"):
        kmem.wrap(model).fit(x, x[:, :1], verbose=0, microbatches=2)


TABLE = pandas.DataFrame(X.astype("float64"), columns=list("abcd"))
ARRAYS = {
    "a table": (TABLE, TABLE["a"]),
    "tensors in float64": (tf.constant(TABLE), tf.constant(TABLE["a"])),
}


@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="holds nothing there"
)
def test_tensors_are_not_counted_once_more_unless_they_are_cast():
    batch = tf.TensorSpec((10, 4))
    ready = pipeline.ready_bytes(batch)

    def copied(x):
        return pipeline.held_bytes({"x": x, "y": X[:, :1]}, batch) - ready

    y_bytes = X[:, :1].nbytes
    assert copied(tf.constant(X)) == y_bytes
    assert copied(tf.constant(X, tf.float64)) == X.nbytes + y_bytes
    assert copied(X) == copied(X.astype("float64")) == X.nbytes + y_bytes
    assert copied(TABLE) == X.nbytes + y_bytes


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: [*each][0])
@pytest.mark.parametrize("data", ARRAYS.values(), ids=[*ARRAYS])
def test_a_plan_is_for_what_keras_makes_of_data(data, options):
    x, y = data

    def weights(**options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        kmem.wrap(model).fit(x, y, shuffle=False, verbose=0, **options)
        return model.get_weights()

    specs = pipeline.fit_batch({"x": x, "y": y, "batch_size": 10})
    assert {spec.dtype for spec in specs} == {tf.float32}
    for got, want in zip(weights(**options), weights(), strict=True):
        np.testing.assert_array_equal(got, want)
