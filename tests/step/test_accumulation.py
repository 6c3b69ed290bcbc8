"""Groups of batches in a training: its ends, files, callbacks and errors.

Batches of 7 in groups of 3 are batches of 21, and the last group of an epoch
has 10 rows.
"""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from reference import relative_error
from reference import state
from reference import train
from reference import whole

import kmem
from kmem.step.accumulation import Updater

GROUPED = {"batch_size": 7, "gradient_accumulation_steps": 3}


def test_validation_sees_the_last_group_applied():
    def case():
        model, arguments = cases.plain()
        data = (arguments["x"], arguments["y"])
        return model, arguments | {"validation_data": data}

    _, want = whole(case, batch_size=21)
    _, groups = train(case, **GROUPED)

    np.testing.assert_allclose(groups["val_loss"], want["val_loss"], rtol=1e-12)


@pytest.mark.parametrize("batch_size, num_traces", [(13, 1), (20, 2)])
def test_an_update_is_traced_again_for_the_last_group_if_there_is_one(
    batch_size, num_traces, monkeypatch
):
    """Of 52 rows 4 batches of 13 make a group, and 3 of 20 do not."""
    traced = []
    apply_mean = Updater._apply_mean

    def apply(updater, *args):
        traced.append(updater)
        apply_mean(updater, *args)

    monkeypatch.setattr(Updater, "_apply_mean", apply)
    options = {"batch_size": batch_size, "gradient_accumulation_steps": 4}
    train(cases.plain, **options)

    # The first in the step itself.
    assert len(traced) == num_traces


def test_checkpoints_hold_the_last_group(tmp_path):
    path = tmp_path / "end_of_epoch.weights.h5"
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    want, _ = whole(cases.plain, "float32", batch_size=21)
    train(cases.plain, "float32", **GROUPED, callbacks=[checkpoint])

    model, _ = cases.plain()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)

    assert relative_error(state(model), want) < 1e-6


def test_an_interrupted_run_that_is_resumed_equals_an_uninterrupted_one(
    tmp_path,
):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 4:
                raise KeyboardInterrupt

    def case():
        model, arguments = cases.dense(), cases.regression()
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        return model, arguments | {"callbacks": [backup], "epochs": 4}

    def interrupted():
        model, arguments = case()
        arguments["callbacks"].append(Interrupt())
        return model, arguments

    want, _ = train(cases.plain, "float32", **GROUPED, epochs=4)
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, "float32", **GROUPED)
    resumed, _ = train(case, "float32", **GROUPED)

    assert relative_error(state(resumed), state(want)) == 0


def test_nothing_of_an_unfinished_group_leaks_into_the_next_fit():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    def case():
        model, arguments = cases.plain()
        with pytest.raises(KeyboardInterrupt):
            kmem.wrap(model).fit(
                **arguments | GROUPED, verbose=0, callbacks=[Stop()]
            )
        return model, arguments

    want, _ = train(cases.plain, **GROUPED)
    got, _ = train(case, **GROUPED)

    assert relative_error(state(got), state(want)) < 1e-12


def test_train_on_batch_counts_its_calls():
    model, arguments = cases.plain()
    kmem.wrap(model).memory_options = kmem.MemoryOptions(
        gradient_accumulation_steps=2
    )

    iterations = []
    for start in range(0, 50, 10):
        rows = slice(start, start + 10)
        model.train_on_batch(arguments["x"][rows], arguments["y"][rows])
        iterations.append(int(model.optimizer.iterations.numpy()))

    assert iterations == [0, 1, 1, 2, 2]


def test_accumulating_twice_is_refused():
    model, arguments = cases.optimizer("adam")()
    model.optimizer.gradient_accumulation_steps = 2

    with pytest.raises(ValueError, match="by kmem or by the optimizer"):
        kmem.wrap(model).fit(**arguments | GROUPED, verbose=0)


class Counted(keras.losses.Loss):
    """A mean of squares that notes how often it is computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def call(self, y_true, y_pred):
        with tf.control_dependencies([tf.py_function(self._note, [], [])]):
            return keras.ops.mean(keras.ops.square(y_pred - y_true), axis=-1)

    def _note(self):
        self.count += 1


# Python that a loss calls is not called to try it.
@pytest.mark.filterwarnings("ignore:Losses that compare the examples")
def test_recomputation_takes_no_further_pass_for_a_masked_loss():
    ids = np.arange(40).reshape(8, 5) % 9
    ids[:, 3:] = 0

    def num_passes(**options):
        inputs = keras.Input((5,), dtype="int32")
        x = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        x = keras.layers.Dense(8, "tanh")(x)
        model = kmem.wrap(keras.Model(inputs, keras.layers.Dense(1)(x)))
        loss = Counted()
        model.compile("sgd", loss)
        # Not those of the search for a plan.
        callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: vars(loss).update(count=0)
        )
        model.fit(
            ids,
            np.ones((8, 5, 1)),
            batch_size=2,
            epochs=2,
            gradient_accumulation_steps=2,
            callbacks=[callback],
            verbose=0,
            **options,
        )
        return loss.count

    assert num_passes(remat="auto") == num_passes()
