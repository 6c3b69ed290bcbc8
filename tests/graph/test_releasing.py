"""A model that was trained gives its memory back."""

import contextlib
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem.graph import releasing

WIDTH, ROWS = 256, 64
WEIGHT_BYTES = 4 * 4 * WIDTH**2


def make(jit_compile=False, block=()):
    dense = [layers.Dense(WIDTH, "silu") for _ in range(4)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense, *block])
    model.compile("adam", "mse", jit_compile=jit_compile)
    return model


def train(model, **options):
    x = np.ones((ROWS, WIDTH), "float32")
    return kmem.wrap(model).fit(x, x, batch_size=ROWS, verbose=0, **options)


PLANNED = {"remat": kmem.Remat(solver="sqrt")}


# Where gradients are made: in the step, in parts of it, in a loop, in a branch
# of the optimizer's, in a function of its own.
@pytest.mark.parametrize(
    "jit_compile, options",
    [
        (False, PLANNED),
        (False, {"microbatches": 2}),
        (False, PLANNED | {"microbatches": 2}),
        (False, {"mixed_precision": "float16"}),
        (False, {"gradient_accumulation_steps": 2}),
        (True, {"microbatches": 2}),
        (True, {"gradient_accumulation_steps": 2}),
    ],
    ids=str,
)
def test_a_model_that_was_trained_leaves_nothing(
    native_library, jit_compile, options
):
    gc.collect()
    before = kmem.memory.current("CPU")
    model = make(jit_compile)

    train(model, **options)
    assert kmem.memory.current("CPU") - before > 2 * WEIGHT_BYTES

    del model
    gc.collect()
    assert kmem.memory.current("CPU") - before < 0.1 * WEIGHT_BYTES


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize(
    "options",
    [
        PLANNED,
        {"microbatches": 2},
        {"chunked_loss": True},
        {"chunked_attention": True},
        {"mixed_precision": "bfloat16"},
    ],
    ids=str,
)
# Others have compiled before: a plan is not the best, and leaves no more.
@pytest.mark.filterwarnings("ignore:XLA compiled something")
def test_a_step_leaves_no_array_of_its_own(
    native_library, jit_compile, options
):
    words, length, features = 1024, 256, 64
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, features)(tokens)
    x = layers.MultiHeadAttention(4, features)(x, x)
    model = keras.Model(tokens, layers.Dense(words)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    ids = np.ones((4, length), "int32")
    gc.collect()
    before = kmem.memory.current("CPU")

    kmem.wrap(model).fit(ids, ids, batch_size=4, verbose=0, **options)

    gc.collect()
    # Less than the gradient of the words, or the keys of a batch.
    assert kmem.memory.current("CPU") - before < words * features


def count():
    gc.collect()
    return len(gc.get_objects()), kmem.memory.current("CPU")


@pytest.mark.parametrize(
    "num_models", [3, pytest.param(100, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"dtr": True},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"gradient_accumulation_steps": 2},
                {"mixed_precision": "bfloat16"},
                {"sharding": "full"},
                {"remat": "8GB"},
                {"memory_budget": "8GB"},
            )
        ),
    ],
    ids=str,
)
def test_models_in_a_row_leave_no_object_and_no_byte(
    native_library, options, num_models
):
    """Each of those that plain Keras trains leaves thousands of objects."""
    x = np.ones((4, 2), "float32")

    def train_another():
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((2,)), dense(3), dense(1)])
        model.compile("adam", "mse", jit_compile=False)
        kmem.wrap(model).fit(x, x[:, :1], batch_size=4, verbose=0, **options)

    for _ in range(2):
        train_another()
    before = count()
    for _ in range(num_models):
        train_another()
    objects, num_bytes = count()
    assert num_bytes == before[1]
    # What pytest keeps of TensorFlow's warnings, and none of a model.
    assert objects - before[0] < 50


def test_a_function_of_the_user_s_own_keeps_its_gradient():
    @tf.custom_gradient
    def tripled(x):
        return x, lambda gradient: 3 * gradient

    # Traced once, for all steps.
    function = tf.function(tripled)

    class Tripled(layers.Layer):
        def call(self, x):
            return function(x)

    for _ in range(2):
        model = make(block=[Tripled()])
        train(model, microbatches=2)
    with tf.GradientTape() as tape:
        x = tf.Variable(tf.ones([ROWS, WIDTH]))
        y = function(x)

    np.testing.assert_array_equal(tape.gradient(y, x), 3 * np.ones(x.shape))


def test_functions_that_are_traced_once_each_give_no_warning(caplog):
    signature = [tf.TensorSpec((), "float32")]

    with caplog.at_level("WARNING"), attached(caplog.handler):
        for _ in range(12):
            square = releasing.function(tf.square, input_signature=signature)
            assert square(tf.constant(3.0)) == 9

    assert "retracing" not in caplog.text


@contextlib.contextmanager
def attached(handler):
    """TensorFlow's logger keeps what it says to itself."""
    logger = tf.get_logger()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
