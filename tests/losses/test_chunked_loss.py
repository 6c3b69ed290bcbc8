"""`fit(chunked_loss=True)`: the numbers of a plain `fit`, without logits."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_math_ops
from versions import IS_KERAS_3_12

import kmem
from kmem.losses import chunks

CLASSES, FEATURES, LENGTH = 50, 8, 12
SPARSE = keras.losses.SparseCategoricalCrossentropy
ACCURACIES = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)]


def language_model(end="dense", mask_zero=False):
    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int32")
    if end == "tied":
        embedding = keras.layers.ReversibleEmbedding(
            *(CLASSES, FEATURES), mask_zero=mask_zero, logit_soft_cap=3.0
        )
    else:
        embedding = keras.layers.Embedding(
            CLASSES, FEATURES, mask_zero=mask_zero
        )
    hidden = keras.layers.Dense(FEATURES, "tanh")(embedding(ids))
    if end == "softmax":
        hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    if end == "tied":
        outputs = embedding(hidden, reverse=True)
    elif end == "softmax":
        outputs = keras.layers.Dense(CLASSES, "softmax")(hidden)
    elif end == "softmax layer":
        logits = keras.layers.Dense(CLASSES, use_bias=False)(hidden)
        outputs = keras.layers.Activation("softmax", dtype="float32")(logits)
    else:
        outputs = keras.layers.Dense(CLASSES)(hidden)
    return keras.Model(ids, outputs)


def data(rows=10):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, CLASSES, (rows, LENGTH))
    return ids, (ids * 7 + 3) % CLASSES


def trained(model, compile_with, fit_with, **options):
    """Weights and logs after two epochs of an uneven last batch."""
    x, y = data()
    kmem.wrap(model)
    compile_with = {
        "optimizer": keras.optimizers.SGD(1.0),
        "loss": SPARSE(from_logits=True),
        "metrics": [
            keras.metrics.deserialize(keras.metrics.serialize(each))
            if isinstance(each, keras.Metric)
            else each
            for each in ACCURACIES
        ],
    } | compile_with
    model.compile(**compile_with)
    fit_with = {
        "y": y,
        "batch_size": 4,
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
        "validation_data": (x[:5], y[:5]),
    } | fit_with
    history = model.fit(x, **fit_with, **options).history
    return model.get_weights(), history


def assert_same(got, want, rtol=2e-5):
    for some, others in zip(got[0], want[0], strict=True):
        np.testing.assert_allclose(some, others, rtol=rtol, atol=rtol / 10)
    assert got[1].keys() == want[1].keys()
    for name, values in want[1].items():
        np.testing.assert_allclose(
            got[1][name], values, rtol, 1e-6, err_msg=name
        )


WEIGHTS = np.random.default_rng(1).random((10, LENGTH)).astype("float32")
CASES = {
    "eager": ({}, {"run_eagerly": True}, {}),
    "xla, masked": (
        {"mask_zero": True},
        {"jit_compile": True},
        {"sample_weight": WEIGHTS},
    ),
    "softmax, class weights": (
        {"end": "softmax", "mask_zero": True},
        {"loss": "sparse_categorical_crossentropy"},
        {
            "class_weight": {i: 1 + i % 3 for i in range(CLASSES)},
            "y": data()[1][:, 0],
            "validation_data": None,
        },
    ),
    "a layer of softmax": (
        {"end": "softmax layer", "mask_zero": True},
        {
            "loss": SPARSE(
                ignore_class=10, reduction="mean_with_sample_weight"
            ),
            "weighted_metrics": ["sparse_categorical_crossentropy"],
        },
        {"sample_weight": WEIGHTS[:, :1]},
    ),
    "tied, one-hot": (
        {"end": "tied"},
        {
            "loss": keras.losses.CategoricalCrossentropy(
                from_logits=True, label_smoothing=0.1, reduction="sum"
            ),
            "optimizer": "sgd",
            "metrics": ["accuracy", "categorical_crossentropy"][:1],
        },
        {
            "y": np.eye(CLASSES, dtype="float32")[data()[1]],
            "validation_data": None,
        },
    ),
    "micro-batches": (
        {"mask_zero": True},
        {"loss_weights": [0.5]},
        {"microbatches": 3},
    ),
    "accumulation": ({}, {}, {"gradient_accumulation_steps": 2}),
    "planned": ({"mask_zero": True}, {}, {"remat": "auto"}),
    "tied, evicted": (
        {"end": "tied", "mask_zero": True},
        {"metrics": []},
        {"dtr": True},
    ),
    "in shards": ({"mask_zero": True}, {}, {"sharding": "full"}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_logs_are_those_of_a_plain_fit(case):
    model, compile_with, fit_with = CASES[case]
    if "tied" in case and not hasattr(keras.layers, "ReversibleEmbedding"):
        pytest.skip("Keras 3.12 has no tied embedding of its own.")
    if model == {"end": "tied", "mask_zero": True} and IS_KERAS_3_12:
        pytest.skip("Keras 3.12 gives the mask of a tied embedding features.")

    want = trained(language_model(**model), compile_with, fit_with)
    got = trained(
        language_model(**model), compile_with, fit_with, chunked_loss=True
    )

    assert_same(got, want)


def adapted(end, how):
    """A language model whose last layer is quantized, has LoRA, or both."""
    model = language_model(end)
    adaptable = [x for x in model.layers if hasattr(x, "enable_lora")]
    last = adaptable[0 if end == "tied" else -1]
    if how == "frozen":
        last.trainable = False
    if how.startswith("int"):
        last.quantize(how[:4])
    if how.endswith("lora"):
        last.enable_lora(2, b_initializer="he_uniform")
    return model


@pytest.mark.skipif(
    not hasattr(keras.layers, "ReversibleEmbedding"),
    reason="Keras 3.12 has no tied embedding of its own.",
)
@pytest.mark.parametrize(
    "end, how",
    [
        ("dense", "lora"),
        *(("dense", how) for how in ("int8, lora", "int4, lora", "frozen")),
        *(("tied", how) for how in ("lora", "int8, lora", "frozen")),
        ("softmax layer", "int8"),
    ],
)
def test_a_last_layer_may_be_frozen_quantized_or_have_lora(end, how):
    compile_with = {"loss": SPARSE(from_logits=end != "softmax layer")}

    want = trained(adapted(end, how), compile_with, {})
    got = trained(adapted(end, how), compile_with, {}, chunked_loss=True)

    assert_same(got, want)


def test_a_quantized_last_layer_in_16_bits_is_as_near_to_32_as_keras_s():
    def weights_and_logs(**options):
        model = adapted("dense", "int8, lora")
        return trained(model, {"metrics": ["accuracy"]}, {}, **options)

    option = {"mixed_precision": "bfloat16"}
    exact, _ = weights_and_logs()
    want, logs = weights_and_logs(**option)

    got, others = weights_and_logs(chunked_loss=True, **option)

    def error(weights):
        pairs = zip(weights, exact, strict=True)
        return max(abs(a - b).max() for a, b in pairs if a.dtype == "float32")

    assert error(got) <= error(want) < 0.01
    assert_same(([], others), ([], logs), rtol=0.02)


def peak_of_step(depth=0, frozen=False, **options):
    ids = np.zeros((4, 256), "int32")
    keras.utils.set_random_seed(0)
    inputs = keras.Input((256,), dtype="int32")
    hidden = keras.layers.Embedding(10, 16)(inputs)
    for _ in range(depth):
        hidden = keras.layers.Dense(16, "gelu")(hidden)
    last = keras.layers.Dense(4096, trainable=not frozen)
    model = keras.Model(inputs, last(hidden))
    kmem.wrap(model).compile(
        keras.optimizers.SGD(),
        SPARSE(from_logits=True),
        metrics=["accuracy"],
    )

    class Peaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            kmem.memory.reset_peak("CPU")
            self.before = kmem.memory.current("CPU")

        def on_train_batch_end(self, batch, logs=None):
            self.last = kmem.memory.peak("CPU") - self.before

    peaks = Peaks()
    arguments = dict(batch_size=4, epochs=2, verbose=0, callbacks=[peaks])
    model.fit(ids, ids, **arguments, **options)
    return peaks.last


def test_bytes_are_those_of_hidden_states_and_weights_not_of_logits():
    peaks = {
        chunked: peak_of_step(chunked_loss=chunked) for chunked in (False, True)
    }

    logits, weight = 4 * 4 * 256 * 4096, 4 * 16 * 4096
    assert peaks[False] > logits
    # In a chunk logits are as large as the weight: those, their slopes, what
    # they add to its gradient, that itself, and what accuracy makes of them.
    assert peaks[True] < 7 * weight < logits / 9


@pytest.mark.parametrize("options", [{}, {"dtr": True}], ids=str)
def test_a_frozen_weight_has_no_gradient_in_chunks(options):
    """A graph leaves out by itself what nothing reads."""
    peaks = [
        peak_of_step(1, frozen, chunked_loss=True, **options)
        for frozen in (False, True)
    ]

    # Its sum, and what a chunk adds to that.
    weight = 4 * 16 * 4096
    assert peaks[1] < peaks[0] - weight


@pytest.mark.slow
def test_what_is_left_without_logits_is_recomputed():
    chunked = peak_of_step(12, chunked_loss=True)
    planned = peak_of_step(12, chunked_loss=True, remat="auto")

    hidden = 4 * 4 * 256 * 16
    # Two of each layer are kept, but for those of a few.
    assert planned < chunked - 10 * hidden


@pytest.mark.parametrize("option", [{"dtr": True}, {"sharding": "full"}])
def test_logits_are_nowhere_under_other_options(option):
    logits = 4 * 4 * 256 * 4096

    assert peak_of_step(chunked_loss=True, **option) < logits / 6


@pytest.mark.parametrize("reduction, passes", [("sum", 1), (None, 2)])
def test_logits_are_computed_once_and_twice_for_a_loss_of_each_token(
    reduction, passes, monkeypatch
):
    hidden, weight = tf.ones((96, 8)), tf.ones((8, 64))
    labels = tf.zeros(96, tf.int32)
    products = []
    product = gen_math_ops.mat_mul

    def counted(a, b, *args, **kwargs):
        products.append(a.shape)
        return product(a, b, *args, **kwargs)

    # What `tf.matmul` and its gradient are made of.
    monkeypatch.setattr(gen_math_ops, "mat_mul", counted)
    loss = kmem.losses.LinearCrossEntropy(reduction=reduction)
    with tf.GradientTape() as tape:
        tape.watch([hidden, weight])
        value = loss(labels, hidden, weight)
    tape.gradient(value, [hidden, weight])

    # Of 96 tokens, 12 chunks of 8: 96 * 8 // 64 < 12 <= 96 / 8. Each has its
    # logits, and two products with their slopes.
    num_chunks = 96 // int(chunks.tokens_in_chunk(96, 8, 64, 4)[0])
    assert num_chunks == 8
    assert len(products) == num_chunks * (passes + 2)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", None])
@pytest.mark.parametrize("xla", [False, True])
def test_loss_and_gradients_are_those_of_float64(reduction, xla):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(3, 7, 8))
    weight, bias = rng.normal(size=(64, 8)), rng.normal(size=64)
    labels = rng.integers(0, 64, (3, 7))
    labels[0, :2] = -1
    sample_weight, mask = rng.random((3, 7)), rng.random((3, 7)) > 0.3
    settings = dict(
        *(),
        reduction=reduction,
        ignore_class=-1,
        label_smoothing=0.1,
        soft_cap=2.0,
        z_loss=1e-2,
        transposed=True,
    )

    def plain(hidden, weight, bias):
        logits = 2 * tf.tanh((hidden @ tf.transpose(weight) + bias) / 2)
        log_sum = tf.reduce_logsumexp(logits, -1)
        targets = 0.9 * tf.one_hot(labels, 64, dtype=logits.dtype) + 0.1 / 64
        losses = log_sum - tf.reduce_sum(targets * logits, -1)
        losses += 1e-2 * log_sum**2
        counts = mask & (labels != -1)
        losses *= np.where(counts, sample_weight, 0)
        total = tf.reduce_sum(losses)
        if reduction == "sum_over_batch_size":
            return total / counts.sum()
        return losses if reduction is None else total

    def chunked(hidden, weight, bias):
        loss = kmem.losses.LinearCrossEntropy(**settings)
        return loss(labels, hidden, weight, bias, sample_weight, mask)

    def results(function, dtype):
        tensors = [tf.constant(x, dtype) for x in (hidden, weight, bias)]

        def run(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(*tensors)
                total = tf.reduce_sum(value * 0.5)
            return value, *tape.gradient(total, tensors)

        if function is chunked:
            run = tf.function(run, jit_compile=xla)
        return [x.numpy() for x in run(*tensors)]

    for got, want in zip(
        results(chunked, tf.float32), results(plain, tf.float64), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


def slices_of_a_gradient(loss_of, labels, transposed, xla=False):
    """The loss and gradients of a matrix of 512 features, whose gradient is
    larger than the logits of a chunk."""
    keras.utils.set_random_seed(0)
    num_classes = int(np.max(labels)) + 1
    shape = (num_classes, 512) if transposed else (512, num_classes)
    hidden = tf.Variable(tf.random.normal((len(labels), 512)))
    weight = tf.Variable(tf.random.normal(shape) / 20)
    bias = tf.Variable(tf.random.normal((num_classes,)))
    sources = [hidden, weight, bias]

    @tf.function(jit_compile=xla)
    def run():
        with tf.GradientTape() as tape:
            loss = loss_of(labels, *sources)
        return loss, *tape.gradient(loss, sources)

    run()
    with kmem.memory.track("CPU") as usage:
        before = kmem.memory.current("CPU")
        results = run()
    peak = usage.peak_bytes - before
    return [each.numpy() for each in results], peak


def plain_loss(transposed, dtype=tf.float64):
    def compute(labels, hidden, weight, bias):
        logits = tf.matmul(
            *(tf.cast(x, dtype) for x in (hidden, weight)),
            transpose_b=transposed,
        )
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels, logits + tf.cast(bias, dtype)
        )
        return tf.reduce_mean(losses)

    return compute


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("xla", [False, True])
def test_a_large_gradient_is_added_to_some_rows_at_a_time(transposed, xla):
    # Three chunks, the last of them not full.
    labels = np.arange(520) % 60
    chunked = kmem.losses.LinearCrossEntropy(transposed=transposed)

    got, _ = slices_of_a_gradient(chunked, labels, transposed, xla)

    exact = plain_loss(transposed)
    want, _ = slices_of_a_gradient(exact, labels, transposed)
    for some, others in zip(got, want, strict=True):
        scale = np.abs(others).max()
        np.testing.assert_allclose(some, others, atol=1e-6 * scale)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_a_chunk_adds_to_a_large_gradient_takes_no_memory(transposed):
    labels = np.arange(1024) * 7 % 2048
    plain = plain_loss(transposed, tf.float32)
    chunked = kmem.losses.LinearCrossEntropy(transposed=transposed)

    _, whole = slices_of_a_gradient(plain, labels, transposed)
    _, peak = slices_of_a_gradient(chunked, labels, transposed)

    weight, logits = 4 * 512 * 2048, 4 * 1024 * 2048
    assert whole > weight + logits
    # A quarter of the logits twice, and the hidden states and their gradient.
    assert peak < weight + logits / 2 + 3 * 4 * 1024 * 512 < whole


def test_sixteen_bits_add_up_in_thirty_two():
    x, y = data()
    logs = []
    for options in ({}, {"chunked_loss": True}):
        model = kmem.wrap(language_model("softmax layer"))
        model.compile(
            keras.optimizers.SGD(1.0), "sparse_categorical_crossentropy"
        )
        model.fit(x, y, verbose=0, mixed_precision="float16", **options)
        logs.append(model.get_weights())

    for got, want in zip(*logs, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-3)


def test_a_second_derivative_is_refused():
    hidden, weight = tf.ones((4, 8)), tf.ones((8, 16))
    loss = kmem.losses.LinearCrossEntropy()
    with tf.GradientTape() as outer:
        outer.watch(weight)
        with tf.GradientTape() as tape:
            tape.watch(weight)
            value = loss(tf.zeros(4, tf.int32), hidden, weight)
        gradient = tape.gradient(value, weight)

    with pytest.raises(ValueError, match="must not be differentiated"):
        outer.gradient(gradient, weight)


@pytest.mark.parametrize(
    ("name", "shape"),
    {
        "labels": (4, 3),
        "weight": (8,),
        "hidden": (),
        "bias": (15,),
        "mask": (3,),
    }.items(),
)
def test_a_shape_that_does_not_fit_is_named(name, shape):
    shapes = {"hidden": (4, 8), "weight": (8, 16), "labels": (4,), name: shape}
    arguments = {each: np.zeros(shapes[each], "float32") for each in shapes}

    received = f"Received: .*{re.escape(str(shape))}"
    with pytest.raises(ValueError, match=received):
        kmem.losses.LinearCrossEntropy()(**arguments)


def test_an_ignored_class_is_an_integer():
    with pytest.raises(ValueError, match="`ignore_class` must be an integer"):
        kmem.losses.LinearCrossEntropy(ignore_class="pad")


class Reading(keras.Model):
    def train_step(self, data):
        return {"largest": keras.ops.max(self(data[0], training=True))}


class Subclassed(keras.Model):
    def call(self, x):
        return x


def compiled(model=None, loss=None, **arguments):
    model = model or language_model()
    model.compile("sgd", loss or SPARSE(from_logits=True), **arguments)
    return kmem.wrap(model)


def reading(kind):
    inputs = keras.Input((LENGTH,))
    return kind(inputs, keras.layers.Dense(CLASSES)(inputs))


REFUSED = {
    "ends with": lambda: compiled(
        keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
    ),
    "Functional or Sequential": lambda: compiled(Subclassed()),
    "from_logits": lambda: compiled(loss="sparse_categorical_crossentropy"),
    "own categorical": lambda: compiled(loss="mse"),
    "one number": lambda: compiled(loss=SPARSE(True, reduction=None)),
    "metric=": lambda: compiled(metrics=["mse"]),
    "one output": lambda: compiled(
        keras.Model(*[[x := keras.Input((4,)), x]] * 2)
    ),
    "reads `y_pred`": lambda: compiled(reading(Reading)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_chunked_is_refused_before_training(message):
    x, y = data()
    if message == "one output" and IS_KERAS_3_12:
        pytest.skip("Keras 3.12 makes no model of an input alone.")
    model = REFUSED[message]()
    before = model.get_weights()

    with pytest.raises(ValueError, match=message):
        model.fit(x, y, verbose=0, chunked_loss=True)

    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("remat", [None, "auto"])
def test_groups_of_batches_may_count_masked_tokens_and_rows(remat):
    def results(**options):
        model = language_model(mask_zero=True)
        # It counts by rows, and the loss by tokens that are not masked.
        model.layers[-2].activity_regularizer = keras.regularizers.L2(0.1)
        without = {"metrics": None}
        return trained(
            model, without, {}, gradient_accumulation_steps=2, **options
        )

    assert_same(results(chunked_loss=True, remat=remat), results())
