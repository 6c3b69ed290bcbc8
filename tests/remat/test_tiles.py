"""A segment that runs in tiles: the numbers of the whole image, in less."""

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
from kmem.keras_graph import applying
from kmem.keras_graph.profiling import measure
from kmem.keras_graph.profiling import record_batch
from kmem.planning import tiles
from kmem.planning.choosing import Chooser
from kmem.planning.network import Segment

pytestmark = pytest.mark.usefixtures("native_library")


def convolutions():
    yield layers.Conv2D(4, 3, padding="same", activation="relu")
    yield layers.Conv2D(4, (5, 2))
    yield layers.Conv2D(4, 3, dilation_rate=2, padding="same")
    yield layers.LeakyReLU()


def strides():
    yield layers.Conv2D(4, 3, strides=2, padding="same")
    yield layers.Activation("tanh")
    yield layers.Conv2D(4, 4, strides=3, padding="same")


def pooling():
    yield layers.Conv2D(4, 3, padding="same", activation="gelu")
    yield layers.MaxPooling2D(3, 2, padding="same")
    yield layers.AveragePooling2D(3, 1, padding="same")
    yield layers.MaxPooling2D()


def by_channels():
    yield layers.DepthwiseConv2D(3, padding="same")
    yield layers.SeparableConv2D(4, 3, padding="same", strides=2)
    yield layers.LayerNormalization()
    yield layers.Dense(4, "silu")


def padding():
    yield layers.Rescaling(2.0)
    yield layers.ZeroPadding2D(3)
    yield layers.Conv2D(4, 7, strides=2)
    yield layers.BatchNormalization(trainable=False)
    yield layers.ZeroPadding2D(((2, 1), (0, 1)))
    yield layers.MaxPooling2D(3, 2)
    yield layers.Cropping2D(((1, 2), (0, 0)))


def in_groups():
    yield layers.Conv2D(4, 3)
    yield layers.Conv2D(4, 3, groups=2, padding="same")


def causal():
    yield layers.Conv1D(4, 3, padding="causal", strides=2)
    yield layers.MaxPooling1D()


def in_a_row(made, rank=4):
    inputs = x = keras.Input((*[None] * (rank - 2), 3))
    for layer in made():
        x = layer(x)
    x = layers.GlobalAveragePooling2D()(x) if rank == 4 else x
    return keras.Model(inputs, layers.Dense(2)(x))


def residual():
    inputs = keras.Input((None, None, 3))
    first = layers.Conv2D(4, 3, padding="same")(inputs)
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(first)
    x = layers.Add()([x, first])
    x = layers.Concatenate()(
        [layers.MaxPooling2D()(x), layers.Conv2D(2, 2, strides=2)(x)]
    )
    return keras.Model(inputs, layers.Dense(2)(layers.Conv2D(3, 1)(x)))


MODELS = {
    made.__name__: functools.partial(in_a_row, made)
    for made in (
        *(convolutions, strides, pooling, by_channels, padding),
        in_groups,
    )
}
MODELS["causal"] = functools.partial(in_a_row, causal, rank=3)
MODELS["residual"] = residual


@pytest.fixture
def floats(request):
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(request.param)
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def longest(network):
    """The longest segment from the first stage that may run in tiles."""
    stops = range(len(network.stages) - 1, 0, -1)
    return next(stop for stop in stops if tiles.ends(network, 0, stop))


def numbers(model, x, count, how):
    """The result of a model, and its gradients, in some tiles or none."""
    recording = record_batch(model, x)
    network = measure(recording, "flops").network
    stop = longest(network)
    segments = ()
    if count:
        cut = tiles.tiles_of(network, 0, stop, count)
        segments = (Segment(0, stop, tiles=cut),)

    def step(x):
        with applying.applied(model, recording.frame, segments):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = model(x, training=True)
                loss = tf.reduce_sum(y**2)
        weights = [v.value for v in model.trainable_variables]
        return [y, *tape.gradient(loss, [x, *weights])]

    if how != "eager":
        compiled = how == "xla" or None
        step = tf.function(step, autograph=False, jit_compile=compiled)
    return [value.numpy() for value in step(tf.constant(x))]


@pytest.mark.parametrize(
    ("name", "how", "floats"),
    [
        *[(name, "graph", "float64") for name in MODELS],
        ("padding", "graph", "float32"),
        ("pooling", "eager", "float32"),
        ("residual", "eager", "float64"),
    ],
    indirect=["floats"],
)
def test_tiles_give_the_numbers_of_the_whole_image(name, how, floats):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    shape = (2, 29, 3) if name == "causal" else (2, 29, 24, 3)
    x = rng.normal(size=shape).astype(floats)
    model(x)
    want = numbers(model, x, 0, how)
    got = numbers(model, x, 3, how)
    precision = 3e-5 if floats == "float32" else 1e-13
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=precision * abs(b).max())
    # Each tile's result is computed as in the whole image.
    assert abs(got[0] - want[0]).max() <= precision / 30 * abs(want[0]).max()


@pytest.mark.filterwarnings("ignore:XLA compiled something")
@pytest.mark.parametrize("name", ["pooling"])
def test_compiled_tiles_give_the_numbers_of_the_whole_image(name):
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    x = np.random.default_rng(0).normal(size=(1, 22, 16, 3)).astype("float32")
    model(x)
    want = numbers(model, x, 0, "xla")
    got = numbers(model, x, 2, "xla")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * abs(b).max())


def upside_down(x):
    return keras.ops.flip(x, axis=1)


@pytest.mark.parametrize(
    "layer",
    [
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.GaussianNoise(0.5),
        layers.Conv2D(3, 3, activity_regularizer="l2"),
        layers.Conv2D(3, 3, activation=upside_down),
        layers.LayerNormalization(axis=(1, 2, 3)),
        layers.Lambda(upside_down),
        layers.Conv2DTranspose(3, 3),
        layers.Permute((2, 1, 3)),
        type("Own", (layers.Conv2D,), {})(3, 3),
    ],
    ids=lambda layer: layer.name,
)
def test_what_looks_at_other_rows_may_not_run_in_tiles(layer):
    inputs = keras.Input((8, 8, 3))
    model = keras.Model(inputs, layers.Conv2D(1, 1)(layer(inputs)))
    x = np.zeros((2, 8, 8, 3), "float32")
    first, second, _ = kmem.profile(model, x, "flops").network.stages
    assert first.window is None
    assert second.window is not None


SIZE, WIDTH = 96, 8
IMAGE_BYTES = SIZE * SIZE * WIDTH * 4
X = np.random.default_rng(0).random((1, SIZE, SIZE, 3), "float32")
Y = np.ones((1, 2), "float32")


def made():
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((SIZE, SIZE, 3))
    for _ in range(3):
        x = layers.Conv2D(WIDTH, 3, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D(4)(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse", jit_compile=False)
    return kmem.wrap(model)


def trained(**options):
    """A model after three steps, and what the last one needs."""
    model, found = made(), peaks.Peaks()
    # All that are ready are one and the same: they take no memory.
    data = tf.data.Dataset.from_tensors((X, Y)).repeat(3)
    model.fit(data, callbacks=[found], verbose=0, shuffle=False, **options)
    return model, found.found[-1]


def check_same(got, want):
    for a, b in zip(got.get_weights(), want.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def least_budget(option):
    with pytest.raises(ValueError, match="must be at least") as refused:
        trained(**{option: 1000})
    return refused.value.smallest_bytes


@functools.cache
def in_tiles(count):
    """A plan whose first stages run in tiles, and that without."""
    model = made()
    plan = kmem.plan(model, (X, Y), 1.0, costs="flops")
    cut = tiles.tiles_of(plan.network, 0, 4, count)
    tiled = Segment(0, 4, tiles=cut)
    return dataclasses.replace(plan, segments=(tiled,)), plan


def test_a_step_in_tiles_needs_the_bytes_that_the_plan_says():
    plan, _ = in_tiles(8)
    want, most = trained()
    gc.collect()
    held = kmem.memory.current()
    got, peak = trained(remat=plan)
    check_same(got, want)
    assert most - peak > 2.5 * IMAGE_BYTES
    drawn = plan.simulation.peak_bytes
    assert drawn - IMAGE_BYTES / 2 < peak - held < 1.05 * drawn


def test_tiles_within_a_segment_give_the_same_numbers():
    plan, _ = in_tiles(4)
    around = dataclasses.replace(plan, segments=(Segment(0, 5, plan.segments),))
    check_same(trained(remat=around)[0], trained()[0])


def test_each_tile_runs_each_layer_twice():
    plan, _ = in_tiles(4)
    graph = expressions.ran(made(), X, Y, remat=plan)
    runs = collections.Counter(node.op for node in graph.node)
    forward = sum(n for op, n in runs.items() if op.endswith("Conv2D"))
    assert forward == 2 * 4 * 3


@pytest.mark.parametrize("option", ["remat", "memory_budget"])
def test_a_budget_that_only_tiles_keep_is_kept(option):
    want, _ = trained()
    gc.collect()
    held = kmem.memory.current()
    # What other tests have left may go, and come.
    budget = least_budget(option) + IMAGE_BYTES // 2
    least = Chooser(in_tiles(8)[1].network).smallest.peak_bytes
    gc.collect()
    assert budget - held < least - IMAGE_BYTES // 2
    got, peak = trained(**{option: budget})
    assert peak <= budget
    if option == "remat":
        plan = kmem.plan(made(), (X, Y), budget)
    else:
        plan = got.memory_report.chosen.plan
    assert " tiles" in plan.summary()
    check_same(got, want)


def test_a_plan_for_a_frozen_layer_is_refused_once_it_is_not():
    def frozen(trainable):
        inputs = keras.Input((8, 8, 3))
        x = layers.Conv2D(4, 3, padding="same")(inputs)
        x = layers.BatchNormalization(trainable=trainable)(x)
        model = keras.Model(inputs, layers.Conv2D(2, 1)(x))
        model.compile("sgd", "mse")
        return kmem.wrap(model)

    x, y = np.zeros((2, 8, 8, 3), "float32"), np.zeros((2, 8, 8, 2), "float32")
    plan = kmem.plan(frozen(False), (x, y), 1.0, costs="flops")
    with pytest.raises(ValueError, match="may run in tiles"):
        frozen(True).fit(x, y, verbose=0, remat=plan)
