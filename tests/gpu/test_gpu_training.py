"""Every option trains on a GPU: same numbers, within its budget."""

import accelerator
import numpy as np
import pytest
import tensorflow as tf
from accelerator import DEVICE
from accelerator import ROUNDING
from accelerator import trained

import kmem

pytestmark = accelerator.needs_it

# With XLA: test_gpu_compiled.py.
MODES = ["eager", "graph"]
EXACT = [{"remat": 0.7}, {"remat": "auto"}]
SUMS = [{"microbatches": 4}, {"microbatches": 2, "remat": 0.9}]


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    """cuDNN may choose another algorithm when memory is short."""
    tf.config.experimental.enable_op_determinism()


@pytest.fixture(scope="module")
def plain():
    """What plain training of each mode gives, found once."""
    results = {}

    def of(mode, normalizes=False):
        if (mode, normalizes) not in results:
            results[mode, normalizes] = trained(mode, normalizes)
        return results[mode, normalizes]

    return of


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", EXACT, ids=str)
def test_recomputation_changes_no_bit(mode, options, plain):
    weights, _ = trained(mode, normalizes=True, **options)

    assert accelerator.relative_difference(weights, plain(mode, True)[0]) == 0


@pytest.fixture
def one_layout():
    """TensorFlow does not choose between NHWC and NCHW for each graph."""
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    yield
    options.setdefault("layout_optimizer", True)
    tf.config.optimizer.set_experimental_options(options)


@pytest.mark.parametrize("options", EXACT, ids=str)
def test_recomputation_changes_no_bit_in_one_layout(options, one_layout):
    weights, _ = trained("graph", normalizes=True, **options)

    plain, _ = trained("graph", normalizes=True)
    assert accelerator.relative_difference(weights, plain) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", SUMS, ids=str)
def test_micro_batches_change_the_order_of_sums_only(mode, options, plain):
    weights, peaks = trained(mode, **options)

    expected, plain_peaks = plain(mode)
    difference = accelerator.relative_difference(weights, expected)
    assert difference < ROUNDING
    assert max(peaks) < max(plain_peaks)


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_stays_within_its_budget(mode, plain):
    plain_peak = max(plain(mode)[1])
    room = int(0.75 * plain_peak)

    with accelerator.limited(room):
        _, peaks = trained(mode, remat=kmem.memory.current(DEVICE) + room)

    assert max(peaks) <= room


def test_what_a_plan_sends_to_host_memory_is_not_on_the_device(plain):
    expected, plain_peaks = plain("graph")
    room = int(0.5 * max(plain_peaks))
    budget = kmem.memory.current(DEVICE) + room

    with accelerator.limited(room):
        option = kmem.Remat(budget=budget, cpu_offload="1TB")
        weights, peaks = trained("graph", remat=option)

    difference = accelerator.relative_difference(weights, expected)
    assert difference < ROUNDING
    assert max(peaks) <= room


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_is_trained_within_on_a_device_of_that_size(mode, plain):
    plain_peak = max(plain(mode)[1])
    budget = kmem.memory.current(DEVICE) + int(0.75 * plain_peak)

    with accelerator.limited(int(0.75 * plain_peak)):
        weights, _ = trained(mode, memory_budget=budget)

    difference = accelerator.relative_difference(weights, plain(mode)[0])
    assert difference < ROUNDING


def test_dtr_changes_no_bit(plain):
    weights, _ = trained("eager", dtr=True)

    assert accelerator.relative_difference(weights, plain("eager")[0]) == 0


def test_dtr_evicts_inside_of_operators(plain):
    threshold = kmem.memory.current(DEVICE) + int(0.8 * max(plain("eager")[1]))

    with accelerator.limited(threshold - kmem.memory.current(DEVICE)):
        weights, _ = trained("eager", dtr=threshold)

    assert kmem.dtr.statistics().num_evictions > 0
    assert accelerator.relative_difference(weights, plain("eager")[0]) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_train(mode, dtype, plain):
    weights, _ = trained(mode, mixed_precision=dtype)

    difference = accelerator.relative_difference(weights, plain(mode)[0])
    assert difference > 0
    assert all(np.isfinite(w).all() for w in weights)


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_batches_are_one_update(mode):
    weights, _ = trained(mode, gradient_accumulation_steps=3)

    others, _ = trained("eager", gradient_accumulation_steps=3)
    assert accelerator.relative_difference(weights, others) < ROUNDING


def test_what_is_offloaded_is_not_on_the_device(plain):
    sharding = kmem.Sharding("full", cpu_offload=True)

    weights, _ = trained("graph", sharding=sharding)

    difference = accelerator.relative_difference(weights, plain("graph")[0])
    assert difference < ROUNDING


REPLICAS = """
import keras
import numpy as np
import kmem
import tensorflow as tf

kind = "{kind}"
device = tf.config.list_physical_devices(kind)[0]
size = {{"memory_limit": 2048}} if kind == "GPU" else {{}}
two = [tf.config.LogicalDeviceConfiguration(**size) for _ in range(2)]
tf.config.set_logical_device_configuration(device, two)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


def weights(strategy, **options):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    kmem.wrap(model).fit(x, x[:, :1], batch_size=32, verbose=0, **options)
    return model.get_weights()


two = tf.distribute.MirroredStrategy([f"{{kind}}:0", f"{{kind}}:1"])
one = tf.distribute.get_strategy()
for a, b in zip(weights(two, microbatches=2), weights(one)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
print("equal")
"""


def test_two_logical_devices_train_as_one(python):
    kind = DEVICE.partition(":")[0]

    status, output, errors = python.run(REPLICAS.format(kind=kind))

    assert (status, output) == (0, "equal\n"), errors
