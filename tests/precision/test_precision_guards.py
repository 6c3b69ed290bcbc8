"""Ids stay exact, and layers whose code is in the way are named."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from precision_models import DTYPES
from precision_models import compiled
from precision_models import is_plain
from precision_models import normal
from precision_models import step_of

from kmem import precision
from kmem.options import MixedPrecision
from kmem.precision import guards

IDS = np.array([[1001, 2049], [4097, 257]])


class Embeds(keras.Model):
    """Its `select` says how the ids get from the input to the table."""

    def __init__(self, select, table=None):
        super().__init__()
        self.select = select
        self.table = table or layers.Embedding(5000, 2, name="table")

    def call(self, inputs):
        return self.table(self.select(inputs))


class Within(layers.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)


def functional_table(shape):
    inputs = keras.Input(shape)
    table = layers.Embedding(5000, 2, name="table")
    return keras.Model(inputs, table(inputs))


def sequential_table():
    return keras.Sequential(
        [keras.Input((2,)), layers.Embedding(5000, 2, name="table")]
    )


class OwnTable(layers.Layer):
    """An embedding that a user wrote."""

    def build(self, input_shape):
        self.rows = self.add_weight(shape=(5000, 2))

    def call(self, inputs):
        return tf.gather(self.rows, tf.cast(inputs, "int32"))


REACHED = {
    "subclassed": lambda: Embeds(lambda x: x),
    "cast": lambda: Embeds(lambda x: tf.cast(x, "float32")),
    "in a layer": lambda: Embeds(
        lambda x: x, Within(layers.Embedding(5000, 2))
    ),
    "functional": lambda: functional_table((2,)),
    "sequential": sequential_table,
    "functional in subclassed": lambda: Embeds(
        lambda x: x, functional_table((2,))
    ),
    "sequential in subclassed": lambda: Embeds(lambda x: x, sequential_table()),
}


@pytest.mark.parametrize("name", REACHED)
@pytest.mark.parametrize("mode", ("eager", "graph"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_ids_reach_their_rows_exactly(name, mode, dtype):
    model = REACHED[name]()
    expected = model(IDS)
    function = model
    if mode == "graph":
        function = tf.function(model, autograph=False)
    with precision.applied(model, MixedPrecision(dtype)):
        rows = function(tf.constant(IDS, "float32"))
        assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, tf.cast(expected, dtype))


def reshaped():
    inputs = keras.Input((2,))
    x = layers.Reshape((1, 2))(inputs)
    return keras.Model(inputs, layers.Embedding(5000, 2, name="table")(x))


def in_a_loop(x):
    return tf.map_fn(lambda row: row + 0, x)


ROUNDED = {
    "sliced": lambda: Embeds(lambda x: x[:, 0]),
    "shifted": lambda: Embeds(lambda x: x + 1.0),
    "sliced into functional": lambda: Embeds(
        lambda x: x[:, :1], functional_table((1,))
    ),
    "reshaped": reshaped,
    "in a loop": lambda: Embeds(in_a_loop),
    "in a function": lambda: Embeds(tf.function(lambda x: x * 1)),
    "own table": lambda: Embeds(lambda x: x, OwnTable(name="table")),
    "own table, sliced": lambda: Embeds(
        lambda x: x[:, 0], OwnTable(name="table")
    ),
    "own table in a function": lambda: Embeds(
        lambda x: x, Within(layers.Lambda(tf.function(to_int), name="table"))
    ),
}


def to_int(x):
    return tf.one_hot(tf.cast(x, "int32"), 3)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("mode", ("eager", "graph"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_that_would_be_rounded_raise(name, mode, dtype):
    model = ROUNDED[name]()
    function = model
    if mode == "graph":
        function = tf.function(model, autograph=False)
    with precision.applied(model, MixedPrecision(dtype)):
        with pytest.raises(ValueError, match="Layer 'table' must get ids as"):
            function(tf.constant(IDS, "float32"))
    assert is_plain(model)
    assert not guards._thread.running


class Encodes(keras.Model):
    def __init__(self):
        super().__init__()
        self.encode = layers.CategoryEncoding(5000, output_mode="one_hot")
        self.bins = layers.Discretization([0.0, 2048.5, 4096.5])
        self.lookup = layers.IntegerLookup(vocabulary=[1001, 2049, 4097, 257])
        self.hashing = layers.Hashing(1000)

    def call(self, inputs):
        return (
            tf.argmax(self.encode(inputs), axis=-1),
            self.bins(inputs),
            self.lookup(inputs),
            self.hashing(inputs),
        )


@pytest.mark.parametrize("ids_dtype", ("int32", "float32"))
@pytest.mark.parametrize("mode", ("eager", "graph"))
def test_preprocessing_inside_a_model_sees_exact_ids(mode, ids_dtype):
    model = Encodes()
    ids = tf.constant(IDS, ids_dtype)
    expected = model(ids)
    function = model
    if mode == "graph":
        function = tf.function(model, autograph=False)
    with precision.applied(model, MixedPrecision("bfloat16")):
        result = function(ids)
    for one, other in zip(result, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(result[0], IDS)


@pytest.mark.parametrize("name", REACHED)
def test_float_ids_in_a_numpy_array_are_exact_or_raise(name):
    model = REACHED[name]()
    expected = tf.cast(model(IDS), "bfloat16")
    with precision.applied(model, MixedPrecision("bfloat16")):
        np.testing.assert_array_equal(model(IDS), expected)
        try:
            rows = model(IDS.astype("float32"))
        except ValueError as error:
            assert "must get ids as integers" in str(error)
        else:
            np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("name", ("sliced", "in a loop", "own table, sliced"))
def test_integer_ids_may_take_any_way(name):
    model = ROUNDED[name]()
    expected = model(IDS)
    with precision.applied(model, MixedPrecision("bfloat16")):
        rows = model(tf.constant(IDS))
    np.testing.assert_array_equal(rows, tf.cast(expected, "bfloat16"))


def test_a_layer_that_is_left_out_sees_its_inputs_unrounded():
    model = Embeds(lambda x: x, OwnTable(name="table"))
    expected = model(IDS)
    option = MixedPrecision("bfloat16", exclude=("table",))
    with precision.applied(model, option):
        rows = model(tf.constant(IDS, "float32"))
    np.testing.assert_array_equal(rows, expected)


def test_integers_made_of_computed_values_are_no_ids():
    class Codes(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)

        def call(self, inputs):
            codes = tf.cast(self.dense(inputs), "int32")
            return inputs * tf.cast(codes, inputs.dtype)

    model = keras.Sequential([keras.Input((4,)), Codes()])
    with precision.applied(model, MixedPrecision("bfloat16")):
        assert model(normal(3, 4)).dtype == "bfloat16"


class Constant(layers.Layer):
    def __init__(self, name, function=tf.matmul):
        super().__init__(name=name)
        self.function = function
        self.constant = tf.ones((6, 3))

    def call(self, inputs):
        return self.function(inputs, self.constant)


MIXES_DTYPES = {
    "layer": lambda: Constant("mixes"),
    "lambda": lambda: layers.Lambda(
        lambda x: tf.matmul(x, tf.ones((6, 3))), name="mixes"
    ),
    "nested": lambda: Within(Within(Constant("mixes"))),
    "operator": lambda: Constant("mixes", lambda x, c: x @ c + 0),
}


@pytest.mark.parametrize("name", MIXES_DTYPES)
@pytest.mark.parametrize("mode", ("eager", "graph"))
def test_float16_code_with_a_float32_constant_is_named(name, mode):
    model = keras.Sequential([keras.Input((6,)), MIXES_DTYPES[name]()])
    compiled(model, normal(4, 6))
    data = normal(4, 6), np.ones((4, 3), "float32")
    message = r"Layer 'mixes' must compute.*exclude=\('mixes',\)\)` *\. Rec"
    with pytest.raises(ValueError, match=message.replace(" *", "")):
        step_of(model, MixedPrecision("float16"), mode)(data)
    assert is_plain(model)
    option = MixedPrecision("float16", exclude=("mixes",))
    with precision.applied(model, option):
        assert model(normal(4, 6)).dtype == "float32"


@pytest.mark.parametrize("name", MIXES_DTYPES)
def test_bfloat16_code_that_promotes_is_named_once(name):
    model = keras.Sequential([keras.Input((6,)), MIXES_DTYPES[name]()])
    option = MixedPrecision("bfloat16")
    with precision.applied(model, option):
        model(normal(4, 6))
    with pytest.warns(UserWarning, match="'mixes' computes in") as caught:
        precision.warn(model)
        precision.warn(model)
    assert len(caught) == 1


def test_a_head_that_is_left_out_is_no_reason_to_warn():
    class Head(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = layers.Dense(4)
            self.head = layers.Dense(3, name="head")

        def call(self, inputs):
            return self.head(self.body(inputs))

    option = MixedPrecision("bfloat16", exclude=("head",))
    model = Head()
    with precision.applied(model, option), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(normal(4, 6)).dtype == "float32"
        precision.warn(model)


def test_other_errors_of_a_layer_pass_as_they_are():
    def fail(x):
        raise ValueError("something else")

    model = keras.Sequential(
        [keras.Input((6,)), layers.Lambda(fail, output_shape=(6,))]
    )
    with precision.applied(model, MixedPrecision("float16")):
        with pytest.raises(ValueError, match="something else") as caught:
            model(normal(4, 6))
    assert "kmem" not in str(caught.value)
