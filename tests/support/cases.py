"""Models, and arguments of `fit`, on which averaging parts goes wrong easily.

Each case is a function that returns a compiled model and the arguments of its
`fit`. All have 52 rows; in batches of 20 the last one is smaller, and none
splits into three equal parts.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from versions import IS_KERAS_3_12

NUM_ROWS = 52


def rng():
    return np.random.default_rng(7)


def regression():
    floatx = keras.config.floatx()
    x = rng().normal(size=(NUM_ROWS, 5)).astype(floatx)
    y = rng().normal(size=(NUM_ROWS, 3)).astype(floatx)
    return {"x": x, "y": y}


def weights():
    """Sample weights, all zero in a stretch."""
    values = rng().uniform(0.1, 3, NUM_ROWS).astype(keras.config.floatx())
    values[3:9] = 0
    return values


def dense(**compile_arguments):
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(7, activation="tanh"),
            layers.Dense(3),
        ]
    )
    arguments = {"optimizer": keras.optimizers.Adam(1e-2), "loss": "mse"}
    model.compile(
        **(arguments | {"metrics": ["mae", "mse"]} | compile_arguments)
    )
    return model


def plain():
    return dense(), regression()


def sample_weight():
    model = dense(weighted_metrics=["mae"])
    return model, regression() | {"sample_weight": weights()}


def class_weight():
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(3, activation="softmax")]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["acc"])
    labels = rng().integers(0, 3, NUM_ROWS)
    return model, regression() | {
        "y": labels,
        "class_weight": {0: 0.2, 1: 1.0, 2: 5.0},
    }


def reduction(name, weighted=False, regularized=False):
    def case():
        model = dense(loss=keras.losses.MeanSquaredError(reduction=name))
        if regularized:
            model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
            model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
        arguments = regression()
        if weighted:
            arguments["sample_weight"] = weights()
        return model, arguments

    return case


def sequences():
    """Token ids with 1 to 8 valid steps a row, and a target a step."""
    ids = rng().integers(1, 11, (NUM_ROWS, 8))
    lengths = rng().integers(1, 9, NUM_ROWS)
    ids[np.arange(8)[None] >= lengths[:, None]] = 0
    targets = rng().normal(size=(NUM_ROWS, 8, 2))
    return ids, targets.astype(keras.config.floatx())


def masked(name="sum_over_batch_size", weighted=False, regularized=False):
    def case():
        ids, targets = sequences()
        regularizer = keras.regularizers.L2(0.1) if regularized else None
        model = keras.Sequential(
            [
                keras.Input((8,), dtype="int32"),
                layers.Embedding(11, 4, mask_zero=True),
                layers.SimpleRNN(5, return_sequences=True),
                layers.Dense(2, kernel_regularizer=regularizer),
            ]
        )
        loss = keras.losses.MeanSquaredError(reduction=name)
        rate = 0.001 if name == "sum" else 0.5
        model.compile(keras.optimizers.SGD(rate), loss)
        arguments = {"x": ids, "y": targets}
        if weighted:
            arguments["sample_weight"] = np.tile(weights()[:, None], 8)
        return model, arguments

    return case


def ignored_class():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=2
    )
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.5), loss)
    return model, regression() | {"y": rng().integers(0, 3, NUM_ROWS)}


def several_outputs():
    """A masked, a summed and a weighted loss, with a penalty besides."""
    ids, targets = sequences()
    floatx = keras.config.floatx()
    inputs = keras.Input((8,), dtype="int32")
    embedded = layers.Embedding(11, 4, mask_zero=True)(inputs)
    steps = layers.Dense(5, activity_regularizer="l2")(embedded)
    summary = layers.GlobalAveragePooling1D()(steps)
    outputs = {
        "steps": layers.Dense(2, name="steps")(steps),
        "last": layers.Dense(1, name="last")(summary),
        "other": layers.Dense(
            3, name="other", kernel_regularizer=keras.regularizers.L2(0.1)
        )(summary),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.05),
        loss={
            "steps": keras.losses.MeanSquaredError(),
            "last": keras.losses.MeanAbsoluteError(reduction="sum"),
            "other": keras.losses.MeanSquaredError(
                reduction="mean_with_sample_weight"
            ),
        },
        loss_weights={"steps": 1.0, "last": 0.1, "other": 0.7},
        metrics={"other": ["mae"]},
    )
    y = {
        "steps": targets,
        "last": rng().normal(size=(NUM_ROWS, 1)).astype(floatx),
        "other": rng().normal(size=(NUM_ROWS, 3)).astype(floatx),
    }
    arguments = {"x": ids, "y": y}
    arguments["sample_weight"] = {
        "steps": np.ones((NUM_ROWS, 8), floatx),
        "last": np.ones(NUM_ROWS, floatx),
        "other": weights(),
    }
    return model, arguments


def two_losses():
    """Two outputs as a list, each with a mean of its own kind."""
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    model = keras.Model(
        inputs, [layers.Dense(3)(hidden), layers.Dense(1)(hidden)]
    )
    model.compile(
        keras.optimizers.Adam(1e-2), ["mse", "mae"], loss_weights=[1.0, 0.3]
    )
    arguments = regression()
    return model, arguments | {"y": [arguments["y"], arguments["y"][:, :1]]}


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
        return x


def penalties(reduction="sum_over_batch_size"):
    def case():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(
                    7,
                    activation="tanh",
                    kernel_regularizer=keras.regularizers.L2(0.1),
                    activity_regularizer=keras.regularizers.L2(0.1),
                ),
                Penalty(),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model.compile(keras.optimizers.Adam(1e-2), loss)
        return model, regression()

    return case


def schedule():
    rate = keras.optimizers.schedules.PiecewiseConstantDecay(
        [2, 4], [0.1, 0.01, 0.5]
    )
    return dense(optimizer=keras.optimizers.SGD(rate)), regression()


def muon():
    if IS_KERAS_3_12:
        pytest.skip("Keras 3.12 cannot train with its own Muon on TensorFlow")
    return keras.optimizers.Muon(1e-2)


def schedule_free():
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("this Keras has no ScheduleFreeAdamW")
    return keras.optimizers.ScheduleFreeAdamW(1e-2)


OPTIMIZERS = {
    "sgd_momentum": lambda: keras.optimizers.SGD(
        1e-2, momentum=0.9, nesterov=True
    ),
    "adam": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(1e-2),
    "nadam": lambda: keras.optimizers.Nadam(1e-2),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2),
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "lamb": lambda: keras.optimizers.Lamb(1e-2),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "muon": muon,
    "schedule_free": schedule_free,
    "clipnorm": lambda: keras.optimizers.SGD(1e-1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(1e-1, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(1e-1, clipvalue=0.01),
    "ema": lambda: keras.optimizers.SGD(
        1e-1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "static_loss_scale": lambda: keras.optimizers.Adam(
        1e-2, loss_scale_factor=8.0
    ),
    "dynamic_loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2), dynamic_growth_steps=2
    ),
}


def optimizer(name):
    def case():
        model = dense(optimizer=OPTIMIZERS[name]())
        # Ahead of the trace, in which Keras would lose what ScheduleFreeAdamW
        # assigns to its momentum.
        model.optimizer.build(model.trainable_variables)
        return model, regression()

    return case


def constraints():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(7, kernel_constraint=keras.constraints.MaxNorm(0.5)),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.3), "mse")
    return model, regression()


class OwnStep(keras.Model):
    """A `train_step` and metrics as in Keras's guide, never built ahead."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(7, activation="tanh")
        self.out = layers.Dense(3)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = keras.losses.mean_squared_error(y, predicted)
            loss = keras.ops.mean(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, predicted)
        results = {m.name: m.result() for m in self.metrics}
        return results | {"raw": loss}


def own_step():
    model = OwnStep()
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    return model, regression()


class OwnLoss(keras.Model):
    """A `compute_loss` that uses a masked Keras loss of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(11, 4, mask_zero=True)
        self.recurrent = layers.SimpleRNN(5, return_sequences=True)
        self.out = layers.Dense(2)

    def call(self, x):
        return self.out(self.recurrent(self.embedding(x)))

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        terms = keras.losses.MeanSquaredError()(y, y_pred)
        return terms + 0.1 * keras.ops.mean(keras.ops.abs(y_pred))


def own_loss():
    ids, targets = sequences()
    model = OwnLoss()
    model.compile(optimizer=keras.optimizers.SGD(0.5))
    return model, {"x": ids, "y": targets}


def several_inputs():
    """Inputs by name, one of which is not used."""
    first, second = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    joined = layers.Concatenate()([first, second])
    model = keras.Model({"a": first, "b": second}, layers.Dense(3)(joined))
    model.compile("sgd", "mse")
    arguments = regression()
    other = rng().normal(size=(NUM_ROWS, 2)).astype(keras.config.floatx())
    return model, arguments | {"x": {"a": arguments["x"], "b": other}}


def frozen():
    model = dense()
    model.layers[0].trainable = False
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model, regression()


REDUCTIONS = ["sum_over_batch_size", "sum", "mean_with_sample_weight", None]

ALL = {
    "plain": plain,
    "sample_weight": sample_weight,
    "class_weight": class_weight,
    "ignored_class": ignored_class,
    "several_outputs": several_outputs,
    "two_losses": two_losses,
    "penalties": penalties(),
    "penalties_and_sum": penalties("sum"),
    "regularized_sum": reduction("sum", regularized=True),
    "schedule": schedule,
    "constraints": constraints,
    "own_train_step": own_step,
    "own_compute_loss": own_loss,
    "several_inputs": several_inputs,
    "frozen_layer": frozen,
    "masked_regularized": masked(regularized=True),
}
for _name in REDUCTIONS:
    ALL[f"{_name}"] = reduction(_name)
    ALL[f"{_name}_weighted"] = reduction(_name, weighted=True)
    if _name is not None:
        ALL[f"masked_{_name}"] = masked(_name)
        ALL[f"masked_{_name}_weighted"] = masked(_name, weighted=True)
for _name in OPTIMIZERS:
    ALL[_name] = optimizer(_name)

# One of each mechanism: rows, a counted denominator, a sum beside a mean, a
# step of the user's own.
FEW = ["plain", "masked_regularized", "several_outputs", "own_train_step"]
# Modes besides a graph. XLA takes seconds for each, so few at every run.
MODES = [("eager", name) for name in FEW] + [
    pytest.param("xla", name, marks=marks)
    for name, marks in {
        "own_train_step": (),
        "masked_regularized": pytest.mark.exhaustive,
        "plain": pytest.mark.exhaustive,
        "several_outputs": pytest.mark.exhaustive,
    }.items()
]
