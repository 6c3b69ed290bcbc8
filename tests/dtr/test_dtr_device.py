"""DTR on TensorFlow's eager operators, by counts that are exact."""

import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

import kmem
from kmem.base.bindings import HEURISTICS
from kmem.dtr.simulator import simulate
from kmem.dtr.trace import read_program

pytestmark = pytest.mark.usefixtures("native_library")

ROWS = 1000
BYTES = 4 * ROWS * ROWS  # Of each tensor here.


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setattr(kmem.dtr, "eviction_threshold", 0)
    monkeypatch.setattr(kmem.dtr, "evictee_minimum_size", 0)
    monkeypatch.setattr(kmem.dtr, "heuristic", "lru")
    yield
    kmem.dtr.disable()
    gc.collect()


def set_threshold(num_tensors):
    """Room for so many tensors more than there are."""
    # Small ones, such as scalars, need some too.
    kmem.dtr.eviction_threshold = (
        kmem.memory.current("CPU") + int(num_tensors * BYTES) + 10**5
    )


def matrix():
    return tf.reshape(tf.range(ROWS * ROWS, dtype=tf.float32), (ROWS, ROWS))


def chain(length):
    """x, x + 1, x + 1 + 1, ..., all of them held."""
    tensors = [matrix()]
    for _ in range(length - 1):
        tensors.append(tensors[-1] + 1.0)
    return tensors


def test_nothing_is_evicted_while_there_is_room():
    with kmem.dtr.scope():
        chain(5)

    assert kmem.dtr.statistics().num_evictions == 0


@pytest.mark.parametrize("other_bytes", [0, 2**24])
def test_a_recursive_program_of_small_tensors_keeps_a_threshold(
    other_bytes, monkeypatch
):
    """However much of the memory is taken by what is not the program's."""
    others = tf.zeros(other_bytes, tf.int8)
    monkeypatch.setattr(kmem.dtr, "evictee_minimum_size", "1MB")
    leaves = tf.random.stateless_normal((32, 64, 64), (1, 2))
    weights = tf.random.stateless_normal((128, 64), (3, 4)) / 12

    def node(first, last):
        """A tree's value, from those of its two halves."""
        if first == last:
            return tf.tanh(leaves[first])
        middle = (first + last) // 2
        halves = node(first, middle), node(middle + 1, last)
        return tf.tanh(tf.matmul(tf.concat(halves, 1), weights))

    def run():
        gc.collect()
        before = kmem.memory.current("CPU")
        with kmem.memory.track("CPU") as usage, kmem.dtr.scope():
            with tf.GradientTape() as tape:
                tape.watch(weights)
                total = tf.reduce_sum(node(0, 31) ** 2)
            gradient = tape.gradient(total, weights).numpy()
        return gradient, before, usage.peak_bytes

    expected, before, peak = run()
    assert peak - before > 2**20
    kmem.dtr.eviction_threshold = before + int(0.6 * (peak - before))

    gradient, _, peak = run()

    assert peak <= kmem.dtr.eviction_threshold
    assert kmem.dtr.statistics().num_evictions > 0
    np.testing.assert_array_equal(gradient, expected)
    del others


def test_the_peak_is_at_most_the_threshold():
    set_threshold(3)
    with kmem.memory.track("CPU") as usage, kmem.dtr.scope():
        tensors = chain(8)

    assert len(tensors) == 8
    assert usage.peak_bytes <= kmem.dtr.eviction_threshold
    assert kmem.dtr.statistics().num_evictions == 5


def test_what_was_evicted_is_made_again_operator_by_operator():
    set_threshold(3)
    with kmem.dtr.scope():
        tensors = chain(4)
        assert kmem.dtr.statistics().num_recomputations == 0
        # The first is gone: a range, and its view as a matrix.
        value = tensors[0].numpy()
        assert kmem.dtr.statistics().num_recomputations == 2

    np.testing.assert_array_equal(value, matrix().numpy())


def test_a_value_survives_the_scope_that_made_it():
    set_threshold(3)
    with kmem.dtr.scope():
        tensors = chain(6)

    for number, tensor in enumerate(tensors):
        assert float(tensor[0, 1]) == 1 + number
    # Operators run where they would without DTR.
    assert "KMEM" not in (tensors[0] + 1.0).device


def test_bytes_go_with_the_last_handle():
    with kmem.dtr.scope():
        before = kmem.memory.current("CPU")
        tensors = chain(4)
        assert kmem.memory.current("CPU") - before >= 4 * BYTES
        del tensors
        gc.collect()

    statistics = kmem.dtr.statistics()
    assert (statistics.num_operators, statistics.live_bytes) == (0, 0)
    assert kmem.memory.current("CPU") - before < 10**5


def test_views_share_their_bytes():
    with kmem.dtr.scope():
        x = matrix()
        views = [
            tf.reshape(x, (-1,)),
            tf.identity(x),
            tf.expand_dims(x, 0),
        ]
        assert len(views) == 3
        statistics = kmem.dtr.statistics()

    assert statistics.live_bytes - statistics.pinned_bytes == BYTES


def test_too_small_a_threshold_names_one_that_would_do():
    set_threshold(1)
    with kmem.dtr.scope():
        x = matrix()
        with pytest.raises(
            tf.errors.ResourceExhaustedError,
            match="threshold must be at least .*nothing is left to evict",
        ) as error:
            tf.matmul(x, x)
        del x
    least = int(error.value.message.split("at least ")[1].split()[0])
    del error  # Its traceback holds x.

    kmem.dtr.eviction_threshold = least
    with kmem.memory.track("CPU") as usage, kmem.dtr.scope():
        x = matrix()
        tf.matmul(x, x)
    assert usage.peak_bytes <= least


@pytest.mark.parametrize(
    "num_addends, dtype",
    [(16, tf.float32), (17, tf.float32), (42, tf.bfloat16)],
)
def test_a_sum_of_many_needs_few_at_a_time(num_addends, dtype):
    rng = np.random.default_rng(0)
    # All sizes, so that the order of the additions shows.
    factors = 10 ** rng.uniform(-3, 3, num_addends)

    def total():
        x = tf.cast(tf.sin(matrix()), dtype)
        made = [x * tf.cast(factor, dtype) for factor in factors]
        return tf.raw_ops.AddN(inputs=made)

    want = total().numpy()
    # Of the addends' own size.
    set_threshold(13 * dtype.size / 4)
    with kmem.memory.track("CPU") as usage, kmem.dtr.scope():
        got = total()
    assert usage.peak_bytes <= kmem.dtr.eviction_threshold
    assert kmem.dtr.statistics().num_recomputations > 0
    assert got.numpy().tobytes() == want.tobytes()


def test_a_threshold_below_what_is_in_use_is_refused():
    x = matrix()
    kmem.dtr.eviction_threshold = "0.5KB"

    with pytest.raises(ValueError, match="in use.*Received: .*='0.5KB'"):
        kmem.dtr.enable()

    assert "KMEM" not in (x + 1.0).device


def test_without_a_threshold_the_limit_of_the_device_counts():
    kmem.memory.limit(kmem.memory.current("CPU") + 3 * BYTES + 10**5, "CPU")
    with kmem.dtr.scope():
        chain(8)

    assert kmem.dtr.statistics().num_evictions > 0


def test_the_limit_is_as_before_afterwards():
    set_threshold(4)
    with kmem.dtr.scope():
        chain(2)

    assert len(chain(8)) == 8


def test_random_operators_with_hidden_state_never_run_again():
    generator = tf.random.Generator.from_seed(1)
    tf.random.set_seed(1)
    want = [tf.random.normal((ROWS, ROWS)).numpy() for _ in range(2)]
    want.append(generator.normal((ROWS, ROWS)).numpy())
    generator.reset_from_seed(1)
    tf.random.set_seed(1)
    set_threshold(6)
    with kmem.dtr.scope():
        made = [tf.random.normal((ROWS, ROWS)) for _ in range(2)]
        made.append(generator.normal((ROWS, ROWS)))
        chain(8)

    for got, value in zip(made, want, strict=True):
        np.testing.assert_array_equal(got, value)


def test_a_variable_is_read_as_it_was():
    variable = tf.Variable(matrix())
    set_threshold(5)
    with kmem.dtr.scope():
        doubled = 2.0 * variable
        variable.assign_add(tf.ones_like(doubled))
        after = variable + 0.0
        chain(8)
        assert kmem.dtr.statistics().num_evictions > 0

    assert float(doubled[0, 3]) == 6
    assert float(after[0, 3]) == 4


def test_a_variable_is_assigned_in_place():
    variable = tf.Variable(matrix())
    with kmem.dtr.scope():
        halved = tf.reduce_sum(0.5 * variable, 0)
        ones = tf.ones((ROWS, ROWS))
        with kmem.memory.track("CPU") as usage:
            variable.assign_sub(ones)

    assert len(halved) == ROWS
    assert usage.peak_bytes - usage.start_bytes < BYTES // 2


def test_a_function_is_one_operator():
    @tf.function
    def f(x):
        return tf.nn.relu(x) * 2.0

    @tf.function
    def g(x):
        return x + tf.random.normal((ROWS, ROWS))

    set_threshold(7)
    with kmem.dtr.scope():
        x = matrix()
        y, z = f(x), g(x)
        kept = z.numpy()
        chain(8)
        np.testing.assert_array_equal(z, kept)

    np.testing.assert_array_equal(y, 2 * matrix())
    np.testing.assert_array_equal(f(matrix()), 2 * matrix())


def test_a_function_that_assigns_runs_once():
    count = tf.Variable(0.0)

    @tf.function
    def f(x):
        count.assign_add(1.0)
        return x + count

    set_threshold(5)
    with kmem.dtr.scope():
        y = f(matrix())
        chain(8)
        assert float(y[0, 0]) == 1

    assert count.numpy() == 1


def test_a_failing_operator_leaves_every_count_right():
    with kmem.dtr.scope():
        before = kmem.memory.current("CPU")
        x = matrix()
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.matmul(x, tf.ones((3, 3)))
        del x
        gc.collect()

    statistics = kmem.dtr.statistics()
    assert (statistics.num_operators, statistics.live_bytes) == (0, 0)
    assert kmem.memory.current("CPU") - before < 10**5


@tf.custom_gradient
def no_gradient(x):
    def gradient(_):
        raise KeyboardInterrupt

    return tf.identity(x), gradient


@pytest.mark.parametrize(
    "function, num_tensors, error",
    [
        (no_gradient, 40, KeyboardInterrupt),
        # There is no room for the sum of y's gradients.
        (tf.identity, 5, tf.errors.ResourceExhaustedError),
    ],
    ids=["gradient", "sum"],
)
def test_a_backward_pass_that_fails_frees_its_gradients(
    function, num_tensors, error
):
    set_threshold(num_tensors)
    with kmem.dtr.scope():
        x = matrix()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(function(tf.cos(x))) + tf.tanh(x)
            branches = [y * y, *(y * float(n) for n in range(7))]
            loss = sum(map(tf.reduce_sum, branches))
        with pytest.raises(error):
            tape.gradient(loss, x)
        del x, y, branches, loss, tape
        gc.collect()

    statistics = kmem.dtr.statistics()
    assert (statistics.num_operators, statistics.live_bytes) == (0, 0)


def test_strings_lists_and_ragged_tensors_pass_through():
    with kmem.dtr.scope():
        words = tf.strings.join([tf.constant(["a"] * 2000), "b"])
        array = tf.TensorArray(tf.float32, 2).write(0, matrix()[0])
        ragged = tf.ragged.constant([[1, 2], [3]]) + 1
        row = array.write(1, matrix()[1]).stack()

    assert words[0].numpy() == b"ab"
    assert float(row[1, 0]) == ROWS
    assert ragged.to_list() == [[2, 3], [4]]


def test_python_functions_may_use_the_device_themselves():
    with kmem.dtr.scope():
        doubled = tf.py_function(lambda x: x + x, [matrix()], tf.float32)

    assert float(doubled[0, 1]) == 2


def test_gradients_are_those_of_plain_eager():
    def gradients():
        x = matrix() / ROWS**2
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(4):
                y = tf.tanh(tf.matmul(y, x))
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x).numpy()

    want = gradients()
    set_threshold(7)
    with kmem.dtr.scope():
        got = gradients()

    np.testing.assert_array_equal(got, want)
    assert kmem.dtr.statistics().num_recomputations > 0


def test_two_threads_take_turns():
    set_threshold(6)
    results = []

    def work(tensors):
        results.append(float(sum(t[0, 1] for t in tensors)))

    with kmem.dtr.scope():
        tensors = chain(6)
        threads = [
            threading.Thread(target=work, args=(tensors,)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert results == [1 + 2 + 3 + 4 + 5 + 6] * 2


def test_a_thread_that_reads_waits_for_another_ones_python():
    started, asking = threading.Event(), threading.Event()
    values = []

    def python(x):
        started.set()
        asking.wait()
        # Needs the interpreter while the other thread waits for the device.
        return x + float(sum(range(10**5)))

    with kmem.dtr.scope():
        x = matrix()

        def read():
            started.wait()
            asking.set()
            values.append(x.numpy())

        thread = threading.Thread(target=read)
        thread.start()
        tf.py_function(python, [x], tf.float32)
        thread.join()

    np.testing.assert_array_equal(values[0], matrix().numpy())


def test_dtr_is_enabled_once():
    kmem.dtr.enable()
    with pytest.raises(ValueError, match="must not be enabled twice"):
        kmem.dtr.enable()
    kmem.dtr.disable()
    kmem.dtr.disable()


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("sampling", [False, True])
def test_every_heuristic_keeps_the_threshold(heuristic, sampling):
    kmem.dtr.heuristic = heuristic
    kmem.dtr.enable_sqrt_sampling = sampling
    set_threshold(4)
    with kmem.memory.track("CPU") as usage, kmem.dtr.scope():
        total = tf.reduce_sum(tf.add_n(chain(3)))

    kmem.dtr.enable_sqrt_sampling = False
    assert usage.peak_bytes <= kmem.dtr.eviction_threshold
    assert float(total) > 0


def test_a_recorded_step_can_be_simulated(tmp_path):
    variable = tf.Variable(matrix())
    path = tmp_path / "step.log"
    with kmem.dtr.record(path):
        with tf.GradientTape() as tape:
            x = variable + 0.0
            for _ in range(4):
                x = tf.tanh(x)
            loss = tf.reduce_sum(x)
        gradient = tape.gradient(loss, variable)
        del x, tape
    del gradient

    program = read_program(path)
    found = simulate(program)
    # The variable, x, four times tanh and the gradient of the last.
    assert found.peak_bytes // BYTES == 7
    assert program.seconds > 0
    smaller = simulate(program, budget_bytes=6 * BYTES)
    assert smaller.num_recomputations > 0


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        with kmem.dtr.record(tmp_path / "missing" / "step.log"):
            pass


IN_A_POOL = """
    import kmem
    kmem.memory.limit({size}, device="CPU", pool={pool})
    import tensorflow as tf

    kmem.dtr.heuristic = "lru"
    kmem.dtr.evictee_minimum_size = 0
    value = tf.constant(1.0)
    with kmem.dtr.scope():
        tensors = [tf.fill([250_000], value)]
        for number in range(30):
            # Of two sizes, so that what is evicted leaves pieces.
            tensors.append(tf.tile(tensors[-1][:250_000], [1 + number % 2]))
            tensors[-1] += value
        values = [float(tensor[-1]) for tensor in tensors]
    print(values == [1.0 + number for number in range(31)])
    print(kmem.dtr.statistics().num_evictions > 0)
    print(kmem.memory.pool("CPU").peak_chunks <= {size})
"""


@pytest.mark.parametrize("pool", [True, "bfc"])
def test_what_has_no_place_in_a_pool_is_made_room_for(python, pool):
    code = IN_A_POOL.format(size=12_000_000, pool=repr(pool))
    status, output, errors = python.run(code)
    assert (status, output) == (0, "True\n" * 3), errors[-2000:]
