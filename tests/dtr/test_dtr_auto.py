"""The heuristic that a program is given when it names none."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from trace_cases import training_step
from trace_cases import write

import kmem
from kmem.dtr import device
from kmem.dtr.simulator import HEURISTICS
from kmem.dtr.simulator import BudgetFailed
from kmem.dtr.simulator import simulate
from kmem.dtr.trace import read_program

pytestmark = pytest.mark.usefixtures("native_library")

WIDTH, DEPTH, BATCH_SIZE = 64, 10, 512


@pytest.mark.parametrize("in_pool", [False, True])
def test_auto_is_the_cheapest_of_all(tmp_path, in_pool):
    # Of two kinds of operators, so that heuristics differ.
    lines = training_step(60, num_bytes=512)
    for number, line in enumerate(lines):
        if "TIME" in line:
            line["TIME"] = str(100 + number * 7 % 11 * 300)
    program = read_program(write(tmp_path / "step.log", lines))
    chosen = set()
    for share in (0.9, 0.6, 0.4, 0.25):
        options = {
            "budget_bytes": int(share * 512 * 62) // 512 * 512,
            "in_pool": in_pool,
            "slowdown_limit": 9.0,
        }
        seconds = {}
        for name in HEURISTICS:
            try:
                found = simulate(program, heuristic=name, **options)
            except BudgetFailed:
                continue
            seconds[name] = found.seconds
        seconds.pop("random", None)
        best = simulate(program, heuristic="auto", **options)
        assert best.seconds == min(seconds.values())
        assert best.seconds == seconds[best.heuristic]
        assert best.peak_bytes <= options["budget_bytes"]
        chosen.add(best.heuristic)
    assert len(chosen) > 1


def test_what_no_heuristic_can_run_is_an_error(tmp_path):
    program = read_program(write(tmp_path / "step.log", training_step(9)))
    with pytest.raises(BudgetFailed, match="must be at least 40 bytes"):
        simulate(program, 30, "auto")


class Refusing(keras.Model):
    """Its steps run out of memory under some heuristics."""

    refused: tuple[str, ...] = ()
    tried: list[str]

    def train_step(self, data):
        logs = super().train_step(data)
        session = device.DeviceSession.latest
        if self.refused and session is not None:
            self.tried.append(session.heuristic)
            if session.heuristic in self.refused:
                raise tf.errors.ResourceExhaustedError(None, None, "No room.")
        return logs


def model(refused=()):
    keras.utils.set_random_seed(0)
    inputs = outputs = keras.Input((WIDTH,))
    for _ in range(DEPTH):
        outputs = layers.Dense(WIDTH, "gelu")(outputs)
        outputs = layers.Dropout(0.1)(outputs)
    made = Refusing(inputs, layers.Dense(1)(outputs))
    made.refused, made.tried = tuple(refused), []
    made.compile("adam", "mse", run_eagerly=True)
    return made


def trained(made, **options):
    x = np.random.default_rng(0).normal(size=(2 * BATCH_SIZE, WIDTH))
    y = np.zeros((len(x), 1))
    history = kmem.wrap(made).fit(
        *(x.astype("float32"), y),
        batch_size=BATCH_SIZE,
        epochs=2,
        shuffle=False,
        verbose=0,
        **options,
    )
    return [*made.get_weights(), np.array(history.history["loss"])]


@pytest.fixture(scope="module")
def plain():
    """What plain eager Keras makes of it, and a threshold below its peak."""
    made = model()
    before = kmem.memory.current("CPU")
    with kmem.memory.track("CPU") as usage:
        found = trained(made)
    threshold = before + int(0.6 * (usage.peak_bytes - before))
    return found, kmem.DTR(threshold, evictee_minimum_size=0)


def check_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_by_default_a_heuristic_is_chosen_and_no_number_changes(plain):
    expected, dtr = plain
    assert dtr.heuristic == kmem.dtr.heuristic == "auto"
    check_equal(trained(model(), dtr=dtr), expected)
    statistics = kmem.dtr.statistics()
    assert statistics.num_recomputations > 0
    assert statistics.heuristic in HEURISTICS


def test_a_step_that_fails_under_one_heuristic_is_tried_under_others(plain):
    expected, dtr = plain
    made = model(refused=HEURISTICS[:3])
    check_equal(trained(made, dtr=dtr), expected)
    tried = list(dict.fromkeys(made.tried))
    assert tried[0] == HEURISTICS[0]
    # Each that refuses once; the last one takes all steps.
    assert made.tried[: len(tried)] == tried
    assert set(made.tried[len(tried) :]) == {tried[-1]}
    assert tried[-1] == kmem.dtr.statistics().heuristic
    assert tried[-1] not in HEURISTICS[:3]


def test_a_step_that_fails_under_all_of_them_fails(plain):
    _, dtr = plain
    made = model(refused=HEURISTICS)
    before = made.get_weights()
    with pytest.raises(tf.errors.ResourceExhaustedError, match="No room."):
        trained(made, dtr=dtr)
    check_equal(made.get_weights(), before)
