"""kmem.memory: exact counting, and a limit that holds."""

import ctypes
import functools
import textwrap
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem import memory
from kmem.base import native

pytestmark = pytest.mark.usefixtures("native_library")

MB = 10**6


@functools.cache
def constant(value):
    return tf.constant(value)


def ones(num_bytes):
    """Makes a tensor; from the second call on it allocates nothing else."""
    return tf.fill(constant((num_bytes // 4,)), constant(1.0))


@pytest.fixture(autouse=True)
def _nothing_is_allocated_for_the_first_time():
    for num_bytes in (64, 4096, MB, 2 * MB, 3 * MB, 9 * MB):
        ones(num_bytes)


@pytest.mark.parametrize(
    ("num_floats", "num_bytes"), [(1, 64), (16, 64), (17, 128), (250000, MB)]
)
def test_a_tensor_counts_for_its_bytes_rounded_up_to_64(num_floats, num_bytes):
    ones(4 * num_floats)
    before = memory.current("CPU")
    tensor = ones(4 * num_floats)
    assert memory.current("CPU") - before == num_bytes
    del tensor
    assert memory.current("CPU") == before


def test_the_peak_is_the_sum_of_what_was_live_together():
    x = ones(MB)
    before = memory.current("CPU")
    memory.reset_peak("CPU")
    assert memory.peak("CPU") == before
    y = x + x
    del y
    assert memory.peak("CPU") == before + MB
    assert memory.current("CPU") == before


def test_tensorflow_reports_the_same_numbers():
    x = ones(MB)
    info = tf.config.experimental.get_memory_info("CPU:0")
    assert info == {"current": memory.current(), "peak": memory.peak()}
    del x
    tf.config.experimental.reset_memory_stats("CPU:0")
    assert memory.peak() == memory.current()


def test_a_block_has_its_own_peak_and_leaves_the_outer_ones_alone():
    memory.reset_peak("CPU")
    with memory.track("CPU") as outer:
        x = ones(3 * MB)
        del x
        with memory.track("CPU") as inner:
            y = ones(MB)
            assert inner.peak_bytes == inner.start_bytes + MB
        memory.reset_peak("CPU")
        del y
    assert inner.peak_bytes - inner.start_bytes == MB
    assert inner.end_bytes - inner.start_bytes == MB
    assert outer.peak_bytes - outer.start_bytes == 3 * MB
    assert outer.end_bytes == outer.start_bytes
    assert memory.peak("CPU") == outer.start_bytes + MB
    ones(9 * MB)
    assert inner.peak_bytes - inner.start_bytes == MB


def test_a_block_that_raises_is_closed():
    for _ in range(100):
        with pytest.raises(KeyError), memory.track("CPU"):
            raise KeyError


def test_at_most_64_blocks_are_open_together():
    with pytest.raises(RuntimeError, match="At most 64 blocks"):
        open_blocks(65)
    open_blocks(64)


def open_blocks(count):
    if count:
        with memory.track("CPU"):
            open_blocks(count - 1)


def multiply(x):
    return tf.matmul(x, x) + 1.0


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_over_the_limit_tensorflow_raises_its_own_error(mode):
    function = {
        "eager": multiply,
        "graph": tf.function(multiply),
        "xla": tf.function(multiply, jit_compile=True),
    }[mode]
    x = tf.fill([1000, 1000], 1.0)
    expected = function(x).numpy()
    memory.limit(memory.current("CPU") + 3 * MB, device="CPU")
    with pytest.raises(tf.errors.ResourceExhaustedError):
        function(x)
    memory.limit(None, device="CPU")
    np.testing.assert_array_equal(function(x), expected)


def test_the_error_names_the_limit_and_what_is_in_use():
    limit = memory.current("CPU") + MB
    memory.limit(limit, device="CPU")
    with pytest.raises(
        tf.errors.ResourceExhaustedError,
        match=rf"limited to {limit} bytes, of which {limit - MB} are in use",
    ):
        ones(2 * MB)
    assert native.stats().refused == 2 * MB


def test_the_limit_itself_fits_to_the_byte():
    before = memory.current("CPU")
    memory.limit(before + MB, device="CPU")
    memory.reset_peak("CPU")
    x = ones(MB)
    assert memory.peak("CPU") == before + MB
    with pytest.raises(tf.errors.ResourceExhaustedError):
        ones(64)
    del x


def small_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", run_eagerly=True)
    return model


def small_batch():
    random = np.random.default_rng(0)
    return random.normal(size=(256, 32)), random.normal(size=(256, 1))


def test_training_goes_on_after_it_ran_out_of_memory():
    x, y = small_batch()
    expected = small_model().train_on_batch(x, y)
    model = small_model()
    memory.limit(memory.current("CPU") + 1000, device="CPU")
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.train_on_batch(x, y)
    memory.limit(None, device="CPU")
    assert small_model().train_on_batch(x, y) == expected


def test_the_peak_of_a_training_step_repeats():
    x, y = small_batch()
    model = small_model()
    model.train_on_batch(x, y)
    peaks = []
    for _ in range(10):
        with memory.track("CPU") as usage:
            model.train_on_batch(x, y)
        peaks.append(usage.peak_bytes - usage.start_bytes)
    assert max(peaks) - min(peaks) <= 0.005 * min(peaks)


def test_threads_are_all_counted():
    before = memory.current("CPU")
    start = threading.Barrier(8)
    tensors = []

    def work():
        start.wait()
        for _ in range(200):
            ones(4096)
        tensors.append(ones(MB))

    threads = [threading.Thread(target=work) for _ in range(8)]
    with memory.track("CPU") as usage:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert usage.end_bytes == before + 8 * MB
    assert usage.peak_bytes >= before + 8 * MB
    tensors.clear()
    assert memory.current("CPU") == before


def test_a_limit_below_what_is_in_use_is_refused():
    x = ones(MB)
    memory.limit("1GB", device="CPU")
    in_use = memory.current("CPU")
    with pytest.raises(
        ValueError,
        match=rf"at least what is in use, which is {in_use} bytes. "
        rf"Received: size={in_use - 1}",
    ):
        memory.limit(in_use - 1, device="CPU")
    assert native.stats().limit == 10**9
    del x


@pytest.mark.parametrize("size", [0, -1, "many", 1.5, True, 2**64 + 5])
def test_a_limit_must_be_a_size(size):
    with pytest.raises(ValueError, match="`size` must be a positive number"):
        memory.limit(size, device="CPU")


@pytest.mark.parametrize("device", ["CPU", "CPU:0", "cpu:0", "/device:CPU:0"])
def test_a_device_is_named_as_in_tensorflow(device):
    assert memory.current(device) == memory.current("CPU:0")


@pytest.mark.parametrize("device", ["", "TPU:0", "CPU:1", "GPU:9", "CPU:x", 0])
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match="`device` must be one of CPU:0"):
        memory.current(device)


def test_each_device_has_a_budget_of_its_own():
    library = native.allocator()
    before = memory.current("CPU")
    assert library.kmem_set_limit(1, 10)
    assert native.stats(1).limit == 10
    assert native.stats(1).in_use == 0
    x = ones(MB)
    assert memory.current("CPU") == before + MB
    assert library.kmem_set_limit(1, -1)
    assert native.stats(1).limit == -1
    del x


def test_tensorflow_takes_kmems_allocators_of_gpus():
    singleton = ctypes.CDLL(
        "libtensorflow_cc.so.2"
    )._ZN10tensorflow15GPUProcessState9singletonEPS0_
    singleton.restype, singleton.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    methods = ctypes.c_int64.from_address(singleton(None)).value
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    for addresses, *_, path in lines:
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= methods < end:
            assert path == native.allocator()._name


def in_pool(code, pool=True):
    return (
        f"""
        import kmem
        kmem.memory.limit("100MB", device="CPU", pool={pool!r})
        import tensorflow as tf
        """
        + code
    )


def test_blocks_come_from_the_pool_and_small_ones_from_beside_it(python):
    status, output, errors = python.run(
        in_pool("""
        before = kmem.memory.pool("CPU")
        x = tf.fill([1_000_000], 1.0)
        y = tf.fill([100], 1.0)
        after = kmem.memory.pool("CPU")
        print(after.size, kmem.memory.capacity("CPU"))
        print(after.blocks - before.blocks, after.chunks >= after.blocks)
        print(after.peak_chunks >= after.chunks)
        print(after.largest_free <= after.size - after.chunks)
        kmem.memory.limit(None, device="CPU")
        print(kmem.memory.capacity("CPU"))
        """)
    )
    assert status == 0, errors[-2000:]
    assert output.splitlines() == [
        "100000000 100000000",
        "4000000 True",
        "True",
        "True",
        "100000000",
    ]


LEAST_POOL = """
import ctypes

import kmem
from kmem.base import bindings, native

blocks = [(number << 20, 3_000_000) for number in range(1, 101)]
freed = [(address, -size) for address, size in blocks]
events = (ctypes.c_int64 * 400)(*sum(blocks + freed, ()))
print(native.allocator().kmem_least_pool(bindings.BFC_POOL, events, 200))
"""


def test_a_pool_is_tried_as_one_region_whatever_tensorflow_takes(python):
    asked = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "0"}

    status, output, errors = python.run(LEAST_POOL, **asked)

    assert status == 0, errors
    assert 300_000_000 <= int(output) < 1.01 * 300_000_000
    assert "ran out of memory" not in errors


@pytest.mark.parametrize("pool", [True, "bfc"])
def test_what_is_free_in_pieces_does_not_hold_a_larger_block(python, pool):
    status, output, errors = python.run(
        in_pool(
            """
        value, size = tf.constant(1.0), tf.constant([1_000_000])
        blocks = [tf.fill(size, value) for _ in range(24)]
        del blocks[::2]
        pool = kmem.memory.pool("CPU")
        print(pool.size - pool.chunks > 48_000_000)
        print(pool.largest_free < 10_000_000)
        try:
            tf.fill([4_000_000], 1.0)
        except tf.errors.ResourceExhaustedError as error:
            print(f"{pool.largest_free} in one piece" in error.message)
        del blocks
        print(tf.fill([4_000_000], 1.0)[0].numpy())
        """,
            pool,
        )
    )
    assert status == 0, errors[-2000:]
    assert output.splitlines() == ["True"] * 3 + ["1.0"]


def test_a_step_in_a_pool_has_the_same_numbers(python):
    code = """
        import keras
        import numpy as np
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            keras.Input((16, 16, 4)),
            keras.layers.Conv2D(8, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1),
        ])
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(8, 16, 16, 4))
        for _ in range(3):
            loss = model.train_on_batch(x, np.ones((8, 1)))
        print(loss.hex() if isinstance(loss, float) else float(loss).hex())
        """
    plain = python.run("import kmem\n" + textwrap.dedent(code))
    status, output, errors = python.run(in_pool(code))
    assert status == 0, errors[-2000:]
    assert output == plain[1]


def test_the_environment_asks_for_a_pool(python):
    status, output, errors = python.run(
        """
        import kmem
        import tensorflow as tf
        x = tf.fill([1_000_000], 1.0)
        print(kmem.memory.pool("CPU").size)
        """,
        KMEM_POOL="50MB",
    )
    assert (status, output) == (0, "50000000\n"), errors[-2000:]
    status, _, errors = python.run("import kmem", KMEM_POOL="many")
    assert status == 1
    assert "`KMEM_POOL` must be a positive number" in errors


def test_a_pool_is_asked_for_before_the_first_operation():
    ones(MB)
    with pytest.raises(RuntimeError, match="before the first TensorFlow oper"):
        memory.limit("1GB", device="CPU", pool=True)
    assert memory.pool("CPU") is None
    with pytest.raises(ValueError, match="Received: size=None, pool=True"):
        memory.limit(None, device="CPU", pool=True)
    with pytest.raises(ValueError, match="`pool` must be .* Received: pool=3"):
        memory.limit("1GB", device="CPU", pool=3)


def test_logical_cpus_share_one_allocator(python):
    status, output, errors = python.run("""
        import kmem
        import tensorflow as tf
        cpu = tf.config.list_physical_devices("CPU")[0]
        device = tf.config.LogicalDeviceConfiguration
        tf.config.set_logical_device_configuration(cpu, [device(), device()])
        with tf.device("CPU:1"):
            x = tf.fill([1000], 1.0)
        print(kmem.memory.current("CPU:1") == kmem.memory.current("CPU:0"))
    """)
    assert (status, output) == (0, "True\n"), errors


def test_a_forked_child_can_allocate(python):
    status, output, errors = python.run("""
        import os
        import threading
        import kmem
        from kmem import native
        import tensorflow as tf

        def work():
            while not done:
                tf.fill([1000000], 1.0)

        done = False
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                native.stats()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        done = True
        for thread in threads:
            thread.join()
        print("forked")
    """)
    assert (status, output) == (0, "forked\n"), errors


def test_the_public_names_are_those_of_the_documentation():
    assert kmem.memory is memory
    for name in ("limit", "current", "peak", "reset_peak", "track", "pool"):
        assert callable(getattr(memory, name))


@pytest.mark.parametrize(
    "mode", [pytest.param("eager", marks=pytest.mark.exhaustive), "graph"]
)
def test_kernels_that_do_not_notice_a_refusal_end_in_an_error(python, mode):
    # oneDNN's convolution would take the process with it, hence another one.
    status, output, errors = python.run(f"""
        import gc
        import keras
        import kmem
        import numpy as np
        import tensorflow as tf
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            keras.Input((16, 16, 4)),
            keras.layers.Conv2D(8, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1),
        ])
        model.compile("sgd", "mse", run_eagerly={mode == "eager"})
        batch = np.ones((8, 16, 16, 4)), np.ones((8, 1))
        model.train_on_batch(*batch)
        peaks = []
        for _ in range(5):
            gc.collect()
            with kmem.memory.track("CPU") as usage:
                model.train_on_batch(*batch)
            peaks.append(usage.peak_bytes - usage.start_bytes)
        # Threads may have taken more.
        needed = min(peaks)
        num_errors = 0
        for share in np.linspace(0.0, 0.8, 10):
            gc.collect()
            size = kmem.memory.current("CPU") + int(share * needed) + 1
            kmem.memory.limit(size, device="CPU")
            try:
                model.train_on_batch(*batch)
            except tf.errors.ResourceExhaustedError:
                num_errors += 1
            kmem.memory.limit(None, device="CPU")
        print(num_errors, np.isfinite(model.train_on_batch(*batch)))
    """)
    assert (status, output) == (0, "10 True\n"), errors[-2000:]


def test_data_is_counted_but_not_refused():
    data = np.ones(2 * MB // 4 + 1, "float32")[1:]
    before = memory.current("CPU")
    memory.limit(before + MB, device="CPU")
    tensor = tf.constant(data.tolist())
    assert memory.current("CPU") == before + 2 * MB
    with pytest.raises(tf.errors.ResourceExhaustedError):
        tensor + tensor


def test_variables_outlive_an_xla_step_that_ran_out_of_memory(python):
    # XLA frees the variables it was to update, and so does TensorFlow.
    status, output, errors = python.run("""
        import keras
        import kmem
        import numpy as np
        import tensorflow as tf
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            keras.Input((32,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ])
        model.compile("adam", "mse", jit_compile=True)
        batch = np.ones((256, 32)), np.ones((256, 1))
        first = model.train_on_batch(*batch)
        before = model.get_weights()
        for _ in range(5):
            kmem.memory.limit(kmem.memory.current("CPU") + 1, device="CPU")
            try:
                model.train_on_batch(*batch)
            except tf.errors.ResourceExhaustedError:
                print("too large")
            kmem.memory.limit(None, device="CPU")
            for x, y in zip(before, model.get_weights()):
                np.testing.assert_array_equal(x, y)
        in_use = kmem.memory.current("CPU")
        print(model.train_on_batch(*batch) < first)
        print(abs(kmem.memory.current("CPU") - in_use) < 1000)
    """)
    assert status == 0, errors[-2000:]
    assert output.splitlines() == ["too large"] * 5 + ["True", "True"]


def test_a_snapshot_names_what_python_holds_once_and_tells_of_the_rest():
    layer = keras.layers.Dense(500, name="large")
    layer.build((None, 1000))
    tensor = ones(3 * MB)
    same = tf.reshape(tensor, (-1, 2))

    taken = memory.snapshot("CPU")

    held = {(t.name, t.shape): t.num_bytes for t in taken.tensors}
    assert held[layer.kernel.path, (1000, 500)] == 2 * MB
    assert layer.kernel.path == "large/kernel"
    # The tensor, or the other form of it.
    shapes = [(750000,), (375000, 2)]
    assert [held.get(("", shape)) for shape in shapes].count(None) == 1
    sizes = [t.num_bytes for t in taken.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert taken.in_use_bytes == memory.current("CPU")
    assert 0 <= taken.rest_bytes < taken.in_use_bytes
    assert "large/kernel" in taken.summary()
    assert "large/kernel" in taken._repr_html_()
    assert "large/kernel" not in taken.summary(num_tensors=0)
    del same


def test_a_snapshot_knows_what_variables_hold_in_the_middle_of_a_fit():
    model = keras.Sequential(
        [keras.Input((600,)), keras.layers.Dense(500, name="accumulated")]
    )
    model.compile("sgd", "mse")
    taken = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: taken.append(
            memory.snapshot("CPU")
        )
    )

    kmem.wrap(model).fit(
        np.ones((3, 600), "float32"),
        np.ones((3, 500), "float32"),
        batch_size=1,
        gradient_accumulation_steps=3,
        callbacks=[callback],
        verbose=0,
    )

    taken.append(memory.snapshot("CPU"))
    shape = model.layers[0].kernel.shape
    numbers = [[t.shape for t in each.tensors].count(shape) for each in taken]
    # The sum of the gradients, too, until `fit` returns.
    assert numbers == [2, 2, 2, 1]


def test_a_variable_that_was_emptied_is_not_in_a_snapshot():
    variable = tf.Variable(ones(3 * MB), name="emptied")
    nothing = tf.zeros([0])
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=nothing)

    held = memory.snapshot("CPU").tensors

    assert not [tensor for tensor in held if "emptied" in tensor.name]


def test_a_snapshot_holds_nothing_and_takes_no_memory():
    tensor = ones(9 * MB)
    memory.snapshot("CPU")
    memory.reset_peak("CPU")
    before = memory.current("CPU")

    taken = memory.snapshot("CPU")

    assert memory.peak("CPU") == memory.current("CPU") == before
    del tensor
    assert memory.current("CPU") <= before - 9 * MB
    assert any(t.num_bytes == 9 * MB for t in taken.tensors)


def test_a_container_may_take_less_than_the_machine_has(tmp_path, monkeypatch):
    whole = kmem.memory.capacity("CPU")
    for name, text in {"old": "123456789\n", "new": "max\n"}.items():
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in ("new", "old", "missing")]

    monkeypatch.setattr(kmem.memory, "_CONTAINER", files[:1])
    assert kmem.memory.capacity("CPU") == whole
    monkeypatch.setattr(kmem.memory, "_CONTAINER", files)
    assert kmem.memory.capacity("CPU") == 123456789
