"""What a plan recomputes from may wait in host memory."""

import collections
import dataclasses
import functools
import gc

import expressions
import keras
import numpy as np
import peaks
import pytest
import tensorflow as tf
from keras import layers

import kmem
from kmem import remat
from kmem.graph import host
from kmem.multilevel import Level
from kmem.planning.graph import simulate

pytestmark = pytest.mark.usefixtures("native_library")

ROWS, SIZE = 32, 24
BATCH_BYTES = ROWS * SIZE * SIZE * 8 * 4
X = np.random.default_rng(0).random((ROWS, SIZE, SIZE, 8), "float32")
Y = np.random.default_rng(1).random((len(X), 3), "float32")


def made(depth=5):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((SIZE, SIZE, 8))
    for _ in range(depth):
        x = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Dropout(0.1)(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=False)
    return kmem.wrap(model)


def trained(**options):
    """All variables after three steps, and what the last one needs."""
    model, found = made(), peaks.Peaks()
    model.fit(
        # All that are ready are one and the same: they take no memory.
        tf.data.Dataset.from_tensors((X, Y)).repeat(3),
        callbacks=[found],
        shuffle=False,
        verbose=0,
        **options,
    )
    variables = [*model.variables, *model.optimizer.variables]
    return [v.numpy() for v in variables], found.found[-1]


plain = functools.cache(trained)


@functools.cache
def planned(share: float, cpu_offload=False):
    """A plan for a share of what a step makes."""
    model, batch = made(), (X, Y)
    own = kmem.profile(model, batch, "flops").network.graph
    own = simulate(own, own.program).peak_bytes
    budget = kmem.memory.current() + int(share * own)
    how = {"costs": "flops", "cpu_offload": cpu_offload}
    return kmem.plan(model, batch, budget, **how)


def on_device(segments):
    return tuple(
        dataclasses.replace(s, inner=on_device(s.inner), on_host=False)
        for s in segments
    )


def _again(plan):
    """The stages that run again."""
    count = len(plan.network.stages)
    runs = collections.Counter(i for i in plan.schedule if 0 <= i < count)
    return [i for i, number in runs.items() for _ in range(number - 1)]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("share", [0.5])
def test_what_waits_on_the_host_takes_no_memory_and_changes_no_bit(share):
    want, _ = plain()
    # The link is so fast that it is used.
    plan = planned(share, "1TB")
    assert plan.host_bytes
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    fewer = planned(share).simulation.num_recomputed
    assert plan.simulation.num_recomputed < fewer
    staying = dataclasses.replace(plan, segments=on_device(plan.segments))
    saved = staying.simulation.peak_bytes - plan.simulation.peak_bytes
    assert saved >= 3 * BATCH_BYTES
    got, measured = trained(remat=plan)
    assert_equal(got, want)
    got, without = trained(remat=staying)
    assert_equal(got, want)
    # Their peaks are of other operations, with other workspace.
    assert without - measured >= saved - 2 * BATCH_BYTES


def test_a_smaller_batch_is_sent_as_well():
    found = []
    for options in ({}, {"remat": planned(0.5, "1TB")}):
        model = made()
        data = np.concatenate([X, X[: ROWS // 2]])
        labels = np.concatenate([Y, Y[: ROWS // 2]])
        model.fit(data, labels, ROWS, shuffle=False, verbose=0, **options)
        found.append([v.numpy() for v in model.variables])
    assert_equal(*found)


def test_a_plan_with_a_host_needs_less_than_any_without():
    with pytest.raises(ValueError, match="must be at least") as refused:
        planned(0.02)
    least = refused.value.smallest_bytes
    with pytest.raises(ValueError, match="must be at least") as refused:
        planned(0.02, "1TB")
    assert refused.value.smallest_bytes < least - BATCH_BYTES


def test_a_step_sends_what_the_plan_says():
    plan = planned(0.5, "1TB")
    graph = expressions.ran(made(), X, Y, remat=plan)
    runs = collections.Counter(node.op for node in graph.node)
    # All that are sent are as large as the batch.
    count = runs["SerializeTensor"]
    assert count == runs["ParseTensor"] > 0
    assert plan.host_bytes == count * BATCH_BYTES
    convolutions = len([s for s in plan.network.stages if "conv" in s.name])
    again = [plan.network.stages[i].name for i in _again(plan)]
    num_again = len([name for name in again if "conv" in name])
    forward = [op for op in runs if op.endswith("Conv2D")]
    assert sum(runs[op] for op in forward) == convolutions + num_again


def test_a_slow_link_is_not_used():
    plan = planned(0.5, "1KB")
    assert not plan.host_bytes
    assert plan.predicted_seconds == planned(0.5).predicted_seconds


@pytest.mark.parametrize(
    "others", [{"microbatches": 2}, {"mixed_precision": "bfloat16"}]
)
@pytest.mark.filterwarnings("ignore:Layers whose state")
def test_it_goes_with_other_options(others):
    gc.collect()
    before = kmem.memory.current()
    want, most = trained(**others)
    gc.collect()
    # Other tests may have left something.
    budget = kmem.memory.current() + int(0.8 * (most - before))
    option = kmem.Remat(budget=budget, cpu_offload="1TB")
    got, measured = trained(remat=option, **others)
    assert_equal(got, want)
    assert measured <= budget


def test_a_step_that_fails_leaves_nothing_behind():
    plan = planned(0.5, "1TB")
    model = made()
    model.fit(X, Y, ROWS, verbose=0, shuffle=False, remat=plan)
    gc.collect()
    before = kmem.memory.current()
    kmem.memory.limit(before + 3 * BATCH_BYTES, device="CPU")
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.fit(X, Y, ROWS, verbose=0, shuffle=False, remat=plan)
    kmem.memory.limit(None, device="CPU")
    model.fit(X, Y, ROWS, verbose=0, shuffle=False, remat=plan)
    gc.collect()
    assert kmem.memory.current() <= before + BATCH_BYTES // 8


class Tower(layers.Layer):
    """Layers whose inputs wait on the host, or do not."""

    def __init__(self, **how):
        super().__init__()
        blocks = [
            keras.Sequential([layers.Dense(64, "tanh"), layers.Dropout(0.2)])
            for _ in range(6)
        ]
        for block in blocks:
            block.build((None, 64))
        self.blocks = blocks
        self.runs = [remat.recompute(each, **how) for each in blocks]

    def call(self, x):
        for run in self.runs:
            x = run(x, training=True)
        return x


def gradients(tower, x, jit_compile=False):
    @tf.function(autograph=False, jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tower(x) ** 2)
        return tape.gradient(loss, tower.trainable_variables)

    return step, step(x)


def test_a_function_in_ones_own_step_waits_on_the_host():
    x, found, taken = tf.random.stateless_normal((2048, 64), (0, 1)), [], []
    for how in ({}, {"cpu_offload": True}):
        keras.utils.set_random_seed(0)
        step, got = gradients(Tower(**how), x)
        found.append([g.numpy() for g in got])
        taken.append(peaks.least_peak_bytes(step, x))
    assert_equal(*found)
    # Of six inputs the batch is held by who gives it, and one is at work.
    assert taken[1] <= taken[0] - 1.5 * 2048 * 64 * 4


def test_on_a_gpu_a_copy_on_the_cpu_waits_for_the_gradient(monkeypatch):
    """A copy between devices begins as soon as its source is there."""
    x, found = tf.random.stateless_normal((16, 64), (0, 1)), []
    for how in ({}, {"cpu_offload": True}):
        monkeypatch.setattr(host, "_has_gpu", lambda: True)
        keras.utils.set_random_seed(0)
        step, got = gradients(Tower(**how), x)
        found.append([g.numpy() for g in got])
    assert_equal(*found)
    ops = step.get_concrete_function(x).graph.get_operations()
    copies = [
        op
        for op in ops
        if op.type == "Identity" and op.device.endswith("CPU:0")
    ]
    waiting = [op for op in copies if op.control_inputs]
    # Each is sent, and waits there to come back.
    assert len(waiting) == len(copies) - len(waiting) == 6
    for op in waiting:
        assert op.inputs[0].op in copies


def test_a_gradient_that_is_differentiated_is_the_same():
    x, found = tf.random.stateless_normal((16, 64), (0, 1)), []
    for how in ({}, {"cpu_offload": True}):
        keras.utils.set_random_seed(0)
        tower = Tower(**how)

        @tf.function(autograph=False)
        def step(x, tower=tower):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(tower(x) ** 3)
                squared = tf.reduce_sum(inner.gradient(y, x) ** 2)
            return outer.gradient(squared, [x, *tower.trainable_variables])

        found.append([g.numpy() for g in step(x)])
    assert_equal(*found)


@pytest.mark.parametrize("jit_compile", [None, True])
def test_without_a_graph_of_tensorflow_s_it_is_refused(jit_compile):
    x = tf.zeros((4, 64))
    with pytest.raises(ValueError, match="in a graph that XLA does not"):
        if jit_compile:
            gradients(Tower(cpu_offload=True), x, jit_compile=True)
        else:
            Tower(cpu_offload=True)(x)


@pytest.mark.filterwarnings("ignore:XLA compiled something")
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {"jit_compile": True}])
def test_a_model_that_runs_otherwise_is_refused(how):
    plan, model = planned(0.5, "1TB"), made()
    model.compile("sgd", "mse", **how)
    for option in (plan, kmem.Remat(budget=0.5, cpu_offload=True)):
        with pytest.raises(ValueError, match="XLA does not compile"):
            model.fit(X, Y, ROWS, verbose=0, remat=option)


def test_a_level_of_a_program_refuses_it():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    level = Level(
        model,
        lambda x: keras.ops.mean(model(x) ** 2),
        "sgd",
        remat=kmem.Remat(cpu_offload=True),
    )
    with pytest.raises(ValueError, match="of a level must be without `cpu_off"):
        level.look(tf.zeros((2, 4)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cpu_offload": "12 parsecs"}, "`cpu_offload` must be"),
        ({"cpu_offload": 0}, "`cpu_offload` must be"),
        ({"cpu_offload": True, "solver": "sqrt"}, "must be one of 'optimal'"),
        ({"cpu_offload": True, "plan": "plan.json"}, "without a budget and"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        kmem.Remat(**fields)
