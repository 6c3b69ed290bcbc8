"""Every option trains with XLA on a GPU, as Keras does by default there.

In a process without determinism, under which Keras leaves XLA out.
"""

import accelerator
import numpy as np
import pytest
from accelerator import DEVICE
from accelerator import ROUNDING
from accelerator import trained

import kmem

pytestmark = [
    *accelerator.needs_it,
    pytest.mark.filterwarnings("ignore:XLA compiled something before"),
]


@pytest.fixture(scope="module")
def plain():
    """What plain training gives."""
    return trained("xla")


@pytest.mark.parametrize(
    "options", [{"microbatches": 4}, {"microbatches": 2, "remat": 0.9}], ids=str
)
def test_micro_batches_change_the_order_of_sums_only(options, plain):
    weights, peaks = trained("xla", **options)

    expected, plain_peaks = plain
    difference = accelerator.relative_difference(weights, expected)
    assert difference < ROUNDING
    assert max(peaks) < max(plain_peaks)


def test_a_budget_is_trained_within_on_a_device_of_that_size(plain):
    expected, plain_peaks = plain
    room = int(0.75 * max(plain_peaks))

    with accelerator.limited(room):
        budget = kmem.memory.current(DEVICE) + room
        weights, peaks = trained("xla", memory_budget=budget)

    assert max(peaks) <= room
    difference = accelerator.relative_difference(weights, expected)
    assert difference < ROUNDING


@pytest.mark.filterwarnings("ignore:Training steps run without XLA")
@pytest.mark.parametrize("options", [{"dtr": True}, {"sharding": "full"}])
def test_a_model_that_is_compiled_by_default_trains(options):
    model = accelerator.convolutional("graph")
    loss = model.loss
    model.compile("adam", loss)
    x, y = accelerator.data()

    history = kmem.wrap(model).fit(x, y, verbose=0, **options)

    assert history.history["loss"][0] < 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_train(dtype, plain):
    weights, _ = trained("xla", mixed_precision=dtype)

    assert accelerator.relative_difference(weights, plain[0]) > 0
    assert all(np.isfinite(w).all() for w in weights)


def test_groups_of_batches_are_one_update():
    weights, _ = trained("xla", gradient_accumulation_steps=3)

    others, _ = trained("graph", gradient_accumulation_steps=3)
    assert accelerator.relative_difference(weights, others) < ROUNDING
