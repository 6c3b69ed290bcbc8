"""`kmem.estimate`: what is simulated against what is measured."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from black_and_white import assert_readable_in_black_and_white
from keras import layers

import kmem
from kmem.commands import cli
from kmem.planning import timeline as timelines


def convolutional():
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for filters in (32, 32, 64):
        x = keras.layers.Conv2D(filters, 3, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


def recurrent():
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Reshape((32, 24)),
            keras.layers.LSTM(64, return_sequences=True),
            keras.layers.LSTM(64),
            keras.layers.Dense(4),
        ]
    )


def attentive():
    inputs = keras.Input((16, 16, 3))
    x = keras.layers.Reshape((16, 48))(inputs)
    y = keras.layers.LayerNormalization()(x)
    y = keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(y, y)
    x = keras.layers.Add()([x, y])
    y = keras.layers.Dense(128, "gelu")(x)
    x = keras.layers.Add()([x, keras.layers.Dense(48)(y)])
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


SIZE = 128


def compiled(make, optimizer="adam"):
    keras.utils.set_random_seed(0)
    model = make()
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def specs(size=SIZE):
    return tf.TensorSpec((size, 16, 16, 3)), tf.TensorSpec((size, 4))


def measured(model, **options) -> int:
    """The peak of a step with everything of the model's in it.

    The least of some: threads may run an operation early by chance.
    """
    x = keras.random.normal((SIZE, 16, 16, 3), seed=0)
    y = keras.ops.one_hot(np.arange(SIZE) % 4, 4)
    kmem.wrap(model).memory_options = kmem.MemoryOptions(**options)
    for _ in range(2):
        model.train_on_batch(x, y)
    peaks = []
    for _ in range(5):
        with kmem.memory.track() as usage:
            model.train_on_batch(x, y)
        peaks.append(usage.peak_bytes - usage.start_bytes)
    held = [*model.variables, *model.optimizer.variables, x, y]
    return min(peaks) + sum(
        int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in held
    )


@pytest.mark.parametrize("make", [convolutional, recurrent, attentive])
def test_the_peak_is_near_the_measured_one(make):
    model = compiled(make)
    weights = model.get_weights()
    before = kmem.memory.current()
    with kmem.memory.track() as usage:
        estimate = kmem.estimate(model, specs())
    # Nothing is run, and metrics' few numbers are all that is made.
    assert not model.optimizer.built
    assert usage.peak_bytes - before < 200_000 < estimate.peak_bytes / 20
    for left, right in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)

    assert estimate.peak_bytes == pytest.approx(measured(model), rel=0.15)
    kinds = "parameter optimizer batch gradient activation workspace".split()
    parts = [getattr(estimate, f"{kind}_bytes") for kind in kinds]
    assert sum(parts) == estimate.peak_bytes
    bounds = estimate.least_peak_bytes, estimate.most_peak_bytes
    assert bounds[0] <= estimate.peak_bytes <= bounds[1]
    # With an optimizer that has its variables it is the same.
    again = kmem.estimate(model, specs())
    assert again.optimizer_bytes == estimate.optimizer_bytes
    assert again.peak_bytes == estimate.peak_bytes
    names = {layer.name for layer in model.layers}
    assert {t.layer for t in estimate.tensors[:3]} <= names
    assert estimate.tensors[0].num_bytes >= estimate.tensors[1].num_bytes

    if make is not convolutional:  # Its statistics would be a part's.
        split = estimate.options["microbatches=4"]
        measured_split = measured(model, microbatches=4)
        assert split == pytest.approx(measured_split, rel=0.15)


def test_a_batch_may_be_larger_than_any_machine():
    model = compiled(recurrent)
    whole = kmem.estimate(model, specs(10**8)).peak_bytes
    assert whole > 10**12
    # Activations grow with the batch, and nothing else does.
    half = kmem.estimate(model, specs(10**8 // 2)).peak_bytes
    assert 2 * half == pytest.approx(whole, rel=1e-4)


def dense():
    """16 examples of 1000 numbers: their bytes can be counted by hand."""
    model = keras.Sequential(
        [
            keras.Input((1000,)),
            keras.layers.Dense(500, use_bias=False, name="first"),
            keras.layers.Dense(250, use_bias=False, name="second"),
        ]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model, (tf.TensorSpec((16, 1000)), tf.TensorSpec((16, 250)))


def test_a_timeline_knows_what_each_byte_is_for():
    estimate = kmem.estimate(*dense())
    timeline = estimate.timeline
    weights = 4 * (1000 * 500 + 500 * 250)
    assert timeline.fixed["parameters"] == weights == estimate.parameter_bytes
    assert timeline.fixed["batch"] == 4 * 16 * (1000 + 250)
    assert np.all(np.diff(timeline.starts) >= 0)
    total = sum(timeline.in_use.values())
    assert len(total) == len(timeline.starts) - 1
    peak = total.max() + sum(timeline.fixed.values())
    assert estimate.least_peak_bytes <= peak <= estimate.most_peak_bytes
    # The gradient of the largest weight; a layer's output is what grows.
    assert timeline.in_use["gradients"].max() >= 4 * 1000 * 500
    assert timeline.in_use["activations"].max() >= 4 * 16 * (500 + 250)
    (largest, *_) = estimate.tensors
    assert (largest.kind, largest.layer) == ("gradients", "first")


def test_layers_of_one_kind_are_told_apart():
    keras.backend.clear_session()  # Of the numbers in layers' names.
    layers = [keras.layers.Dense(units) for units in (300, 400, 500)]
    model = keras.Sequential([keras.Input((200,)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    batch = tf.TensorSpec((1000, 200)), tf.TensorSpec((1000, 500))
    names = {
        tensor.shape: tensor.layer
        for tensor in kmem.estimate(model, batch).tensors
        if tensor.operation.endswith("MatMul")
    }
    for layer in layers:
        assert names[1000, layer.units] == layer.name


def test_a_timeline_is_drawn_with_the_names_of_the_largest_tensors(tmp_path):
    estimate = kmem.estimate(*dense())
    estimate.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    figure = timelines.figure(estimate.timeline)
    assert_readable_in_black_and_white(figure)
    memory, names = figure.axes
    assert memory.get_title(loc="left").startswith("A step of 16 examples: ")
    (first, *_) = [text.get_text() for text in names.texts]
    assert first == " 1. first: 2.00 MB, float32[1000, 500]"


def test_it_prints_itself(tmp_path, capsys):
    path = tmp_path / "model.keras"
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    # As that of the model that is loaded.
    model.optimizer.build(model.trainable_variables)
    model.save(path)
    picture = tmp_path / "step.svg"
    words = ["--batch", "1000000", "--plot", str(picture)]
    assert cli.main(["estimate", str(path), *words]) == 0
    printed = capsys.readouterr().out
    batch = tf.TensorSpec((1000000, 8)), tf.TensorSpec((1000000, 4))
    estimate = kmem.estimate(model, batch)
    assert printed == f"{estimate.summary()}\ndrawn: {picture}\n"
    assert "svg" in picture.read_text()
    assert "microbatches=8" in printed
    assert estimate._repr_html_().startswith("<pre>a step of 1000000 examples")


def test_what_cannot_be_told_is_an_error():
    model = compiled(recurrent)
    with pytest.raises(ValueError, match="fixed shape.*Received.*None"):
        kmem.estimate(model, specs(None))
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="graph.*Received: run_eagerly=True"):
        kmem.estimate(model, specs())
    with pytest.raises(ValueError, match="must be compiled"):
        kmem.estimate(recurrent(), specs())
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="must be built"):
        kmem.estimate(unbuilt, specs())


def test_a_layer_that_looks_up_words_keeps_the_rows():
    words = np.array([["a b c"], ["b d"], ["d c b a"], ["a"]] * 64)
    look_up = layers.TextVectorization(output_sequence_length=16)
    look_up.adapt(words)
    block = [layers.Embedding(8, 64), layers.Dense(128, "relu")]

    def estimated(*first):
        model = keras.Sequential([*first, *block, layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    y = tf.TensorSpec((256, 16, 1))
    told = estimated(keras.Input((1,), dtype="string"), look_up)
    given = estimated(keras.Input((16,), dtype="int64"))

    found = kmem.estimate(told, (words, y)).peak_bytes
    want = kmem.estimate(given, (np.zeros((256, 16), "int64"), y)).peak_bytes
    assert abs(found - want) < 0.05 * want
