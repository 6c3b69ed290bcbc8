"""Parts of a batch need a part's memory, and no more work.

The model of 24 layers keeps 8 MiB a layer for its whole batch of 16,384 rows.
Without parts its step takes 216 MiB in a graph and 384 MiB in XLA.
"""

import gc
import itertools

import cases
import keras
import pytest
import tensorflow as tf
from reference import train

import kmem

MIB = 2**20
STEP = """
    import keras
    import tensorflow as tf

    import kmem

    tf.config.threading.set_inter_op_parallelism_threads({threads})
    inputs = outputs = keras.Input((128,))
    for _ in range(24):
        outputs = keras.layers.Dense(128, activation="relu")(outputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", jit_compile={jit_compile})
    batch = tf.random.normal((16384, 128)), tf.random.normal((16384, 128))
    dataset = tf.data.Dataset.from_tensors(batch).repeat(2)

    class Peak(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.before = kmem.memory.current("CPU")
            kmem.memory.reset_peak("CPU")

        def on_train_batch_end(self, batch, logs=None):
            self.peak = kmem.memory.peak("CPU") - self.before

    peak = Peak()
    options = {options}
    kmem.wrap(model).fit(dataset, verbose=0, callbacks=[peak], **options)
    print(peak.peak)
"""


def peak_of_step(python, jit_compile, threads, **options):
    code, output, errors = python.run(
        STEP.format(jit_compile=jit_compile, threads=threads, options=options)
    )
    assert code == 0, errors
    return int(output.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "threads",
    [
        pytest.param(1, marks=pytest.mark.exhaustive),
        2,
        pytest.param(8, marks=pytest.mark.exhaustive),
    ],
)
def test_a_graph_keeps_one_part_whatever_the_threads(
    native_library, python, threads
):
    peak = peak_of_step(python, False, threads, microbatches=8)

    assert peak <= 30 * MIB


@pytest.mark.slow
def test_xla_keeps_one_part(native_library, python):
    peak = peak_of_step(python, True, 2, microbatches=8)

    assert peak <= 52 * MIB


OF_WEIGHTS = """
    import keras
    import numpy as np
    from keras import layers

    import kmem

    if {convolutions}:
        x = np.ones((32, 8, 8, 3), "float32")
        same = dict(padding="same", activation="relu")
        stack = [layers.Conv2D(96, 3, **same) for _ in range(5)]
    else:
        x = np.ones((32, 7), "int32")
        tanh = [layers.Dense(512, "tanh") for _ in range(3)]
        stack = [layers.Embedding(600, 64), *tanh]
    model = [keras.Input(x.shape[1:]), *stack, layers.Flatten()]
    model = kmem.wrap(keras.Sequential([*model, layers.Dense(1)]))
    model.compile("sgd", "mse", jit_compile=True)
    options = {options}
    fit = dict(batch_size=8 if "micro" not in str(options) else 32, **options)
    model.fit(x, np.ones(32), verbose=0, **fit)
    before = kmem.memory.current("CPU")
    kmem.memory.reset_peak("CPU")
    model.fit(x, np.ones(32), verbose=0, **fit)
    weights = sum(weight.nbytes for weight in model.get_weights())
    print((kmem.memory.peak("CPU") - before) / weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("convolutions", "options", "most"),
    [
        # The sums, a gradient, and a micro-batch: a graph takes 1.7.
        (True, {"microbatches": 8}, 2.1),
        (False, {"gradient_accumulation_steps": 4}, 1.68),
    ],
)
def test_xla_frees_each_gradient_when_it_is_added(
    native_library, python, convolutions, options, most
):
    """It held all of them beside their sums: 2.8 and 1.76."""
    code, output, errors = python.run(
        OF_WEIGHTS.format(convolutions=convolutions, options=options)
    )
    assert code == 0, errors
    assert float(output.splitlines()[-1]) < most


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_whole_batch_takes_what_the_parts_save(
    native_library, python, jit_compile
):
    peak = peak_of_step(python, jit_compile, 2)

    assert peak >= (375 if jit_compile else 208) * MIB


@pytest.mark.parametrize(
    "options", [{"microbatches": 4}, {"gradient_accumulation_steps": 2}]
)
def test_sums_of_gradients_leave_nothing_in_memory(native_library, options):
    dense = [keras.layers.Dense(512) for _ in range(2)]
    model = kmem.wrap(keras.Sequential([keras.Input((512,)), *dense]))
    model.compile("sgd", "mse")
    rows = tf.ones([8, 512])
    data = tf.data.Dataset.from_tensors((rows, rows)).repeat(2)
    model.fit(data, shuffle=False, verbose=0)
    gc.collect()
    before = kmem.memory.current("CPU")

    model.fit(data, shuffle=False, verbose=0, **options)

    gc.collect()
    more = kmem.memory.current("CPU") - before
    assert more < 0.1 * sum(v.nbytes for v in model.get_weights())


def tower(**compile_arguments):
    inputs = outputs = keras.Input((64,))
    for _ in range(8):
        outputs = keras.layers.Dense(64, activation="relu")(outputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", **compile_arguments)
    return kmem.wrap(model)


class Peaks(keras.callbacks.Callback):
    """The bytes of every step above what was held before it."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_begin(self, batch, logs=None):
        self.before = kmem.memory.current("CPU")
        kmem.memory.reset_peak("CPU")

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(kmem.memory.peak("CPU") - self.before)


@pytest.mark.parametrize(
    "mode, option, most",
    [
        # The sum of gradients, and the largest of them.
        ({}, "microbatches", 1 + 1 / 8),
        # The sum is held before a step.
        ({}, "gradient_accumulation_steps", 1 / 8),
        # XLA makes two at a time.
        ({"jit_compile": True}, "microbatches", 1 + 2 / 8),
        ({"jit_compile": True}, "gradient_accumulation_steps", 2 / 8),
        # A tape makes all gradients at once.
        ({"run_eagerly": True}, "microbatches", 2 + 1 / 8),
        ({"run_eagerly": True}, "gradient_accumulation_steps", 1 + 1 / 8),
    ],
    ids=str,
)
def test_beside_the_weights_there_is_one_sum_and_one_gradient(
    native_library, python, mode, option, most
):
    """Before, the sum was copied, twice in the worst case, and gradients waited
    for each other."""
    if "jit_compile" in mode:
        # In the order that XLA has by default: a plan selects another one for
        # the process, if nothing was compiled before.
        code = "from step import test_microbatch_memory as tests\n"
        code += f"print(tests.peak_in_weights({mode}, {option!r}))"
        status, output, errors = python.run(f"import kmem\n{code}")
        assert status == 0, errors
        peak = float(output.split()[-1])
    else:
        peak = peak_in_weights(mode, option)

    # Of two examples at a time every activation is 1/128 of a gradient.
    assert peak < most + 0.02


def peak_in_weights(mode, option):
    layers = [keras.layers.Dense(256, "relu") for _ in range(8)]
    model = kmem.wrap(keras.Sequential([keras.Input((256,)), *layers]))
    model.compile("sgd", "mse", **mode)
    size = 8 if option == "microbatches" else 2
    batch = tf.ones([size, 256]), tf.ones([size, 256])
    data = tf.data.Dataset.from_tensors(batch).repeat(6)
    callback = Peaks()

    model.fit(
        data, shuffle=False, verbose=0, callbacks=[callback], **{option: size}
    )

    num_bytes = sum(v.nbytes for v in model.get_weights())
    return min(callback.steps[2:]) / num_bytes


def peaks(num_steps=3, jit_compile=False, run_eagerly=False, **options):
    model = tower(jit_compile=jit_compile, run_eagerly=run_eagerly)
    batch = tf.random.normal((8192, 64)), tf.random.normal((8192, 64))
    dataset = tf.data.Dataset.from_tensors(batch).repeat(num_steps)
    callback = Peaks()
    model.fit(
        dataset, verbose=0, shuffle=False, callbacks=[callback], **options
    )
    return callback.steps


@pytest.mark.parametrize(
    "mode", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str
)
def test_eight_parts_take_less_than_a_quarter_of_the_bytes(
    native_library, mode
):
    whole = peaks(**mode)[-1]
    parts = peaks(**mode, microbatches=8)[-1]

    # 8 layers of 2 MiB; a part and the gradients remain.
    assert whole > 16 * MIB
    assert parts < whole / 4


def test_the_peak_of_a_step_repeats(native_library):
    steps = peaks(num_steps=12, microbatches=8)[2:]

    assert max(steps) / min(steps) < 1.005


def test_every_row_goes_through_the_model_once():
    def case():
        model, arguments = cases.plain()
        first = model.layers[0]
        call = first.call

        def counting(x, *args, **kwargs):
            rows.append(int(x.shape[0]))
            return call(x, *args, **kwargs)

        first.call = counting
        return model, arguments

    rows = []
    train(case, mode="eager", batch_size=26, microbatches=4, epochs=1)

    # In eager mode the first step looks at its losses before it starts.
    assert rows[:4] == [5, 7, 7, 7]
    assert rows[4:] == [5, 7, 7, 7] * 2


@pytest.mark.parametrize("mode", [{}, {"jit_compile": True}], ids=str)
def test_tracing_does_not_grow_with_the_number_of_parts(mode):
    class CountingStep(keras.Model):
        def train_step(self, data):
            runs.append(None)
            return super().train_step(data)

    def num_traces(count):
        runs.clear()
        inputs = keras.Input((5,))
        model = CountingStep(inputs, keras.layers.Dense(3)(inputs))
        model.compile("sgd", "mse", **mode)
        arguments = cases.regression() | {"batch_size": 52, "verbose": 0}
        kmem.wrap(model).fit(**arguments, microbatches=count)
        return len(runs)

    runs = []

    assert num_traces(2) == num_traces(26) <= 4


def test_eager_mode_holds_nothing_after_fit(native_library):
    model = tower(run_eagerly=True)
    batch = tf.random.normal((64, 64)), tf.random.normal((64, 64))
    model.fit(*batch, verbose=0)
    gc.collect()
    before = kmem.memory.current("CPU")

    model.fit(*batch, verbose=0, microbatches=4)
    gc.collect()

    assert kmem.memory.current("CPU") == before


@pytest.mark.exhaustive
def test_memory_returns_to_its_start_after_36_fits(native_library):
    options = itertools.cycle(
        [
            {},
            {"microbatches": 2},
            {"microbatches": 5, "gradient_accumulation_steps": 2},
            {"gradient_accumulation_steps": 3},
            {"mixed_precision": "bfloat16"},
            {"mixed_precision": "float16", "microbatches": 3},
        ]
    )
    model = kmem.wrap(cases.dense())
    arguments = cases.regression() | {"batch_size": 20, "verbose": 0}
    held = []

    for _ in range(36):
        model.fit(**arguments, **next(options))
        gc.collect()
        held.append(kmem.memory.current("CPU"))

    # The first rounds make what stays: variables, and one trace an option.
    assert max(held[12:]) <= max(held[:12])
