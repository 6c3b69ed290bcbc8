import cases
import keras
import numpy as np
import pytest
import tensorflow as tf

from kmem.base.private_keras import all_layers
from kmem.fit import undoing
from kmem.step import capture
from kmem.step import metrics


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    model = cases.dense()
    model.optimizer.build(model.trainable_variables)
    return model


def batch():
    arguments = cases.regression()
    return tf.constant(arguments["x"]), tf.constant(arguments["y"])


def test_a_step_hands_over_its_gradients_and_updates_nothing(model):
    before = model.get_weights()

    with capture.capturing(model, model.optimizer) as update:
        model.train_step(batch())

    assert update.variables == model.trainable_variables
    assert [g.shape for g in update.gradients] == [w.shape for w in before]
    assert not update.sums_rows
    assert model.optimizer.iterations.numpy() == 0
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_step_can_end_once_its_loss_is_known(model):
    with pytest.raises(capture.LossReached):
        with capture.capturing(model, model.optimizer, until_loss=True):
            model.train_step(batch())

    assert "apply" not in vars(model.optimizer)
    assert "scale_loss" not in vars(model.optimizer)


def test_an_update_by_any_other_optimizer_is_refused(model):
    other = keras.optimizers.SGD()
    weights = model.trainable_variables
    ones = [tf.ones_like(weight) for weight in weights]

    with capture.capturing(model, model.optimizer):
        with pytest.raises(capture.CannotSplit, match="makes one update, of"):
            other.apply(ones, weights)

    before = model.get_weights()
    other.apply(ones, weights)
    assert all(map(np.any, map(np.subtract, model.get_weights(), before)))


def test_attributes_come_back_after_an_error(model):
    optimizer = model.optimizer

    with pytest.raises(KeyboardInterrupt):
        with capture.capturing(model, keras.optimizers.SGD()):
            raise KeyboardInterrupt

    assert model.optimizer is optimizer


def test_discarded_state_is_read_but_never_written():
    """Also that a variable's value is where `DiscardedState` finds it."""
    layer = keras.layers.Layer()
    variable = layer.add_weight(
        shape=(),
        initializer=keras.initializers.Constant(2.0),
        regularizer=keras.regularizers.L2(0.5),
    )

    with capture.DiscardedState(), tf.GradientTape() as tape:
        layer.add_loss(3.0 * variable)
        loss = sum(layer.losses)
        variable.assign(7.0)
        assert float(variable.value) == 7

    assert float(loss) == 3 * 2 + 0.5 * 2**2
    assert float(tape.gradient(loss, variable.value)) == 3 + 2 * 0.5 * 2
    assert float(variable.value) == 2


def test_a_weight_that_was_assigned_has_the_gradient_of_its_value():
    variable = keras.layers.Layer().add_weight(initializer="ones")
    variable.assign(2.0)

    with capture.DiscardedState(), tf.GradientTape() as tape:
        variable.assign(3.0 * variable)
        loss = variable * variable
        (gradient,) = tape.gradient(loss, [variable])

    assert float(gradient) == 2 * 3 * 2
    assert float(variable.value) == 2


def test_a_mean_of_parts_counts_their_shares(model):
    mean = keras.metrics.Mean()
    model.tracked = mean

    for share, value in ((0.25, 8.0), (0.75, 4.0)):
        with metrics.counting_share(model, share) as results:
            mean.update_state(value)
            result = mean.result()
        assert results[id(result)][0] is result

    assert float(mean.result()) == 5
    assert float(mean.count) == 1
    assert vars(mean).keys().isdisjoint({"update_state", "result"})


def test_layers_are_found_at_any_depth_the_outermost_first(model):
    outer = keras.Sequential([keras.Input((5,)), model])

    names = [layer.name for layer in all_layers(outer)]

    assert names[0] == outer.name
    assert {model.name, *(layer.name for layer in model.layers)} < set(names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_a_reader_reads_values_anew(dtype, shape):
    variable = tf.Variable(tf.zeros(shape, dtype))
    reader = undoing.Reader([variable])
    (first,) = reader.read()
    np.testing.assert_array_equal(first, variable.numpy())
    variable.assign(tf.cast(tf.ones(shape), dtype))
    (second,) = reader.read()
    np.testing.assert_array_equal(second, variable.numpy())
    state = undoing.State(reader, [])
    variable.assign(tf.zeros(shape, dtype))
    state.restore()
    np.testing.assert_array_equal(variable.numpy(), second)
