"""`fit(chunked_attention=True)`: the numbers of a plain `fit`, no scores."""

import keras
import numpy as np
import peaks
import pytest
import tensorflow as tf
from versions import IS_KERAS_3_12

import kmem
from kmem.attention import blocks

LENGTH, FEATURES = 13, 16
# Keras 3.12's function takes as many as a query has.
KEY_HEADS = 4 if IS_KERAS_3_12 else 2


class Plain(keras.layers.Layer):
    """Calls Keras's function with several heads for each key's head."""

    def call(self, x):
        query = keras.ops.reshape(x, (-1, LENGTH, 4, 4))
        key = keras.ops.reshape(x, (-1, LENGTH, 4, 4))[:, :, :KEY_HEADS]
        attended = keras.ops.dot_product_attention(
            query, key, key[..., :3], is_causal=True
        )
        return keras.ops.reshape(attended, (-1, LENGTH, 12))


def attending(kind, mask_zero=False, dropout=0.0, scores=False):
    keras.utils.set_random_seed(0)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(20, FEATURES, mask_zero=mask_zero)(ids)
    if kind == "grouped":
        layer = keras.layers.GroupQueryAttention(4, 4, 2, dropout=dropout)
        x = layer(x, x, use_causal_mask=True)
    elif kind == "function":
        x = Plain()(x)
    else:
        layer = keras.layers.MultiHeadAttention(4, 4, dropout=dropout)
        x = layer(
            *(x, x),
            use_causal_mask=kind == "causal",
            return_attention_scores=scores,
        )
        x = x[0] if scores else x
    return keras.Model(ids, keras.layers.Dense(3)(x))


def data(rows=6):
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 20, (rows, LENGTH))
    ids[:, 9:] = 0
    return ids, rng.normal(size=(rows, LENGTH, 3))


def trained(model, compile_with, **options):
    x, y = data()
    kmem.wrap(model).compile(keras.optimizers.SGD(0.5), "mse", **compile_with)
    history = model.fit(
        *(x, y),
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        **options,
    ).history
    return model.get_weights(), history


CASES = {
    "causal": ({}, {"run_eagerly": True}, {}),
    "both ways": ({"mask_zero": True}, {"jit_compile": True}, {}),
    "causal, masked": ({"mask_zero": True}, {}, {"microbatches": 2}),
    "grouped": ({"mask_zero": True}, {}, {}),
    "function": ({}, {}, {}),
    "causal, planned": ({"mask_zero": True}, {}, {"remat": "auto"}),
    "causal, evicted": ({"mask_zero": True}, {}, {"dtr": True}),
    "function, evicted": ({}, {}, {"dtr": True}),
}


# Of Keras's, on masks that grouped attention takes off nothing.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_weights_and_logs_are_those_of_a_plain_fit(case):
    model, compile_with, options = CASES[case]
    kind = case.split(",")[0]

    want = trained(attending(kind, **model), compile_with)
    options = options | {"chunked_attention": True}
    got = trained(attending(kind, **model), compile_with, **options)

    for some, others in zip(got[0], want[0], strict=True):
        np.testing.assert_allclose(some, others, rtol=2e-5, atol=2e-6)
    for name, values in want[1].items():
        np.testing.assert_allclose(got[1][name], values, 1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("xla", [False, True])
def test_attention_and_gradients_are_those_of_float64(xla, dtype):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 11, 4, 8))
    key, value = rng.normal(size=(2, 17, 4, 8)), rng.normal(size=(2, 17, 4, 5))
    # By heads; one query sees nothing, and so all keys alike.
    mask = rng.random((2, 4, 11, 17)) > 0.4
    mask[0, :, 3] = False
    weights = rng.normal(size=(2, 11, 4, 5))
    scores = blocks.Scores(
        0.3, (tf.constant(mask), tf.ones((2, 1, 1, 17), bool))
    )

    def gradients(function, dtype):
        tensors = [tf.cast(x, dtype) for x in (query, key, value)]

        def run(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(*tensors)
                total = tf.reduce_sum(tf.cast(value, tf.float64) * weights)
            return value, *tape.gradient(total, tensors)

        if dtype != "float64":
            run = tf.function(run, jit_compile=xla)
        return [tf.cast(x, tf.float64).numpy() for x in run(*tensors)]

    def plain(query, key, value):
        scores = tf.einsum("btnh,bsnh->bnts", query, key) * 0.3
        scores = tf.where(mask, scores, tf.constant(-1e300, scores.dtype))
        return tf.einsum("bnts,bsnh->btnh", tf.nn.softmax(scores), value)

    got = gradients(lambda *x: blocks.attention(*x, scores), dtype)
    want = gradients(plain, "float64")

    tolerance = 1e-6 if dtype == "float32" else 3e-2
    for some, others in zip(got, want, strict=True):
        atol = tolerance * np.abs(others).max()
        np.testing.assert_allclose(some, others, rtol=0, atol=atol)


def test_dropout_draws_the_same_numbers_in_the_gradient():
    rng = np.random.default_rng(0)
    query, key, value = (
        tf.constant(rng.normal(size=(1, 12, 2, 4)), tf.float64)
        for _ in range(3)
    )
    scores = blocks.Scores(0.5, rate=0.5, seed=tf.constant([1, 2]))

    def total(value):
        return tf.reduce_sum(blocks.attention(query, key, value, scores) ** 2)

    want = blocks.attention(query, key, value, scores)
    again = blocks.attention(query, key, value, scores)
    theory, numeric = tf.test.compute_gradient(total, [value])

    np.testing.assert_array_equal(want, again)
    np.testing.assert_allclose(theory[0], numeric[0], rtol=1e-5)
    for argument in (query, key):

        def of(x, argument=argument):
            given = [x if each is argument else each for each in (query, key)]
            return tf.reduce_sum(blocks.attention(*given, value, scores) ** 2)

        theory, numeric = tf.test.compute_gradient(of, [argument])
        np.testing.assert_allclose(theory[0], numeric[0], 1e-4, 1e-6)


def test_a_layer_that_drops_draws_once_a_step_and_trains():
    model = attending("causal", mask_zero=True, dropout=0.2)
    (layer,) = [x for x in model.layers if "attention" in x.name]
    (seed,) = [v for v in layer.variables if "seed" in v.path]
    before = seed.numpy()

    _, history = trained(model, {}, chunked_attention=True)

    # Two epochs of two batches; validation does not draw.
    np.testing.assert_array_equal(seed.numpy() - before, [0, 4])
    assert np.all(np.isfinite(history["loss"]))


def peak_of_step(length, **options):
    keras.utils.set_random_seed(0)
    x = keras.Input((length, 32))
    y = keras.layers.MultiHeadAttention(8, 4)(x, x, use_causal_mask=True)
    model = kmem.wrap(keras.Model(x, y))
    model.compile(keras.optimizers.SGD(), "mse", jit_compile=False)
    batch = np.ones((1, length, 32), "float32")
    # A pipeline has its batches ready sooner or later.
    return peaks.least_peak_bytes(
        lambda: model.fit(batch, batch, verbose=0, **options)
    )


def test_bytes_grow_with_the_length_and_not_with_its_square():
    scores = 4 * 8 * 512**2
    plain = peak_of_step(512)
    short = peak_of_step(512, chunked_attention=True)
    long = peak_of_step(1024, chunked_attention=True)

    assert plain > 2 * scores
    assert short < scores / 4
    # Beside a step there is the next batch, or not yet.
    assert long < 2.5 * short


@pytest.mark.parametrize("option", [{"dtr": True}, {"sharding": "full"}])
def test_scores_are_nowhere_under_other_options(option):
    scores = 4 * 8 * 512**2

    assert peak_of_step(512, chunked_attention=True, **option) < scores / 4


def test_scores_are_computed_once_and_once_again(monkeypatch):
    query = tf.ones((1, 64, 2, 8))
    products = []
    matmul = tf.matmul

    def counted(a, b, **arguments):
        products.append(a.shape)
        return matmul(a, b, **arguments)

    monkeypatch.setattr(blocks.tf, "matmul", counted)
    with tf.GradientTape() as tape:
        tape.watch(query)
        value = blocks.attention(query, query, query, blocks.Scores(1.0))
    num_forward = len(products)
    tape.gradient(value, query)

    # 64 queries in blocks of 8 / 2: scores and what they weigh; then scores
    # again, and four products of a plain gradient.
    assert num_forward == 16 * 2
    assert len(products) == 16 * (2 + 5)


def test_scores_that_are_asked_for_stay_plain():
    want = trained(attending("causal", scores=True), {})
    name = r"multi_head_attention\w* \(MultiHeadAttention\)"
    for given in ({}, {"memory_budget": "8GB"}):
        options = {"chunked_attention": True, **given}
        with pytest.warns(UserWarning, match=f"effect.*with {name}") as caught:
            trained(attending("causal", scores=True), {}, **options)
        assert len(caught) == 1
    model = attending("causal", scores=True)
    other = keras.layers.MultiHeadAttention(2, 4)
    outputs = model.outputs[0] + 0 * other(model.outputs[0], model.outputs[0])
    got = trained(
        keras.Model(model.inputs, outputs), {}, chunked_attention=True
    )

    for some, others in zip(got[0], want[0], strict=False):
        np.testing.assert_allclose(some, others, rtol=1e-5, atol=1e-6)


def test_second_derivatives_are_refused():
    query = tf.ones((1, 4, 1, 2))
    with tf.GradientTape() as outer:
        outer.watch(query)
        with tf.GradientTape() as tape:
            tape.watch(query)
            value = blocks.attention(query, query, query, blocks.Scores(1.0))
        gradient = tape.gradient(value, query)

    with pytest.raises(ValueError, match="must not be differentiated"):
        outer.gradient(gradient, query)
