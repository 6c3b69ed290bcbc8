"""What Keras's `fit` does works for programs, and what cannot be is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from multilevel_cases import MODES
from multilevel_cases import Reweighting
from multilevel_cases import Vector
from multilevel_cases import relative_error
from multilevel_cases import train
from multilevel_cases import two_levels

import kmem
from kmem.multilevel import ConjugateGradient
from kmem.multilevel import FiniteDifference
from kmem.multilevel import Identity
from kmem.multilevel import Level
from kmem.multilevel import Program
from kmem.multilevel import Unrolled

EMPTY = tf.data.Dataset.from_tensors(tf.ones([2], "float64")).take(0)


def program(stopped_shares=False, **options):
    """A small data reweighting, with layers that have a state."""
    block = [
        layers.BatchNormalization(dtype="float64"),
        layers.Dropout(0.3, dtype="float64", seed=1),
    ]
    case = Reweighting(block=block, stopped_shares=stopped_shares)
    made = Program(
        [
            Level(
                case.classifier,
                case.weighted_loss,
                keras.optimizers.SGD(0.1, momentum=0.9),
                unroll_steps=2,
            ),
            Level(case.reweight, case.balanced_loss, keras.optimizers.Adam()),
        ],
        **options,
    )
    random = np.random.default_rng(2)

    def data(rows):
        dataset = tf.data.Dataset.from_tensor_slices(case._batch(random, rows))
        return dataset.batch(8, drop_remainder=True)

    return made, {"classifier": data(48), "reweight": data(24)}, case


class Interruption(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def state(made):
    optimizers = [level.optimizer for level in made.levels]
    values = [*made.variables, *(v for o in optimizers for v in o.variables)]
    return [v.numpy() for v in values]


def test_an_interrupted_program_goes_on_as_if_it_had_not_been(tmp_path):
    whole, data, _ = program()
    whole.fit(data, epochs=4, verbose=0)
    first, data, _ = program()
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.fit(
            data, epochs=4, verbose=0, callbacks=[backup, Interruption(2)]
        )

    second, data, _ = program()
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    history = second.fit(data, epochs=4, verbose=0, callbacks=[backup])

    assert history.epoch == [2, 3]
    for one, other in zip(state(second), state(whole), strict=True):
        np.testing.assert_array_equal(one, other)


def test_callbacks_and_validation_are_those_of_keras(tmp_path):
    made, data, case = program()
    case.classifier.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    path = tmp_path / "best.weights.h5"

    history = made.fit(
        data,
        epochs=9,
        verbose=0,
        steps_per_epoch=2,
        validation_data=data["reweight"],
        validation_model=case.classifier,
        callbacks=[
            keras.callbacks.EarlyStopping(
                "val_accuracy", mode="max", baseline=2.0
            ),
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        ],
    )

    assert len(history.epoch) == 2
    assert history.history.keys() == {
        "loss",
        "classifier_loss",
        "reweight_loss",
        "val_accuracy",
        "val_loss",
    }
    assert "reweight_loss" in (tmp_path / "log.csv").read_text()
    other, data, _ = program()
    other.prepare(data)
    other.load_weights(path)
    for one, wanted in zip(state(other), state(made), strict=True):
        np.testing.assert_array_equal(one, wanted)


def test_each_validation_is_a_mean_of_its_own():
    made, data, case = program()
    case.classifier.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    expected = []

    def evaluate(epoch, logs):
        expected.append(
            case.classifier.evaluate(
                data["reweight"], return_dict=True, verbose=0
            )
        )

    history = made.fit(
        data,
        epochs=3,
        verbose=0,
        validation_data=data["reweight"],
        validation_model=case.classifier,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=evaluate)],
    )

    for key in ("loss", "accuracy"):
        found = history.history[f"val_{key}"]
        assert found == [logs[key] for logs in expected]


def test_the_summary_shows_levels_edges_and_peaks():
    made, data, _ = program()
    lines = []

    made.summary(data, print_fn=lines.append)

    _, lower, upper = lines[0].splitlines()
    assert lower.startswith("classifier") and "Identity()" in lower
    assert lower.endswith("reads reweight")
    assert upper.startswith("reweight") and upper.endswith("reads classifier")


def test_the_summary_measures_unrolled_steps_in_the_middle_of_a_training():
    lower = {"hypergradient": Unrolled()}
    expected, logs = train(case=two_levels(lower=lower), epochs=1)
    case = two_levels(lower=lower)
    lines = []

    def summary(batch, logs):
        if batch == 1 and not lines:
            case.program.summary(print_fn=lines.append)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=summary)
    weights, history = train(case=case, epochs=1, callbacks=[callback])

    assert "B  Unrolled(steps=None, budget=None)" in lines[0]
    assert history == logs
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "case, edges",
    [
        # Without the classifier's way to the weights, nothing reaches them.
        ({}, [("reweight", "classifier")]),
        ({"stopped_shares": True}, "infer"),
    ],
)
def test_a_level_that_no_gradient_reaches_is_named_before_anything_is_trained(
    case, edges, mode
):
    made, data, case = program(edges=edges, **case)
    made.compile(**MODES[mode])
    before = case.classifier.get_weights()

    with pytest.raises(ValueError, match="reaches level 'reweight'.*paths re"):
        made.fit(data, verbose=0)

    for one, other in zip(case.classifier.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_variables_that_no_gradient_reaches_are_named_once():
    inputs = keras.Input((3,))
    outputs = [layers.Dense(2, name=name)(inputs) for name in ("used", "left")]
    model = keras.Model(inputs, outputs)
    made = Program(
        [Level(model, lambda x: ops.mean(model(x)[0]), "sgd", name="one")]
    )
    data = tf.data.Dataset.from_tensor_slices(np.ones((4, 3), "float32"))
    before = model.get_weights()

    with pytest.warns(UserWarning, match="No gradient reaches some") as warned:
        made.fit({"one": data.batch(2)}, epochs=2, verbose=0)

    (text,) = [str(each.message) for each in warned]
    assert "of level 'one'" in text and "left/kernel, left/bias. Look" in text
    same = map(np.array_equal, model.get_weights(), before)
    assert list(same) == [False, False, True, True]


@pytest.mark.parametrize("number", [0, 1])
def test_the_loss_is_the_top_ones_and_no_number_once_any_is_none(number):
    factors = [Vector([1.0], f"factor_{i}") for i in range(2)]
    losses = [lambda x, f=f: ops.sum(x * f.entries) for f in factors]
    levels = [
        Level(model, loss, keras.optimizers.SGD(0.0))
        for model, loss in zip(factors, losses, strict=True)
    ]
    made = Program(levels)
    numbers = np.array([[1.0], [1.0], [1.0]]), np.array([[2.0], [2.0], [2.0]])
    data = dict(zip(["factor_0", "factor_1"], numbers, strict=True))

    def fit(**options):
        sets = {
            name: tf.data.Dataset.from_tensor_slices(each)
            for name, each in data.items()
        }
        return made.fit(sets, verbose=0, **options).history

    history = fit()
    assert history["loss"] == history["factor_1_loss"] == [2.0]
    data[f"factor_{number}"][1] = np.nan
    seen = []
    counting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    with pytest.warns(UserWarning, match=f"level 'factor_{number}' is not fin"):
        fit(callbacks=[keras.callbacks.TerminateOnNaN(), counting])
    assert seen == [0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_what_a_loss_returns_beside_itself_is_in_the_logs(mode):
    factor = Vector([2.0], "factor")

    def loss(x):
        return ops.sum(factor.entries) * ops.mean(x), {
            "mean": ops.mean(x),
            "seven": 7,
        }

    made = Program(
        [Level(factor, loss, keras.optimizers.SGD(0.0), microbatches=2)]
    )
    made.compile(**MODES[mode])
    rows = tf.data.Dataset.from_tensor_slices(np.arange(8.0)).batch(4)

    history = made.fit({"factor": rows}, verbose=0, epochs=2).history

    means = {"factor_mean": 3.5, "factor_loss": 7.0, "factor_seven": 7.0}
    assert history == {
        key: [value] * 2 for key, value in ({"loss": 7.0} | means).items()
    }


def test_levels_in_the_wrong_order_are_named():
    case = Reweighting()
    levels = [
        Level(case.reweight, case.balanced_loss, "sgd"),
        Level(case.classifier, case.weighted_loss, "sgd"),
    ]
    data = tf.data.Dataset.from_tensors(case.batches[0])

    with pytest.raises(ValueError, match="level 'reweight'. Levels come lowe"):
        Program(levels).fit({"reweight": data, "classifier": data}, verbose=0)


def test_regularizers_and_a_first_fit_alone_are_those_of_keras():
    def model(name):
        keras.utils.set_random_seed(0)
        dense = layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([keras.Input((4,)), dense], name=name)

    random = np.random.default_rng(0)
    x = random.normal(size=(16, 4)).astype("float32")
    y = random.normal(size=(16, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    plain, lower, upper = (
        model("plain"),
        model("lower"),
        Vector([1.0], "upper", "float32"),
    )
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain_logs = plain.fit(data, epochs=2, shuffle=False, verbose=0).history

    def squares(x, y):
        return ops.mean(ops.square(lower(x) - y)) * upper.entries[0]

    level = Level(lower, squares, keras.optimizers.SGD(0.1), microbatches=2)
    alone = Program([level])
    alone_logs = alone.fit({"lower": data}, epochs=2, verbose=0).history

    np.testing.assert_allclose(alone_logs["loss"], plain_logs["loss"], 1e-5)
    for one, other in zip(lower.weights, plain.weights, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    # The same level goes on with others.
    top = Level(upper, lambda x, y: ops.mean(lower(x) ** 2), "sgd")
    both = Program([level, top])
    both.fit({"lower": data, "upper": data}, verbose=0)
    assert int(level.optimizer.iterations) == 6


def test_a_program_without_a_validation_model_cannot_be_evaluated():
    made, data, case = program()

    with pytest.raises(ValueError, match=r"`program.levels\[0\].model`"):
        made.evaluate(data["reweight"])


def level(name="level", loss=None, start=(1.0,), **options):
    model = Vector(start, name)

    def own(x):
        return ops.mean(x) * ops.sum(model.entries)

    return Level(model, loss or own, "sgd", **options)


def fit(levels, data=None, validation=None, **options):
    ones = tf.data.Dataset.from_tensors(tf.ones([2], "float64"))
    made = Program(levels, **options)
    made.fit(
        data or {each.name: ones for each in levels},
        validation_data=None if validation is None else ones,
        validation_model=validation,
        verbose=0,
    )


@pytest.mark.parametrize(
    "sharding, compiled, message",
    [
        (kmem.Sharding("full", reduce_dtype="bfloat16"), False, "no other"),
        ("gradients", True, "and XLA cannot"),
    ],
)
def test_what_cannot_be_in_shards_is_refused(sharding, compiled, message):
    ones = tf.data.Dataset.from_tensors(tf.ones([2], "float64"))
    made = Program([level("one")])
    made.compile(jit_compile=compiled)

    with pytest.raises(ValueError, match=message):
        made.fit({"one": ones}, verbose=0, sharding=sharding)


def test_models_that_were_built_in_shards_are_refused():
    with kmem.ShardedStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    with pytest.raises(ValueError, match="must be built outside of"):
        Program([Level(model, ops.mean, "sgd")])


@pytest.mark.parametrize(
    "stage, hypergradient",
    [
        ("full", ConjugateGradient(1, damping=0.1, warm_start=True)),
        ("gradients", FiniteDifference()),
    ],
)
def test_shards_change_no_number(stage, hypergradient):
    lower = {
        "hypergradient": hypergradient,
        "microbatches": 2,
        "roll_back": True,
    }
    upper = {"clipnorm": 1e-2}
    plain, cut = (
        two_levels(batch=7, lower=lower, upper=upper) for _ in range(2)
    )
    want, logs = train(case=plain, epochs=1)
    got, found = train(case=cut, epochs=1, sharding=stage)

    assert max(map(relative_error, got, want)) < 1e-12
    for key in logs:
        np.testing.assert_allclose(found[key], logs[key], 1e-6)


def frozen():
    found = level("frozen")
    found.model.trainable = False
    return found


def shared():
    one, other = level("one"), level("other")
    other.model = one.model
    return [one, other]


def keeping():
    """A loss with a function of its own, which keeps what it saw first."""
    model = Vector([1.0], "kept")
    total = tf.function(lambda x: ops.mean(x) * ops.sum(model.entries))
    return Level(model, lambda x: total(x), "sgd")


@pytest.mark.parametrize(
    "run, message",
    [
        (lambda: fit([frozen()]), "trainable variables.*level 'frozen'"),
        (
            lambda: fit([level("rows", loss=lambda x: x)]),
            r"return a scalar.*level 'rows' with a loss of shape \(2,\)",
        ),
        (
            lambda: fit([level("two", loss=lambda x: {"a": ops.mean(x)})]),
            "add up several losses.*level 'two' with a loss of dict",
        ),
        (
            lambda: fit([level("pair", loss=lambda x: (ops.mean(x), [1]))]),
            "must be a dictionary of scalars.*level 'pair' with ",
        ),
        (
            lambda: fit(
                [level("pair", loss=lambda x: (ops.mean(x), {"a": x}))]
            ),
            r"level 'pair' with a a of shape \(2,\)",
        ),
        (
            lambda: fit([level("none", loss=lambda x: None)]),
            "return a scalar.*level 'none' with a loss of NoneType",
        ),
        (lambda: level("one", loss={"a": "mse"}), r"such as `loss\(x, y\)`"),
        (
            lambda: level("one", hypergradient="darts"),
            r"must be an object: `Identity\(\)`.*hypergradient='darts'",
        ),
        (
            lambda: level("one", hypergradient=Identity),
            r"must be an object: `Identity\(\)`.*Identity'>",
        ),
        (lambda: fit({level("one")}), "must be a list of levels, lowest first"),
        (
            lambda: fit([level("one"), level("one")]),
            "Levels must have different names",
        ),
        (lambda: fit(shared()), "in the levels 'one' and 'other'"),
        (
            lambda: fit(
                [level("one"), level("other")], edges=[("one", "other")]
            ),
            r"`edges` must be pairs.*Received: \('one', 'other'\)",
        ),
        (
            lambda: fit([level("one")], {"two": None}),
            r"for each level, \['one'\]. Received: \['two'\]",
        ),
        (
            lambda: fit([level("one")], {"one": None, 2: None}),
            r"for each level, \['one'\]. Received: \['one', 2\]",
        ),
        (
            lambda: fit([level("one")], {"one": EMPTY}),
            "at least one batch. Received: none for level 'one'",
        ),
        (
            lambda: fit([level("one")], {"one": np.ones(3)}),
            "Received: ndarray for level 'one'",
        ),
        (
            lambda: level("one", unroll_steps=0),
            "`unroll_steps` must be a positive integer",
        ),
        (lambda: Level(None, print, "sgd"), "`model` must be a `keras.Model`"),
        (lambda: level("one", loss=3), "`loss` must be a function"),
        (
            lambda: Program([level("one")]).summary(),
            "`summary` needs the data of the levels",
        ),
        (
            lambda: fit([level("one")], validation=Vector([1.0], "plain")),
            "`validation_model` must be a compiled model",
        ),
        (
            lambda: keeping().gradient(tf.ones([2], "float64")),
            "must not call a `tf.function`.*'kept/entries'",
        ),
    ],
)
def test_what_cannot_be_is_refused(run, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run()


def test_tensorboard_gets_the_losses_of_all_levels(tmp_path):
    pytest.importorskip("tensorboard", reason="it writes the event files")
    levels = [level("one"), level("other")]
    ones = tf.data.Dataset.from_tensors(tf.ones([2], "float64"))
    callback = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)

    Program(levels).fit(
        {"one": ones, "other": ones}, verbose=0, callbacks=[callback]
    )

    (path,) = tmp_path.glob("train/*")
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert {"epoch_one_loss", "epoch_other_loss"} <= tags
