import keras
import numpy as np
import pytest
from keras.src.losses import loss as keras_loss

from kmem.step.loss_terms import LossTerms
from kmem.step.loss_terms import recording

Y = np.array([[1.0], [2.0], [4.0]])
WEIGHT = np.array([1.0, 0.0, 3.0])


def masked(values, mask):
    predicted = keras.ops.convert_to_tensor(values)
    predicted._keras_mask = keras.ops.convert_to_tensor(mask)
    return predicted


@pytest.mark.parametrize(
    ("reduction", "sample_weight", "mask", "denominators"),
    [
        ("sum_over_batch_size", None, None, {"rows": None}),
        ("mean", WEIGHT, None, {"rows": None}),
        ("sum", WEIGHT, None, {"sum": None}),
        (None, None, None, {"rows": None}),
        ("mean_with_sample_weight", None, None, {"rows": None}),
        ("mean_with_sample_weight", WEIGHT, None, {"counted_0": 4}),
        ("mean", None, [True, False, True], {"counted_0": 2}),
        ("mean", WEIGHT, [True, False, True], {"counted_0": 2}),
        ("mean_with_sample_weight", WEIGHT, [1, 1, 0], {"counted_0": 1}),
        ("sum", None, [True, False, True], {"sum": None}),
    ],
)
def test_a_loss_is_divided_by_what_its_reduction_says(
    reduction, sample_weight, mask, denominators
):
    predicted = np.zeros((3, 1)) if mask is None else masked(0.0 * Y, mask)
    terms = LossTerms()
    with recording(terms):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        loss(Y, predicted, sample_weight)

    found = {
        group: None if value is None else int(value)
        for group, value in terms.denominators.items()
    }
    assert found == denominators


def test_losses_of_one_mask_share_a_group():
    mask = keras.ops.convert_to_tensor([True, False, True])
    first, second = masked(Y, mask), masked(2 * Y, mask)
    second._keras_mask = first._keras_mask
    loss = keras.losses.MeanSquaredError()

    terms = LossTerms()
    with recording(terms):
        loss(Y, first)
        loss(Y, second)
        loss(Y, masked(Y, [True, True, True]))

    assert list(terms.denominators) == ["counted_0", "counted_1"]


def test_parts_weighted_by_their_rows_make_the_whole_loss():
    mask = np.array([True, True, False])
    loss = keras.losses.MeanSquaredError()
    whole = loss(Y, masked(0 * Y, mask))

    total = 0.0
    for rows in (slice(0, 1), slice(1, 3)):
        share = keras.ops.convert_to_tensor((rows.stop - rows.start) / 3)
        terms = LossTerms(share, totals={"counted_0": 2.0})
        with recording(terms):
            total += share * loss(Y[rows], masked(0 * Y[rows], mask[rows]))

    assert float(total) == pytest.approx(float(whole), rel=1e-6)


def test_a_dropped_group_counts_as_zero():
    with recording(LossTerms(dropped="sum")):
        assert float(keras.losses.MeanSquaredError("sum")(Y, 0 * Y)) == 0
        assert float(keras.losses.MeanSquaredError()(Y, 0 * Y)) == 7


def test_keras_reduces_its_losses_itself_outside_of_a_recording():
    """Also that `Loss` finds the function where it is replaced."""
    own = keras_loss.reduce_weighted_values

    with recording(LossTerms()):
        assert keras_loss.reduce_weighted_values is not own
        with recording(LossTerms()):
            pass
        assert keras_loss.reduce_weighted_values is not own

    assert keras_loss.reduce_weighted_values is own
