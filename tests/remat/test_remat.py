"""A function that is run again gives the numbers of one that is kept."""

import keras
import numpy as np
import pytest
import remat_cases
import tensorflow as tf
from keras import layers
from keras.src.backend.common import global_state
from own_gradients import LOOKS_FOR_VARIABLES
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from kmem import remat
from kmem.base import private_tf
from kmem.step import capture

MODES = ("eager", "graph", "xla")


def in_mode(function, mode):
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def plain(function):
    return function


def chained(block):
    def run(x):
        for layer in block:
            x = layer(x)
        return x

    return run


def nested(block, depth, wrap):
    """The first layer, then the rest in a segment of its own, and so on."""

    def run(x):
        x = wrap(chained(block[:1]))(x)
        if depth > 1 and len(block) > 1:
            return nested(block[1:], depth - 1, wrap)(x)
        return chained(block[1:])(x)

    return wrap(run)


class Model(keras.Model):
    """The layers of a case, the implicit `training` flag theirs to find."""

    def __init__(self, case, wrap, depth=1):
        super().__init__()
        keras.utils.set_random_seed(5)
        self.block = case()
        self.wrap = wrap
        self.depth = depth

    def call(self, x, training=None):
        if self.depth > 1:
            return nested(self.block, self.depth, self.wrap)(x)
        return self.wrap(chained(self.block))(x)


def built(case, wrap, depth=1):
    model = Model(case, wrap, depth)
    model(remat_cases.CASES[case])
    generator = np.random.default_rng(1)
    for weight in model.weights:
        if weight.dtype == "float32":
            noise = generator.normal(size=weight.shape) * 0.1
            weight.assign_add(noise.astype("float32"))
    return model


def loss_of(outputs):
    factors = tf.random.stateless_normal(tf.shape(outputs), (1, 2))
    return tf.reduce_sum(tf.cast(outputs, "float32") ** 2 * factors)


def step_of(model):
    """Loss, added losses, gradients; and the state after it."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True))
            losses = list(model.losses)
            total = tf.add_n([loss, *losses])
        gradients = tape.gradient(total, model.trainable_weights)
        return [loss, losses, [tf.convert_to_tensor(g) for g in gradients]]

    return step


def numbers(case, mode, wrap, depth=1, num_steps=2):
    model = built(case, wrap, depth)
    step = in_mode(step_of(model), mode)
    found = []
    for _ in range(num_steps):
        found += tf.nest.flatten(step(remat_cases.CASES[case]))
    found += [weight.value for weight in model.variables]
    return [np.asarray(tf.convert_to_tensor(f), "float64") for f in found]


def assert_same(actual, expected, mode):
    # XLA fuses, and so rounds, the two programs differently.
    tolerance = 1e-5 if mode == "xla" else 0
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


# XLA compiles for seconds: at every run those that draw, assign or loop.
IN_XLA = (
    remat_cases.dropout,
    remat_cases.batch_normalization,
    remat_cases.masked_rnn,
    remat_cases.assigning,
)


@pytest.mark.parametrize(
    "case, mode",
    [
        pytest.param(
            case,
            mode,
            id=f"{case.__name__}-{mode}",
            marks=()
            if mode != "xla" or case in IN_XLA
            else pytest.mark.exhaustive,
        )
        for case in remat_cases.CASES
        for mode in MODES
    ],
)
def test_the_numbers_are_those_of_the_function_itself(case, mode):
    expected = numbers(case, mode, plain)

    assert_same(numbers(case, mode, remat.recompute), expected, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "case",
    [
        remat_cases.dropout,
        remat_cases.batch_normalization,
        remat_cases.assigning,
        remat_cases.mixed_bfloat16,
    ],
    ids=lambda c: c.__name__,
)
def test_segments_within_segments_change_no_number(case, mode):
    expected = numbers(case, mode, plain, depth=3)

    assert_same(numbers(case, mode, remat.recompute, 3), expected, mode)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_each_level_runs_the_innermost_function_once_more(depth):
    runs = []

    def function(x):
        runs.append(None)
        return x * x

    for _ in range(depth):
        function = remat.recompute(function, check=False)
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)

    assert float(tape.gradient(y, x)) == 6.0
    assert len(runs) == 1 + depth


@pytest.mark.parametrize("mode", MODES)
def test_training_gives_the_same_weights_and_logs(mode):
    def train(wrap):
        model = built(remat_cases.batch_normalization, wrap)
        model.compile(
            keras.optimizers.Adam(0.01),
            "mse",
            metrics=["mae"],
            jit_compile=mode == "xla",
            run_eagerly=mode == "eager",
        )
        x = remat_cases.rows(12, 8)
        history = model.fit(
            x, -x, batch_size=4, epochs=2, shuffle=False, verbose=0
        )
        return [*history.history.values(), *model.get_weights()]

    assert_same(train(remat.recompute), train(plain), mode)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_gradients_may_be_taken_in_a_loop(mode):
    def train(wrap):
        model = built(remat_cases.dropout, wrap)
        step = step_of(model)

        def loop():
            def body(i, total):
                x = remat_cases.CASES[remat_cases.dropout]
                _, _, gradients = step(x + tf.cast(i, "float32"))
                pairs = zip(total, gradients, strict=True)
                return i + 1, [t + g for t, g in pairs]

            zeros = [tf.zeros(w.shape) for w in model.trainable_weights]
            return tf.while_loop(
                lambda i, _: i < 3, body, [tf.constant(0), zeros]
            )[1]

        found = in_mode(loop, mode)()
        return [*found, *model.get_weights()]

    assert_same(train(remat.recompute), train(plain), mode)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_have_gradients(mode):
    def second(wrap):
        model = built(remat_cases.dropout, wrap)
        weights = model.trainable_weights

        def step(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = loss_of(tf.tanh(model(x, training=True)))
                gradients = inner.gradient(loss, [x, *weights])
                norm = tf.add_n([tf.reduce_sum(g**2) for g in gradients])
            return outer.gradient(norm, [x, *weights])

        return in_mode(step, mode)(remat_cases.CASES[remat_cases.dropout])

    for one, other in zip(second(remat.recompute), second(plain), strict=True):
        # The sums are the same ones in another order.
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_a_second_derivative_keeps_nothing_of_the_first_one():
    runs = []

    def cube(x):
        runs.append(None)
        return x * x * x

    x = tf.constant(2.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = remat.recompute(cube, check=False)(x) ** 2
        gradient = inner.gradient(y, x)
        assert len(runs) == 2

    # Once for the derivative of the gradient, and once for that of `y`.
    assert float(outer.gradient(gradient, x)) == 6 * 5 * 2.0**4
    assert len(runs) == 4


@pytest.mark.parametrize("mode", MODES)
def test_arguments_may_be_anything_in_any_nest(mode):
    def function(inputs, *, power, add=None, flags=(True, "text"), keep, ids):
        assert add is None and flags == (True, "text")
        y = tf.where(keep, inputs["a"] ** power, inputs["b"])
        return {"y": y + tf.cast(ids, "float32"), "none": None, "ids": ids}

    def step(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            outputs = remat.recompute(function)(
                {"a": a, "b": b},
                power=2,
                keep=tf.constant([True, False]),
                ids=tf.constant([1, 2]),
            )
            loss = tf.reduce_sum(outputs["y"])
        assert outputs["none"] is None
        return outputs["ids"], tape.gradient(loss, [a, b])

    ids, (of_a, of_b) = in_mode(step, mode)(
        tf.constant([3.0, 4.0]), tf.constant([5.0, 6.0])
    )

    assert list(ids) == [1, 2]
    assert list(of_a) == [6.0, 0.0]
    assert list(of_b) == [0.0, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_may_come_twice_and_go_straight_through(mode):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            product, same = remat.recompute(lambda a, b: (a * b, a))(x, x)
            loss = product + 10 * same
        return tape.gradient(loss, x)

    assert float(in_mode(step, mode)(tf.constant(3.0))) == 16.0


@pytest.mark.parametrize("mode", MODES)
def test_raw_variables_get_their_gradients(mode):
    raw = tf.Variable(2.0)
    unused = tf.Variable(2.0)

    def step(x):
        with tf.GradientTape() as tape:
            y = remat.recompute(lambda x: x * raw * raw)(x)
        return tape.gradient(y, [raw, unused])[:1]

    assert float(in_mode(step, mode)(tf.constant(3.0))[0]) == 12.0


@pytest.mark.parametrize("mode", MODES)
def test_values_are_those_at_entry_whatever_is_assigned_later(mode):
    layer = layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build((None, 1))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = remat.recompute(lambda x: layer(x) ** 2)(x)
            layer.kernel.assign(layer.kernel * 100.0)
        return tape.gradient(y, x)

    assert float(in_mode(step, mode)(tf.constant([[3.0]]))[0, 0]) == 6.0
    assert float(layer.kernel.numpy()[0, 0]) == 100.0


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_are_none_stay_none(mode):
    first, second = layers.Dense(2), layers.Dense(2)
    first.build((None, 2))
    second.build((None, 2))

    def step(x):
        with tf.GradientTape() as tape:
            y, _ = remat.recompute(lambda x: (first(x), second(x)))(x)
        weights = [first.kernel, second.kernel]
        return tape.gradient(y, [w.value for w in weights])

    of_first, of_second = in_mode(step, mode)(tf.ones((3, 2)))

    assert of_first is not None
    assert of_second is None


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_rows_stay_rows(mode):
    model = built(remat_cases.embedding, remat.recompute)

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(model(x))
        gradient = tape.gradient(loss, model.trainable_weights)[0]
        kinds.append(type(gradient))

    kinds = []
    in_mode(step, mode)(remat_cases.tokens())

    assert kinds == [tf.IndexedSlices]


@pytest.mark.parametrize("mode", MODES)
def test_masks_go_in_and_come_out(mode):
    seen = []

    class Look(layers.Layer):
        supports_masking = True

        def call(self, x, mask=None):
            seen.append(mask is not None)
            return x * 2

    embedding = layers.Embedding(4, 2, mask_zero=True)
    embedding.build()
    look = Look()

    def step(ids):
        with tf.GradientTape() as tape:
            x = embedding(ids)
            y = remat.recompute(look, check=False)(x)
            loss = tf.reduce_sum(y)
        tape.gradient(loss, embedding.trainable_weights)
        return y._keras_mask

    mask = in_mode(step, mode)(tf.constant([[1, 0]]))

    assert mask.numpy().tolist() == [[True, False]]
    assert seen == [True, True]


@pytest.mark.parametrize("mode", MODES)
def test_a_cross_entropy_reads_what_a_softmax_was_made_from(mode):
    x = 99 * tf.random.stateless_normal((2, 3), [0, 1])
    softmax = layers.Activation("softmax")

    def found(call):
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
                loss = keras.ops.categorical_crossentropy([[0, 1, 0]] * 2, y)
            return loss, tape.gradient(loss, x)

        return in_mode(step, mode)(x)

    pairs = zip(found(remat.recompute(softmax)), found(softmax), strict=True)
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


def test_a_frozen_layer_is_not_differentiated():
    layer = layers.Dense(4)
    layer.build((None, 4))

    def num_matmuls(trainable):
        layer.trainable = trainable

        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = remat.recompute(layer)(x)
            tape.gradient(y, x)

        graph = step.get_concrete_function(tf.TensorSpec((2, 4))).graph
        return [op.type for op in graph.get_operations()].count("MatMul")

    assert num_matmuls(True) - num_matmuls(False) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_may_be_built_by_its_first_call(mode):
    layer = layers.Dense(2, kernel_initializer="ones")

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = remat.recompute(layer)(x)
        return y, tape.gradient(y, [x, layer.kernel.value])

    # Keras itself cannot build a layer while XLA compiles.
    if mode != "xla":
        y, (of_x, of_kernel) = in_mode(step, mode)(tf.ones((1, 3)))

        assert y.numpy().tolist() == [[3.0, 3.0]]
        assert of_x.numpy().tolist() == [[2.0, 2.0, 2.0]]
        assert of_kernel.shape == (3, 2)


def test_losses_belong_to_their_layers_and_stay_after_the_gradient():
    model = built(remat_cases.activity_regularizer, remat.recompute)
    with tf.GradientTape() as tape:
        loss = tf.add_n([loss_of(model(remat_cases.rows(6, 8))), *model.losses])
    before = [float(x) for x in model.losses]
    tape.gradient(loss, model.trainable_weights)

    assert [float(x) for x in model.losses] == before
    assert [len(layer.losses) for layer in model.block] == [1, 2]

    block = model.block
    with tf.GradientTape() as tape:
        loss = loss_of(remat.recompute(chained(block))(remat_cases.rows(6, 8)))
    tape.gradient(loss, model.trainable_weights)

    assert [float(layer.losses[0]) for layer in block] == before[:2]


def test_assignments_may_be_discarded_from_outside():
    model = built(remat_cases.assigning, remat.recompute)
    before = model.get_weights()
    with capture.DiscardedState(), tf.GradientTape() as tape:
        loss = loss_of(model(remat_cases.CASES[remat_cases.assigning]))
    gradients = tape.gradient(loss, model.trainable_weights)

    assert all(g is not None for g in gradients)
    assert_same(model.get_weights(), before, "eager")


def test_persistent_tapes_may_ask_twice():
    x = tf.constant(3.0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, z = remat.recompute(lambda x: (x * x, x * x * x))(x)

    assert float(tape.gradient(y, x)) == 6.0
    assert float(tape.gradient(z, x)) == 27.0
    assert float(tape.gradient([y, z], x)) == 33.0


raw_variable = tf.Variable(1.0)
random_function = tf.function(lambda x: x + tf.random.uniform((2,)))
plain_layer = layers.Dense(2, name="plain")
plain_layer.build((None, 2))
traced_layer = tf.function(plain_layer.call, autograph=False)


def assign_in_branch(x):
    def branch():
        plain_layer.bias.assign([1.0, 1.0])
        return x

    return tf.cond(tf.reduce_sum(x) > 0, branch, lambda: x)


def random_in_branch(x):
    return tf.cond(
        tf.reduce_sum(x) > 0, lambda: tf.random.uniform((1, 2)), lambda: x
    )


CANNOT_REPEAT = {
    "RandomUniform": lambda x: x + tf.random.uniform((2,)),
    "RandomUniform ": random_function,
    "RandomUniform  ": random_in_branch,
    "RandomShuffle": layers.Lambda(tf.random.shuffle),
    "AssignAddVariableOp": lambda x: x + raw_variable.assign_add(1.0),
    "EagerPyFunc": lambda x: tf.py_function(lambda y: y, [x], tf.float32),
    "AssignVariableOp": lambda x: x * tf.Variable(1.0),
    "not built|cannot be traced": lambda x: layers.Dense(2)(x),
    "in a `tf.function` of its own": traced_layer,
}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("found", CANNOT_REPEAT)
def test_what_cannot_run_twice_is_named(found, mode):
    function = CANNOT_REPEAT[found]
    step = in_mode(remat.recompute(function), mode)
    x = tf.ones((1, 2))

    with pytest.raises(remat.NotRecomputable, match=found.strip()):
        step(x)
    reason = remat.why_not_recomputable(function, tf.TensorSpec((1, 2)))
    assert "Received: fn=" in reason


def test_assignments_in_a_branch_are_refused():
    with pytest.raises(ValueError, match="assigns .*bias' in a loop, a branch"):
        in_mode(remat.recompute(assign_in_branch), "graph")(tf.ones((1, 2)))


def test_the_error_passes_through_the_layers_around():
    class Outer(layers.Layer):
        def call(self, x):
            return remat.recompute(tf.random.shuffle)(x)

    with pytest.raises(remat.NotRecomputable, match="RandomShuffle"):
        Outer()(tf.ones((2, 2)))


def test_a_function_that_reads_differently_the_second_time_is_refused():
    other = layers.Dense(2)
    other.build((None, 2))
    runs = []

    def function(x):
        runs.append(None)
        return (plain_layer if len(runs) == 1 else other)(x)

    with tf.GradientTape() as tape:
        y = remat.recompute(function, check=False)(tf.ones((1, 2)))

    with pytest.raises(remat.NotRecomputable, match="when it runs again"):
        tape.gradient(y, plain_layer.trainable_weights)


@pytest.mark.parametrize(
    "around, kind, refused",
    [
        (lambda loop: loop, keras.Variable, None),
        (lambda loop: loop, tf.Variable, "reads the `tf.Variable`"),
        (remat.recompute, keras.Variable, None),
        (remat.recompute, tf.Variable, "reads the `tf.Variable`"),
        # TensorFlow itself has no gradient of a `keras.remat` in a loop.
        (keras.remat, keras.Variable, "is in a loop that `keras.remat`"),
        (keras.remat, tf.Variable, "reads the `tf.Variable`"),
    ],
)
def test_a_loop_around_it_is_right_or_refused(around, kind, refused):
    weight = kind([[0.3, 0.5], [-0.2, 0.4]])

    def loop(body):
        return lambda x: tf.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, body(x)), (0, x)
        )[1]

    def layer(x):
        return tf.tanh(x @ weight)

    def gradients(function):
        x = tf.constant([[1.0, 2.0]])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 2)
        variable = weight if kind is tf.Variable else weight.value
        return tape.gradient(loss, [x, variable])

    again = around(loop(remat.recompute(layer)))
    traced = tf.function(lambda: gradients(again), autograph=False)
    for found, wanted in zip(
        gradients(again), gradients(loop(layer)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, 1e-6)
    if refused is not None:
        with pytest.raises(remat.NotRecomputable, match=refused):
            traced()
        return
    for found, wanted in zip(traced(), gradients(again), strict=True):
        np.testing.assert_allclose(found, wanted, 1e-6)


@pytest.mark.parametrize("case", remat_cases.CASES, ids=lambda c: c.__name__)
def test_layers_of_keras_may_run_twice(case):
    for layer in built(case, plain).block:
        spec = remat_cases.CASES[case]
        assert remat.why_not_recomputable(layer, spec, training=True) is None
        break


def test_keras_and_tensorflow_keep_private_things_where_they_were():
    assert not pywrap_tfe.TFE_Py_TapeSetIsStopped()
    with record.stop_recording():
        assert pywrap_tfe.TFE_Py_TapeSetIsStopped()

    class Look(layers.Layer):
        def call(self, x):
            context = global_state.get_global_attribute("current_call_ctx")
            seen["training"] = context.training
            scope = global_state.get_global_attribute("autocast_scope")
            seen["dtype"] = scope.dtype
            return x

    seen = {}
    Look(dtype="mixed_bfloat16")(tf.ones((1, 1)), training=True)

    assert seen == {"training": True, "dtype": "bfloat16"}
    assert control_flow_util.GraphOrParentsInXlaContext is not None
    with tf.GradientTape() as tape:
        tape.watch(x := tf.ones(1))
        assert record.should_record_backprop([x])
    assert not record.should_record_backprop([x])

    def step():
        seen["xla"] = private_tf.in_xla()
        return tf.while_loop(
            lambda i: i < 1,
            lambda i: seen.update(loop=private_tf.in_xla()) or i + 1,
            [tf.constant(0)],
        )

    for mode in ("graph", "xla"):
        in_mode(step, mode)()
        assert seen["xla"] == seen["loop"] == (mode == "xla")


MIRRORED = """
    import keras
    import tensorflow as tf

    from kmem import remat

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )

    def train(wrap):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.block = keras.Sequential([
                    keras.layers.Dense(4, activity_regularizer="l2"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.5, seed=1),
                    keras.layers.Dense(1),
                ])

            def call(self, x, training=None):
                return wrap(self.block)(x, training=training)

        keras.utils.set_random_seed(0)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = Model()
            model(tf.ones((1, 3)))
            model.compile("adam", "mse")
        x = tf.random.stateless_normal((16, 3), (1, 2))
        model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    pairs = zip(train(lambda fn: fn), train(remat.recompute))
    print(max(abs(one - other).max() for one, other in pairs))
"""


@pytest.mark.slow
def test_replicas_train_as_without(python):
    code, output, errors = python.run(MIRRORED)

    assert code == 0, errors
    assert float(output.splitlines()[-1]) == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("looks", LOOKS_FOR_VARIABLES)
def test_what_looks_for_variables_finds_them(looks, mode):
    keras.utils.set_random_seed(0)
    around, dense, frozen = [
        layers.Dense(3, "tanh", dtype="float64") for _ in range(3)
    ]
    for layer in (around, dense, frozen):
        layer.build((None, 3))
    frozen.trainable = False
    raw = tf.Variable(np.linspace(0.5, 1, 3))
    within = looks(lambda x: frozen(dense(dense(x))) * raw)
    x = tf.random.stateless_normal((4, 3), (1, 2), dtype="float64")
    weights = [*dense.trainable_weights, *around.trainable_weights]

    def found(wrap):
        def step(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = wrap(lambda x: around(within(around(x))))(x)
                loss = tf.reduce_sum(y**2)
            return tape.gradient(loss, [x, raw, *weights])

        return in_mode(step, mode)(x)

    expected = found(plain)
    assert all(np.any(gradient) for gradient in expected)
    again = remat.recompute
    for wrap in (again, lambda function: again(again(function))):
        for one, other in zip(found(wrap), expected, strict=True):
            np.testing.assert_allclose(one, other, 1e-12, 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_of_what_runs_again_by_itself_are_those_of_keras(mode):
    def found(wrap):
        keras.utils.set_random_seed(0)
        block = [layers.Dense(4), layers.Dropout(0.5, seed=1)]
        for layer in block:
            layer.build((None, 4))
        again = keras.remat(lambda x: block[1](block[0](x), training=True))

        def step(x):
            with tf.GradientTape() as tape:
                loss = loss_of(wrap(again)(x))
            return tape.gradient(loss, block[0].trainable_weights)

        step = in_mode(step, mode)
        return [*step(tf.ones((3, 4))), *step(tf.ones((3, 4)))]

    assert_same(found(remat.recompute), found(plain), mode)


def test_nothing_stays_a_variable_that_is_none():
    layer = layers.Dense(2)
    layer.build((None, 2))
    values = []

    def function(x):
        values.append(layer.kernel.value)
        return layer(x)

    with tf.GradientTape() as tape:
        y = remat.recompute(function, check=False)(tf.ones((1, 2)))
    tape.gradient(y, layer.kernel.value)

    assert len(values) == 2
    assert not any(hasattr(value, "handle") for value in values)


class Remembers(layers.Layer):
    """Leaves tensors that it computes on itself, and on a layer within."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, "tanh")
        self.first = None

    def call(self, x):
        y = self.dense(x)
        self.dense.scores = {"all": [y * y, self.name]}
        if self.first is None:
            self.first = tf.exp(y)
            with tf.init_scope():
                self.constant = tf.ones(4)
        self.last = y[0, 0]
        self.last = None
        self.both = [y * self.constant, self.constant]
        self.looped = [None]
        tf.while_loop(lambda i, _: i < 2, self.add, (0, y))
        return y + self.constant

    @property
    def both(self):
        return self.kept

    @both.setter
    def both(self, value):
        self.kept = value

    def add(self, i, y):
        self.looped = [y, i]
        return i + 1, y + 1.0


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_tensors_that_layers_leave_on_themselves_have_a_gradient(mode, nested):
    def found(wrap):
        keras.utils.set_random_seed(0)
        block, dense = Remembers(), layers.Dense(4)
        for layer in (block.dense, dense):
            layer.build((None, 4))
        inner = wrap(block) if nested else block

        def step(x):
            block.first = None
            with tf.GradientTape() as tape:
                y = wrap(lambda x: dense(inner(x)))(x)
                (scores, _), first = block.dense.scores["all"], block.first
                loss = loss_of(y) + loss_of(scores) + loss_of(first)
                loss += loss_of(block.both[0])
            weights = block.trainable_weights + dense.trainable_weights
            gradients = tape.gradient(loss, weights)
            assert block.dense.scores["all"][0] is scores
            assert block.first is first and block.last is None
            assert len(block.looped) == 2
            return gradients

        return in_mode(step, mode)(tf.ones((3, 4)))

    assert_same(found(remat.recompute), found(plain), mode)


def test_what_is_left_on_a_layer_when_it_runs_first_alone_is_refused():
    class Once(layers.Dense):
        scores = None

        def call(self, x):
            y = super().call(x)
            if not hasattr(self, "count"):
                self.count = 1
                self.scores = y
            return y

    layer = Once(4)
    layer.build((None, 4))
    with tf.GradientTape() as tape:
        y = remat.recompute(layer, check=False)(tf.ones((2, 4)))
    with pytest.raises(ValueError, match="sets 'scores' of the layer 'once'"):
        tape.gradient(y, layer.kernel.value)
