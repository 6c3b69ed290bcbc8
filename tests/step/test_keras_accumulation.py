"""Where Keras's own gradient accumulation is wrong, kmem's is right.

Every case trains three ways: on whole batches, in groups with kmem, and in
groups with the optimizer's `gradient_accumulation_steps`, which shows that
the case tells right from wrong. MirroredStrategy, which Keras cannot combine
with it, and clipping under it are in test_mirrored.
"""

import cases
import keras
import numpy as np
import pytest
from keras import layers
from reference import ROUNDING
from reference import relative_error
from reference import train
from reference import whole

import kmem


def weights_error(model, want):
    return relative_error(model.get_weights(), want[: len(model.weights)])


def ema():
    optimizer = keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1
    )
    return cases.dense(optimizer=optimizer), cases.regression()


def uneven_batch():
    """8, 8 and 4 rows in the only group."""
    model, arguments = cases.plain()
    arguments |= {"x": arguments["x"][:18], "y": arguments["y"][:18]}
    return model, arguments


def leftover_group():
    """One batch of 7 that does not fill a group."""
    model, arguments = cases.plain()
    arguments |= {"x": arguments["x"][:28], "y": arguments["y"][:28]}
    return model, arguments


WRONG_IN_KERAS = {
    "learning-rate schedule": cases.schedule,
    "exponential moving average": ema,
    "uneven last micro-batch": uneven_batch,
    "leftover group": leftover_group,
    "sum": cases.reduction("sum"),
    "mean_with_sample_weight": cases.reduction(
        "mean_with_sample_weight", weighted=True
    ),
    "masked sequences": cases.masked(),
    "constraint": cases.constraints,
}


@pytest.mark.parametrize("name", WRONG_IN_KERAS)
def test_kmem_is_right_where_keras_is_wrong(name):
    case = WRONG_IN_KERAS[name]

    def accumulated_by_keras():
        model, arguments = case()
        model.optimizer.gradient_accumulation_steps = 3
        return model, arguments

    want, _ = whole(case, batch_size=21)
    ours, _ = train(case, batch_size=7, gradient_accumulation_steps=3)
    theirs, _ = train(accumulated_by_keras, batch_size=7)

    assert weights_error(ours, want) < ROUNDING
    assert weights_error(theirs, want) > 1e-3


def ids():
    return cases.rng().integers(0, 4, (cases.NUM_ROWS, 1))


def embedding():
    model = keras.Sequential([keras.Input((1,), dtype="int32")])
    model.add(layers.Embedding(4, 3))
    model.add(layers.Flatten())
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    model.layers[0].set_weights([np.arange(12.0).reshape(4, 3) / 10])
    return model, cases.regression() | {"x": ids()}


def one_hot():
    """The same function, whose gradient has no repeated rows."""
    model = keras.Sequential([keras.Input((4,))])
    model.add(layers.Dense(3, use_bias=False))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    model.layers[0].set_weights([np.arange(12.0).reshape(4, 3) / 10])
    x = np.eye(4)[ids()[:, 0]]
    return model, cases.regression() | {"x": x}


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 20, "microbatches": 3},
        {"batch_size": 10, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_repeated_ids_add_up_before_an_adaptive_optimizer_squares_them(options):
    """Keras squares each on its own, even without accumulation."""
    want, _ = whole(one_hot)
    ours, _ = train(embedding, **options)
    theirs, _ = whole(embedding)

    assert weights_error(ours, want) < 1e-12
    assert relative_error(theirs[:1], want[:1]) > 1e-3


@pytest.mark.parametrize("where", [0, 10, 20], ids="row {}".format)
def test_an_overflow_skips_its_whole_group_and_no_other(where):
    def case(overflows):
        def make():
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=4.0
            )
            model = cases.dense(optimizer=optimizer)
            arguments = cases.regression() | {"epochs": 1}
            x, y = arguments["x"][:42].copy(), arguments["y"][:42]
            x[where, 0] = np.inf if overflows else x[where, 0]
            rows = slice(0, 42) if overflows else slice(21, 42)
            return model, arguments | {"x": x[rows], "y": y[rows]}

        return make

    second_group, _ = train(case(overflows=False), batch_size=21)
    ours, _ = train(
        case(overflows=True), batch_size=7, gradient_accumulation_steps=3
    )

    assert weights_error(ours, second_group.get_weights()) < 1e-12
    assert ours.optimizer.iterations.numpy() == 1
    assert ours.optimizer.dynamic_scale.numpy() == 2


def test_the_learning_rate_moves_once_an_update():
    model, arguments = cases.schedule()
    kmem.wrap(model).fit(
        **arguments | {"batch_size": 7, "verbose": 0},
        gradient_accumulation_steps=3,
    )

    # 52 rows make three updates; the first boundary is after the second.
    assert model.optimizer.iterations.numpy() == 3
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
