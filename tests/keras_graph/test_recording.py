import keras
import pytest
import tensorflow as tf
from keras import layers

from kmem.keras_graph.profiling import record_batch
from kmem.step import batches

BATCH = tf.TensorSpec((4, 6))


class Looping(keras.Model):
    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(6, name="shared")
        self.head = keras.Sequential(
            [layers.Dense(6, name="first"), layers.Dense(6, name="second")],
            name="head",
        )

    def call(self, x):
        for _ in range(2):
            x = tf.nn.relu(self.shared(x)) + x
        return self.head(x)


class Raw(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Assigning(layers.Layer):
    def build(self, shape):
        self.count = tf.Variable(0.0)

    def call(self, x):
        self.count.assign_add(1.0)
        return x * self.count


class Square(layers.Layer):
    def call(self, x):
        return x * x + tf.exp(x)


class Block(layers.Layer):
    """A layer, no model, with a model inside."""

    def __init__(self):
        super().__init__(name="block")
        self.inner = keras.Sequential([layers.Dense(6), layers.Dense(6)])

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)


def record(*block):
    model = keras.Sequential([keras.Input((6,)), *block])
    return record_batch(model, BATCH)


def names(found):
    return [call.name for call in found.calls]


def test_calls_come_in_order_with_the_loss_at_the_end():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, name="first"),
            layers.ReLU(name="second"),
        ]
    )
    model.compile("sgd", "mse")

    found = record_batch(model, (BATCH, tf.TensorSpec((4, 5))))

    assert names(found) == ["first", "second", "loss"]
    assert found.inputs == (0, 1)
    assert [call.makes for call in found.calls] == [(2,), (3,), (4,)]
    assert [call.reads for call in found.calls] == [(0,), (2,), (3, 1)]
    assert found.outputs == (3,)
    sizes = [batches.num_bytes(tensor) for tensor in found.tensors]
    assert sizes == [4 * 6 * 4, 4 * 5 * 4, 4 * 5 * 4, 4 * 5 * 4, 4]
    assert found.frame.lines() == [(0, 1, 2)]


def test_a_shared_layer_is_called_as_often_as_it_is_called():
    inputs = keras.Input((6,))
    shared = layers.Dense(6, name="shared")
    model = keras.Model(inputs, shared(shared(inputs)))

    found = record_batch(model, BATCH)

    assert names(found) == ["shared", "shared", "loss"]
    assert found.calls[1].reads == found.calls[0].makes


@pytest.mark.parametrize(
    "layer",
    [
        layers.Reshape((2, 3)),
        layers.Flatten(),
        layers.Identity(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_only_shows_a_tensor_differently_is_the_same_value(layer):
    found = record(layers.Dense(6), layer, layers.Activation("exponential"))

    dense, shown, exponential, _ = found.calls
    assert shown.makes == ()
    assert shown.gives == shown.reads == dense.makes
    assert exponential.reads == dense.makes


def test_a_call_counts_how_often_it_uses_a_value():
    found = record(layers.Dense(6), Square(), layers.Dense(6))

    dense, square, last, _ = found.calls
    # The product reads it twice, the exponential once; a shape is no use.
    assert square.uses == {dense.makes[0]: 3}
    assert last.uses == {square.makes[0]: 1}


def test_a_nested_model_is_a_line_of_its_own():
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6), layers.Dense(6)]
    )
    inputs = keras.Input((6,))
    model = keras.Model(inputs, inner(layers.Dense(6)(inner(inputs))))

    found = record_batch(model, BATCH)

    assert len(found.calls) == 6
    assert found.frame.spans == [(0, 2), (2, 3), (3, 5)]
    assert found.frame.lines() == [(0, 2, 3, 5), (0, 1, 2), (3, 4, 5)]


def test_of_a_subclassed_model_calls_and_what_is_between_are_recorded():
    model = Looping()
    model(tf.zeros((1, 6)))

    found = record_batch(model, BATCH)

    assert names(found) == [
        "shared",
        "before shared",
        "shared",
        "before head",
        "first",
        "second",
        "loss",
    ]
    # Each call is a line by itself: what is between them is not to be run.
    assert found.frame.lines() == [(0, 1), (2, 3), (4, 6), (4, 5, 6)]
    before = found.calls[1]
    assert before.reads == (0, *found.calls[0].makes)
    # Its relu keeps what it gave.
    assert before.residual_bytes == 4 * 6 * 4


def test_a_model_within_a_layer_is_not_opened():
    found = record(Block(), layers.Dense(2, name="last"))

    assert names(found) == ["block", "last", "loss"]
    assert found.frame.inner == {}


@pytest.mark.parametrize(
    "layer, effect",
    [(Raw(), "RandomStandardNormal"), (Assigning(), "AssignAddVariableOp")],
    ids=["raw random numbers", "raw variable"],
)
def test_what_cannot_be_done_twice_is_an_effect(layer, effect):
    found = record(layers.Dense(6), layer, layers.Dense(6))

    (told,) = found.calls[1].effects
    assert told.startswith(effect)
    assert found.calls[0].effects == found.calls[2].effects == ()


@pytest.mark.parametrize(
    "layer",
    [layers.Dropout(0.5), layers.BatchNormalization(), layers.GaussianNoise(1)],
    ids=lambda layer: type(layer).__name__,
)
def test_random_numbers_and_statistics_of_keras_are_no_effect(layer):
    found = record(layers.Dense(6), layer, layers.Dense(6))

    assert all(call.effects == () for call in found.calls)


def test_additions_that_tensorflow_joins_are_not_separated():
    inputs = keras.Input((6,))
    first = layers.Dense(6, use_bias=False)(inputs)
    second = layers.Dense(6, use_bias=False)(first)
    total = layers.Add()([second, first])
    total = layers.Add()([total, inputs])
    model = keras.Model(inputs, layers.Dense(2)(total))

    found = record_batch(model, BATCH)

    assert [call.name.split("_")[0] for call in found.calls[2:4]] == [
        "add",
        "add",
    ]
    assert found.seams == {3}


def test_an_addition_that_is_read_twice_is_not_joined():
    inputs = keras.Input((6,))
    total = layers.Add()([layers.Dense(6)(inputs), inputs])
    again = layers.Add()([total, layers.Dense(6)(total)])
    model = keras.Model(inputs, again)

    found = record_batch(model, BATCH)

    assert found.seams == set()


def test_recording_changes_nothing():
    model = keras.Sequential(
        [keras.Input((6,)), layers.BatchNormalization(), layers.Dropout(0.5)]
    )
    before = [variable.numpy() for variable in model.variables]

    record_batch(model, BATCH)

    for variable, value in zip(model.variables, before, strict=True):
        assert (variable.numpy() == value).all()


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(ValueError, match="must be built.*Received: model=new"):
        record_batch(keras.Sequential([layers.Dense(6)], name="new"), BATCH)


def test_a_batch_without_a_number_of_rows_is_refused():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(6)])

    with pytest.raises(ValueError, match=r"fixed shape.*\(None, 6\)"):
        record_batch(model, tf.TensorSpec((None, 6)))
