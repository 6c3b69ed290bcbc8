"""What a call keeps for its gradient, to the byte."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.keras_graph.costs import cost_of
from kmem.keras_graph.profiling import profile
from kmem.keras_graph.profiling import record_batch
from kmem.keras_graph.profiling import signature

ROWS, WIDTH = 16, 8
VALUE = ROWS * WIDTH * 4


def cost(layer, shape=(WIDTH,), dtype="float32"):
    """The cost of a layer's call, in which its input gets a gradient."""
    inputs = keras.Input(shape, dtype=dtype)
    arguments = [inputs]
    if isinstance(layer, layers.MultiHeadAttention):
        arguments *= 2
    model = keras.Model(inputs, layer(*arguments))
    spec = tf.TensorSpec((ROWS, *shape), dtype)
    return cost_of(record_batch(model, spec).calls[0], "flops")


def test_a_dense_layer_keeps_its_input():
    found = cost(layers.Dense(WIDTH))

    assert (found.kept_inputs, found.kept_outputs) == ((0,), ())
    assert found.residual_bytes == 0
    assert found.gradients == (0,)
    assert found.gradient_bytes == (WIDTH * WIDTH + WIDTH) * 4
    assert found.parameter_bytes == found.gradient_bytes


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "softmax"])
def test_an_activation_keeps_its_output(activation):
    found = cost(layers.Activation(activation))

    assert (found.kept_inputs, found.kept_outputs) == ((), (0,))
    assert found.residual_bytes == found.gradient_bytes == 0


def test_dense_with_relu_keeps_both():
    found = cost(layers.Dense(WIDTH, "relu"))

    assert (found.kept_inputs, found.kept_outputs) == ((0,), (0,))
    assert found.residual_bytes == 0


@pytest.mark.parametrize(
    "layer",
    [layers.Reshape((2, 4)), layers.Identity()],
    ids=lambda layer: type(layer).__name__,
)
def test_what_shows_a_tensor_differently_keeps_nothing(layer):
    found = cost(layer)

    assert found.kept_inputs == found.kept_outputs == ()
    assert found.residual_bytes == 0
    assert found.passed == (0,)


def test_dropout_keeps_its_mask():
    """It is part of the step: a call that does not train keeps nothing."""
    found = cost(layers.Dropout(0.5))

    # A float for each entry, or a byte: what is kept is not the input.
    assert found.kept_inputs == found.kept_outputs == ()
    assert found.residual_bytes in (VALUE, VALUE // 4)


def test_batch_normalization_keeps_its_input_and_statistics():
    found = cost(layers.BatchNormalization())

    assert found.kept_inputs == (0,)
    # Of each column: mean, variance and the like.
    column = WIDTH * 4
    assert column <= found.residual_bytes <= 4 * column
    assert found.gradient_bytes == 2 * column
    assert found.parameter_bytes == 4 * column


def test_attention_keeps_queries_keys_values_and_scores():
    length, heads, size = 5, 2, 4
    found = cost(
        layers.MultiHeadAttention(heads, size, dropout=0.0), (length, WIDTH)
    )

    scores = ROWS * heads * length * length * 4
    projection = ROWS * length * heads * size * 4
    assert 0 in found.kept_inputs
    # Queries, keys, values and what the scores make of them, and the scores.
    least = 4 * projection + scores
    assert least <= found.residual_bytes <= 2 * least


def test_an_embedding_keeps_indices_and_gives_them_no_gradient():
    found = cost(layers.Embedding(10, 4), (5,), "int32")

    # Keras counts negative ones from the end: a tensor of its own.
    assert found.residual_bytes == ROWS * 5 * 4
    assert found.gradients == ()
    # A row for each index, not the table.
    assert found.gradient_bytes == ROWS * 5 * 4 * 4
    assert found.parameter_bytes == 10 * 4 * 4


class Outer(layers.Layer):
    """A frozen layer, within which one may be trained: LoRA leaves it so."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(WIDTH)

    def build(self, shape):
        self.inner.build(shape)
        self.trainable = False

    def call(self, x):
        return self.inner(x)


def test_what_is_trained_within_a_frozen_layer_has_a_gradient():
    outer = Outer()
    outer.build((None, WIDTH))
    outer.inner.trainable = True

    found = cost(outer)

    assert not outer.trainable
    assert found.gradient_bytes == (WIDTH * WIDTH + WIDTH) * 4
    assert found.kept_inputs == (0,)


def test_calls_that_train_other_weights_cost_other_than_one_another():
    inputs = keras.Input((WIDTH,))
    model = keras.Model(inputs, Outer()(Outer()(inputs)))
    model.layers[2].inner.trainable = True

    first, second, *_ = record_batch(model, tf.TensorSpec((ROWS, WIDTH))).calls

    assert signature(first) != signature(second)


def test_an_unrolled_lstm_keeps_what_its_steps_make():
    length = 3
    found = cost(layers.LSTM(WIDTH, unroll=True), (length, WIDTH))

    # Four gates a step, at the least.
    assert found.residual_bytes >= 4 * length * VALUE


def test_an_lstm_in_a_loop_keeps_what_its_steps_make():
    length = 3
    found = cost(layers.LSTM(WIDTH), (length, WIDTH))

    assert found.residual_bytes >= 4 * length * VALUE
    twice = cost(layers.LSTM(WIDTH), (2 * length, WIDTH))
    assert twice.residual_bytes >= 1.8 * found.residual_bytes
    assert found.gradients == (0,)
    assert found.gradient_bytes == (2 * WIDTH + 1) * 4 * WIDTH * 4
    assert found.forward_seconds > 0
    assert found.backward_seconds > 0


@pytest.mark.parametrize("measured", [True, False])
def test_costing_changes_nothing(measured):
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(WIDTH, activity_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
        ]
    )
    before = [variable.numpy() for variable in model.variables]

    costs = "measured" if measured else "flops"
    profile(model, tf.TensorSpec((ROWS, WIDTH)), costs)

    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("find", [kmem.profile, kmem.plan])
def test_costing_takes_no_random_numbers_of_the_program_s(find):
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(WIDTH)])
    model.compile("sgd", "mse")
    keras.utils.set_random_seed(0)
    without = tf.random.uniform((4,))

    keras.utils.set_random_seed(0)
    find(model, (tf.TensorSpec((ROWS, WIDTH)), tf.TensorSpec((ROWS, WIDTH))))

    np.testing.assert_array_equal(tf.random.uniform((4,)), without)


def test_computed_costs_are_repeatable():
    model = keras.Sequential(
        [keras.Input((WIDTH,)), layers.Dense(WIDTH, "relu"), layers.Dense(1)]
    )

    first = kmem.profile(model, tf.TensorSpec((ROWS, WIDTH)), costs="flops")
    again = kmem.profile(model, tf.TensorSpec((ROWS, WIDTH)), costs="flops")

    times = [operation.forward_seconds for operation in first.operations]
    assert times == [o.forward_seconds for o in again.operations]
    # A product of matrices: 2 operations for each of its entries, at least.
    assert times[0] > 2 * ROWS * WIDTH * WIDTH / 1e11


def test_a_profile_is_the_network_that_is_planned_for():
    inputs = keras.Input((WIDTH,))
    hidden = layers.Dense(WIDTH, "relu", name="hidden")(inputs)
    shown = layers.Reshape((WIDTH,), name="shown")(hidden)
    outputs = layers.Dense(3, "softmax", name="classes")(shown)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "sparse_categorical_crossentropy")
    batch = np.zeros((ROWS, WIDTH), "float32"), np.zeros(ROWS, "int32")

    found = kmem.profile(model, batch, costs="flops")

    hidden, shown, classes, loss = found.network.stages
    # The batch gets no gradient; what a reshape gives is its input.
    assert hidden.gradients == ()
    assert hidden.kept == (0, *hidden.outputs)
    assert shown.outputs == shown.gradients == ()
    assert classes.inputs == classes.gradients == hidden.outputs
    # Some losses look for what made a softmax, and the loss ends the step.
    recomputable = [stage.recomputable for stage in found.network.stages]
    assert recomputable == [True, True, False, False]
    kept = [operation.kept_bytes for operation in found.operations]
    assert kept[:3] == [2 * VALUE, 0, VALUE + ROWS * 3 * 4]
    rows = found.summary().splitlines()
    assert [row.split()[0] for row in rows[1:]] == [
        "hidden",
        "shown",
        "classes",
        "loss",
    ]


def test_other_costs_are_refused():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])

    with pytest.raises(ValueError, match="Received: costs='guessed'"):
        kmem.profile(model, tf.TensorSpec((1, 2)), costs="guessed")


def test_what_is_between_layers_is_known_in_another_process():
    class Between(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(2 * tf.abs(x)) + 1

    model = Between()
    x = np.ones((4, WIDTH), "float32")
    model(x)

    found = [signature(call) for call in record_batch(model, x).calls]

    assert any("NoneType" in each for each in found)
    # No address, which is another one there.
    assert not any("0x" in each for each in found)


class Doubled(layers.Layer):
    """Until its numbers are large."""

    def call(self, x):
        (y,) = tf.while_loop(
            lambda y: tf.reduce_sum(y) < 1e6, lambda y: (2.0 * tf.tanh(y),), [x]
        )
        return y


@pytest.mark.parametrize(
    ("layer", "least", "most"),
    [
        # The allocator's blocks are multiples of 64 bytes.
        (layers.Dense(WIDTH, "relu"), 0, 64),
        (layers.BatchNormalization(), VALUE, 2 * VALUE),
        # Once round, since nobody knows how often.
        (Doubled(), VALUE, 4 * VALUE),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_what_is_needed_is_computed_where_bytes_are_not_counted(
    monkeypatch, layer, least, most
):
    monkeypatch.setattr(kmem.memory, "is_counted", lambda: False)

    found = cost(layer)

    assert least <= found.backward_workspace_bytes <= most
