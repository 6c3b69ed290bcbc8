"""AdamW with moments of 2 bytes a weight: close to AdamW, and a Keras
optimizer in every respect."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem

VOCABULARY, LENGTH = 40, 16


def text(num_rows, seed):
    """Sentences in which a word tells two that may follow it."""
    random = np.random.default_rng(seed)
    words = random.integers(VOCABULARY, size=(num_rows, 1))
    for _ in range(LENGTH):
        coin = random.integers(2, size=(num_rows, 1))
        words = np.hstack([words, (3 * words[:, -1:] + 7 * coin) % VOCABULARY])
    return words[:, :-1], words[:, 1:]


def language_model(optimizer, **compile_arguments):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 64)(inputs)
    attended = layers.MultiHeadAttention(2, 32)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    x = layers.LayerNormalization()(
        x + layers.Dense(64)(layers.Dense(128, "gelu")(x))
    )
    model = keras.Model(inputs, layers.Dense(VOCABULARY)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **compile_arguments)
    return kmem.wrap(model)


def test_a_small_language_model_learns_as_with_adamw():
    def validation_loss(optimizer):
        model = language_model(optimizer)
        x, y = text(1024, seed=0)
        model.fit(x, y, epochs=8, batch_size=32, verbose=0)
        return model.evaluate(*text(512, seed=1), verbose=0)

    arguments = {"learning_rate": 2e-3, "global_clipnorm": 1.0}
    want = validation_loss(keras.optimizers.AdamW(**arguments))
    got = validation_loss(kmem.optimizers.AdamW8bit(**arguments))

    # It has learnt: by chance it is log(40) = 3.7, at best log(2) = 0.69.
    assert want < 0.9
    assert got == pytest.approx(want, rel=0.01)


def dense(width=64, **arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((width,)), layers.Dense(width, "tanh"), layers.Dense(1)]
    )
    optimizer = kmem.optimizers.AdamW8bit(1e-2, **arguments)
    model.compile(optimizer, "mse")
    return kmem.wrap(model)


def data(width=64):
    x = np.random.default_rng(0).normal(size=(16, width)).astype("float32")
    return x, x[:, :1]


def num_bytes(variables):
    return sum(v.numpy().nbytes for v in variables)


def test_its_state_takes_two_bytes_a_weight_and_a_scale_for_256():
    sizes = {(64, 64): 2 * (4096 + 4 * 16), (63, 65): 8 * 4095, (5,): 8 * 5}
    sizes[4097,] = 2 * (4097 + 4 * 17)
    for shape, want in sizes.items():
        optimizer = kmem.optimizers.AdamW8bit()
        variable = keras.Variable(np.ones(shape, "float32"))
        optimizer.build([variable])
        # Beside its learning rate and its count of steps.
        assert num_bytes(optimizer.variables[2:]) == want

    optimizer = kmem.optimizers.AdamW8bit()
    kernel = keras.Variable(np.ones((1024, 300), "float32"))
    optimizer.build([kernel])
    assert num_bytes(optimizer.variables) <= 2.1 * math.prod(kernel.shape)


def test_an_update_in_pieces_is_the_whole_one_in_less_memory(monkeypatch):
    """Both moments of a large variable in float32 never stand beside it."""
    random = np.random.default_rng(0)
    start, gradient = random.normal(size=(2, 2**20)).astype("float32")

    def update(piece):
        monkeypatch.setattr(kmem.optimizers, "_PIECE", piece)
        variable = keras.Variable(start)
        optimizer = kmem.optimizers.AdamW8bit()
        optimizer.build([variable])
        given = tf.constant(gradient)
        with kmem.memory.track("CPU") as usage:
            before = kmem.memory.current("CPU")
            optimizer.apply([given])
        return variable.numpy(), usage.peak_bytes - before

    whole, whole_bytes = update(2**20)
    pieces, bytes_in_pieces = update(2**16)

    np.testing.assert_array_equal(pieces, whole)
    # All changes of the variable, twice while pieces are joined.
    assert bytes_in_pieces < whole_bytes - 2 * gradient.nbytes


def test_embeddings_keep_their_moments_in_float32():
    layer = layers.Embedding(1000, 8)
    layer.build(None)
    optimizer = kmem.optimizers.AdamW8bit()
    optimizer.build(layer.trainable_variables)

    assert num_bytes(optimizer.variables[2:]) == 8 * 8000


def test_what_is_not_coded_is_updated_as_by_adamw():
    """No variable has 4,096 numbers."""
    models = []
    for kind in (keras.optimizers.AdamW, kmem.optimizers.AdamW8bit):
        model = dense(width=32)
        model.compile(kind(1e-2), "mse")
        model.fit(*data(32), epochs=3, batch_size=4, verbose=0, shuffle=False)
        models.append(model)

    for got, want in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_first_step_is_adamw_s_to_the_bit_of_a_code():
    """Before it has read a code, its moments are exact."""
    kernels = []
    for kind in (keras.optimizers.AdamW, kmem.optimizers.AdamW8bit):
        model = dense()
        model.compile(kind(1e-2), "mse")
        model.fit(*data(), epochs=1, verbose=0, shuffle=False)
        kernels.append(model.layers[0].kernel.numpy())

    np.testing.assert_allclose(*kernels, atol=1e-7)


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_other_modes_give_the_numbers_of_a_graph(mode):
    models = [dense(), dense()]
    models[1].compile(
        models[1].optimizer,
        "mse",
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
    )
    for model in models:
        model.fit(*data(), epochs=3, batch_size=8, verbose=0, shuffle=False)

    for got, want in zip(*(m.get_weights() for m in models), strict=True):
        # A last bit may choose another code.
        np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize(
    "options, arguments",
    [
        ({"microbatches": 4}, {}),
        ({"gradient_accumulation_steps": 2}, {"clipnorm": 0.1}),
        ({"mixed_precision": "float16"}, {"global_clipnorm": 0.1}),
        ({}, {"use_ema": True, "gradient_accumulation_steps": 2}),
    ],
    ids=str,
)
def test_it_trains_under_options_and_with_keras_s_own(options, arguments):
    model = dense(**arguments)
    before = model.evaluate(*data(), verbose=0)

    model.fit(*data(), epochs=10, batch_size=8, verbose=0, **options)

    assert model.evaluate(*data(), verbose=0) < 0.7 * before


def test_weights_that_are_excluded_do_not_decay():
    kernels = []
    for excluded in ([], ["kernel"]):
        model = dense(weight_decay=0.5)
        model.optimizer.exclude_from_weight_decay(var_names=excluded)
        x, y = data()
        # No gradient: nothing but the decay.
        model.fit(0 * x, 0 * y, epochs=2, verbose=0)
        kernels.append(np.abs(model.layers[0].kernel.numpy()).sum())

    assert kernels[0] == pytest.approx(kernels[1] * 0.995**2, rel=1e-5)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_saved_training_goes_on_as_if_nothing_had_been(tmp_path, name):
    path = str(tmp_path / name)
    model = dense()
    model.fit(*data(), epochs=3, verbose=0)
    if name.endswith(".keras"):
        model.save(path)
        other = kmem.wrap(keras.saving.load_model(path))
    else:
        model.save_weights(path)
        other = dense()
        other.fit(*data(), epochs=1, verbose=0)
        other.load_weights(path)
    assert isinstance(other.optimizer, kmem.optimizers.AdamW8bit)

    for each in (model, other):
        each.fit(*data(), epochs=2, verbose=0)

    pairs = zip(
        [*model.variables, *model.optimizer.variables],
        [*other.variables, *other.optimizer.variables],
        strict=True,
    )
    for got, want in pairs:
        np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_its_arguments_make_an_equal_one():
    optimizer = kmem.optimizers.AdamW8bit(
        3e-4, weight_decay=0.1, beta_2=0.98, clipnorm=1.0
    )
    config = optimizer.get_config()

    assert "amsgrad" not in config
    assert type(optimizer).from_config(config).get_config() == config
    with pytest.raises(ValueError, match="no `amsgrad`.*amsgrad=True"):
        kmem.optimizers.AdamW8bit(amsgrad=True)


def test_shards_of_it_are_refused_by_name():
    with pytest.raises(ValueError, match="optimizer=AdamW8bit"):
        dense().fit(*data(), verbose=0, sharding="full")
