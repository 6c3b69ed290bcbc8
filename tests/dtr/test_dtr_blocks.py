"""`kmem.DTR(compile=...)`: the same numbers, with one operator a layer."""

import contextlib
import gc
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.dtr import blocks
from kmem.dtr.blocks import Blocks


@pytest.fixture
def compiled(monkeypatch):
    """The compiled calls that were made, as `(layer, shapes)`."""
    made = []

    class CompiledCall(blocks.CompiledCall):
        def __init__(self, function, join, specs, exact):
            super().__init__(function, join, specs, exact)
            shapes = [tuple(spec.shape) for spec in specs]
            made.append((function.__self__.name, shapes))

    monkeypatch.setattr(blocks, "CompiledCall", CompiledCall)
    return made


def gradients(model, x, within, steps=2):
    """Outputs, losses, gradients and variables after some calls."""
    found = []
    for _ in range(steps):
        with within(), tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
            loss = tf.add_n([tf.reduce_sum(tf.sin(y)), *model.losses])
        found += [y, loss, tape.gradient(loss, [x, *model.trainable_weights])]
    found += [variable.value for variable in model.variables]
    return [
        tf.convert_to_tensor(tensor).numpy()
        for tensor in tf.nest.flatten(found)
        if tensor is not None
    ]


def check_same(make, x, compile="layers"):
    """Compares a model that is compiled with one that is not."""
    x = tf.constant(x)
    keras.utils.set_random_seed(1)
    plain = make()
    plain(x)
    copy = make()
    copy(x)
    for one, other in zip(plain.variables, copy.variables, strict=True):
        other.assign(one)
    want = gradients(plain, x, contextlib.nullcontext)
    got = gradients(copy, x, Blocks(copy, compile).compiled)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def rows(*shape):
    return np.random.default_rng(4).normal(size=shape).astype("float32")


def sequential(*parts):
    return lambda: keras.Sequential([part() for part in parts])


@pytest.mark.parametrize(
    "make, name",
    [
        (layers.BatchNormalization, "batch_normalization"),
        (layers.LayerNormalization, "layer_normalization"),
        (lambda: layers.Dropout(0.5), "dropout"),
        (lambda: layers.Dense(8, "gelu"), "dense"),
        (lambda: layers.GRU(4, return_sequences=True), "gru_cell"),
        (lambda: layers.Bidirectional(layers.LSTM(4)), "lstm_cell"),
        (
            lambda: layers.BatchNormalization(dtype="mixed_bfloat16"),
            "batch_normalization",
        ),
    ],
)
def test_a_layer_has_its_numbers_when_it_is_compiled(make, name, compiled):
    check_same(sequential(make), rows(6, 5, 8))

    assert compiled
    assert all(layer.startswith(name) for layer, _ in compiled)


@pytest.mark.parametrize(
    "make", [layers.BatchNormalization, layers.LayerNormalization]
)
@pytest.mark.usefixtures("native_library")
def test_every_copy_of_a_layer_has_the_same_peak(make):
    x = tf.constant(rows(32, 16, 16, 16))

    def peak(layer):
        within = Blocks(layer).compiled
        gradients(layer, x, within, steps=1)  # Traces it.
        gc.collect()
        before = kmem.memory.current()
        with kmem.memory.track() as usage:
            gradients(layer, x, within, steps=1)
        return usage.peak_bytes - before

    assert len({peak(sequential(make)()) for _ in range(8)}) == 1


class Attends(layers.Layer):
    """The user's own: a residual block."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.2)
        self.norm = layers.LayerNormalization()
        self.num_calls = 0

    def call(self, x):
        self.num_calls += 1
        return x + self.attention(self.norm(x), x) * x


def test_gradients_add_up_in_the_order_of_plain_eager(compiled):
    check_same(sequential(Attends, Attends), rows(4, 6, 8))

    assert len(compiled) == 4


def test_a_layer_of_the_users_own_runs_its_python(compiled):
    layer = Attends()
    model = keras.Sequential([layer])
    model(rows(2, 3, 8))
    before = layer.num_calls
    x = tf.constant(rows(2, 3, 8))
    gradients(model, x, Blocks(model).compiled, steps=3)

    assert layer.num_calls == before + 3
    assert {name for name, _ in compiled} == {
        layer.attention.name,
        layer.norm.name,
    }


def doubled(x):
    return 2.0 * x


class Gated(layers.Layer):
    """The user's own, whose Python does the same at every step."""

    factor = 0.5

    def __init__(self):
        super().__init__()
        self.gate = layers.Dense(8, activation="sigmoid")
        self.parts = [layers.LayerNormalization(), layers.Dropout(0.2)]

    def joined(self, x, y):
        return x * self.factor + doubled(y) * x

    def call(self, x):
        y = self.gate(x)
        for part in self.parts:
            y = part(y)
        if x.shape[1] > 3:
            y = y + x
        return self.joined(x, y), keras.ops.tanh(y)


class TakesBoth(layers.Layer):
    def call(self, pair):
        x, y = pair
        return keras.ops.sin(x * y) + keras.ops.cos(x) * x - y


def gated():
    inputs = keras.Input((6, 8))
    return keras.Model(inputs, TakesBoth()(Gated()(inputs)))


def test_a_layer_of_the_users_own_is_compiled_if_its_class_is_named(compiled):
    check_same(gated, rows(4, 6, 8), compile=(Gated, TakesBoth))

    assert [name.split("_")[0] for name, _ in compiled] == ["gated", "takes"]


def test_a_gradient_holds_nothing_that_it_does_not_need(monkeypatch):
    """On a GPU, TensorFlow may run what nobody reads."""
    holds, run = [], tf.raw_ops.PartitionedCall

    def spy(**arguments):
        graph = arguments["f"].graph
        holds.append([op.type for op in graph.get_operations()])
        return run(**arguments)

    monkeypatch.setattr(tf.raw_ops, "PartitionedCall", spy)
    model = keras.Sequential([keras.Input((8,)), layers.Dropout(0.5)])

    gradients(model, tf.constant(rows(4, 8)), Blocks(model, "layers").compiled)

    forward, backward = holds[:2]
    assert any("Random" in kind for kind in forward)
    assert not any("Random" in kind for kind in backward)
    assert backward.count("Placeholder") == 2


def test_what_a_layer_has_is_a_part_of_what_it_is_compiled_for(compiled):
    model = gated()
    layer = model.layers[1]
    within = Blocks(model, (Gated,)).compiled
    for factor, size in ((0.75, 4), (0.25, 4), (0.25, 2), (0.75, 4)):
        layer.factor = factor
        x = rows(size, 6, 8)
        with within():
            got = model(x)
        np.testing.assert_array_equal(got, model(x))

    sizes = [shape[0] for name, [shape, *_] in compiled if "gated" in name]
    assert sizes == [4, 4, 2]


def waves(x):
    """Enough operations to be compiled."""
    return keras.ops.sin(keras.ops.cos(x)) * keras.ops.tanh(x) + keras.ops.exp(
        -keras.ops.abs(x)
    )


class Waves(layers.Layer):
    def call(self, x):
        return waves(x) + x


class Counts(layers.Layer):
    num_calls = 0

    def call(self, x):
        self.num_calls = self.num_calls + 1
        return waves(x) * self.num_calls


class Draws(layers.Layer):
    def call(self, x):
        return waves(x) * np.random.rand()


class Remembers(layers.Layer):
    def call(self, x, seen=[]):  # noqa: B006
        seen.append(1)
        return waves(x) * len(seen)


class Branches(layers.Layer):
    def call(self, x):
        try:
            return x * float(keras.ops.sum(x))
        except TypeError:
            return x


class HasProperty(Waves):
    @property
    def factor(self):
        return np.random.rand()

    def call(self, x):
        return waves(x) * self.factor


FACTORS = [2.0]


class ReadsList(Waves):
    def call(self, x):
        return waves(x) * FACTORS[0]


class HasCall(Waves):
    def __call__(self, x, **options):
        return super().__call__(x, **options)


class Extends(Waves):
    def call(self, x):
        return super().call(x) * 2.0


class Masks(Waves):
    def call(self, x):
        whole = keras.ops.round(4 * x)
        return keras.ops.where(whole == 1.0, waves(x), x * (whole != 2.0))


class AsksForNumbers(layers.Layer):
    def call(self, x):
        y = tf.boolean_mask(x, x > 0)
        return x * 2.0 if y.shape[0] == 0 else waves(x)


class HoldsModels(Waves):
    """With its Python in a model, of which Keras's own runs one."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([Waves(), layers.LayerNormalization()])

    def call(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize(
    "kind",
    [Waves, Counts, Draws, Remembers, Branches, HasProperty, ReadsList]
    + [HasCall, Extends, AsksForNumbers],
)
def test_a_layer_of_the_users_own_runs_unless_it_is_named(kind, compiled):
    model = keras.Sequential([kind()])
    gradients(model, tf.constant(rows(4, 6, 8)), Blocks(model).compiled)

    assert not compiled


@pytest.mark.parametrize("kind", [HasCall, Extends, HoldsModels, Masks])
def test_a_named_class_stands_for_those_made_from_it(kind, compiled):
    check_same(sequential(kind), rows(4, 6, 8), compile=(Waves,))

    assert len(compiled) == 1


@pytest.mark.parametrize("kind", [Counts, AsksForNumbers])
def test_a_named_layer_that_differs_from_call_to_call_runs(kind, compiled):
    check_same(sequential(kind), rows(4, 6, 8), compile=(kind,))

    # Counts differs from what it is compiled for, and is seen to.
    assert not compiled or kind is Counts


def test_what_is_drawn_in_python_is_drawn_at_each_call(compiled):
    state = np.random.get_state()
    model = keras.Sequential([keras.Input((6, 8)), Draws()])
    x = tf.constant(rows(4, 6, 8))
    np.random.seed(3)
    with Blocks(model, compile=(Draws,)).compiled():
        got = [model(x) for _ in range(2)]
    np.random.seed(3)
    want = [model(x) for _ in range(2)]
    np.random.set_state(state)

    assert not compiled
    np.testing.assert_array_equal(got, want)


def test_an_attribute_that_changes_between_steps_counts_at_once():
    model = keras.Sequential([layers.Dropout(0.5), layers.GaussianNoise(0.1)])
    x = tf.constant(rows(64, 8))
    model(x)
    within = Blocks(model).compiled
    for rate in (0.5, 0.0, 0.5):
        model.layers[0].rate = rate
        with within():
            share_dropped = np.mean(model.layers[0](x, training=True) == 0)
        assert (share_dropped > 0.25) == (rate > 0)


class Masked(keras.Model):
    """Reads a tensor from which attention takes the mask."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(4, 8, mask_zero=True)
        self.normalization = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.end = layers.GlobalAveragePooling1D()

    def call(self, ids):
        x = self.normalization(self.embedding(ids))
        return self.end(self.attention(x, x)) + self.end(x)


class Compares(layers.Layer):
    """Its cross-entropy reads what the probabilities were made from."""

    def call(self, x):
        targets = tf.one_hot([[1, 1], [0, 2]], 3)
        return keras.ops.categorical_crossentropy(targets, x)


class Softmax(layers.Layer):
    """The user's own: a result that is made from another."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, activation="softmax")

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(100 * tf.tanh(x))


@pytest.mark.parametrize(
    "make, x, named",
    [
        (Masked, np.array([[1, 2, 0, 0], [3, 1, 2, 0]]), ()),
        (
            sequential(lambda: layers.Softmax(1), Compares),
            99 * rows(2, 2, 3),
            (),
        ),
        (sequential(Softmax, Compares), rows(2, 2, 3), (Softmax,)),
        (sequential(Softmax, Compares), rows(2, 2, 3), (Softmax, Compares)),
    ],
)
def test_what_is_put_on_tensors_is_handed_on(make, x, named, compiled):
    check_same(make, x, compile=named or "layers")

    assert compiled


@pytest.mark.parametrize(
    "make",
    [
        # Keeps a mask from one call of its cell to the next.
        lambda: layers.LSTM(4, recurrent_dropout=0.5),
        # Its Python is the user's.
        lambda: layers.Lambda(lambda x: tf.sin(tf.cos(tf.exp(-tf.abs(x))))),
        # Few operations.
        lambda: layers.Dense(3),
    ],
)
def test_what_cannot_be_compiled_runs_as_it_is(make, compiled):
    check_same(sequential(make), rows(3, 4, 5))

    assert not compiled


class Picked(layers.Layer):
    def build(self, input_shape):
        pass

    def call(self, inputs):
        return waves(inputs["x"])


@pytest.mark.parametrize("other, is_compiled", [("y", True), (1, False)])
def test_inputs_whose_names_cannot_be_sorted_run_as_they_are(
    other, is_compiled, compiled
):
    model = keras.Sequential([Picked()])
    layer = model.layers[0]
    inputs = dict.fromkeys(("x", other), tf.constant(rows(3, 4)))
    want = layer(inputs)

    with Blocks(model, (Picked,)).compiled():
        got = layer(inputs)

    np.testing.assert_array_equal(got, want)
    assert bool(compiled) == is_compiled


def test_a_frozen_layer_has_no_gradient_and_keeps_its_statistics():
    def make():
        frozen = layers.BatchNormalization(trainable=False)
        return keras.Sequential([frozen, layers.BatchNormalization()])

    check_same(make, rows(6, 8))


def test_it_is_traced_a_few_times_for_all_shapes(compiled):
    model = sequential(layers.LayerNormalization)()
    for length in range(1, 9):
        for size in (2, 3):
            model(rows(size, length, 8))
    one = Blocks(model)
    for length in range(1, 9):
        for size in (2, 3):
            with one.compiled():
                model(rows(size, length, 8))

    assert [shape for _, [shape] in compiled] == [
        (2, 1, 8),
        (None, 1, 8),
        (None, None, 8),
    ]


def test_a_gradient_is_not_differentiated_again():
    model = sequential(layers.LayerNormalization)()
    x = tf.constant(rows(3, 8))
    with Blocks(model).compiled(), tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        with pytest.raises(ValueError, match=r'Received: compile="layers"'):
            tape.gradient(y, x)


@pytest.mark.parametrize("compile", ["all", (), ("residual",), layers.Dense(1)])
def test_what_is_not_a_choice_is_refused(compile):
    message = f"Received: compile={compile!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        kmem.DTR(compile=compile)


def test_a_layer_that_casts_its_weights_runs_operator_by_operator():
    """TensorFlow fuses a compiled layer's operations, and rounds them once."""
    results = []
    for options in ({"dtr": True}, {}):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, "gelu"), layers.Dense(3)]
        )
        model.compile("sgd", "mse", run_eagerly=not options)
        x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
        options = {"mixed_precision": "bfloat16", "verbose": 0, **options}
        kmem.wrap(model).fit(x, x[:, :3], **options)
        results.append(model.get_weights())

    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)
