"""Uses that differ in how the model is trained."""

import keras
import tensorflow as tf
from keras import layers

from uses.arrays import compiled
from uses.arrays import dense
from uses.arrays import integers
from uses.arrays import regression
from uses.arrays import weights


class Own(keras.Model):
    """Two layers, for steps of its subclasses' own."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(7, "tanh")
        self.out = layers.Dense(3)
        self.build((None, 5))

    def build(self, shape):
        self.hidden.build(shape)
        self.out.build((None, 7))

    def call(self, x):
        return self.out(self.hidden(x))


class WithCompiledLoss(Own):
    """A step of its own, which may change its gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = self.changed(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def changed(self, gradients):
        return gradients


def overridden_fit(trainer):
    class Fits(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    model = compiled(Fits([keras.Input((5,)), layers.Dense(3)]))
    trainer.fit(model, *regression())
    return model


def fit_with_an_argument_of_its_own(trainer):
    class Fits(keras.Sequential):
        def fit(self, x, y, rate=1.0, **kwargs):
            self.optimizer.learning_rate = rate
            return super().fit(x, y, **kwargs)

    model = compiled(Fits([keras.Input((5,)), layers.Dense(3)]))
    trainer.fit(model, *regression(), rate=0.02)
    return model


def train_step_with_the_compiled_loss(trainer):
    model = compiled(WithCompiledLoss())
    trainer.fit(model, *regression())
    return model


def train_step_without_a_compiled_loss(trainer):
    class Steps(Own):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                rows = keras.losses.mean_squared_error(
                    y, self(x, training=True)
                )
                loss = keras.ops.mean(rows)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    model = Steps()
    model.compile(keras.optimizers.Adam(1e-2))
    trainer.fit(model, *regression())
    return model


def train_step_with_two_optimizers(trainer):
    class Steps(Own):
        def train_step(self, data):
            x, y = data
            logs = super().train_step(data)
            with tf.GradientTape() as tape:
                rows = keras.losses.mean_absolute_error(y, self(x))
                loss = keras.ops.mean(rows)
            variables = self.out.trainable_variables
            self.second.apply(tape.gradient(loss, variables), variables)
            return logs

    model = compiled(Steps())
    model.second = keras.optimizers.SGD(1e-2)
    trainer.fit(model, *regression())
    return model


def train_step_that_calls_two_models(trainer):
    class Autoencoder(keras.Model):
        """Without a `call`, as a VAE or a GAN often is."""

        def __init__(self, encoder, decoder):
            super().__init__()
            self.encoder, self.decoder = encoder, decoder

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                code = 2 * self.encoder(x, training=True)
                outputs = self.decoder(code, training=True)
                rows = keras.losses.mean_squared_error(y, outputs)
                loss = keras.ops.mean(rows)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    hidden = [layers.Dense(7, "tanh"), layers.Dense(4)]
    encoder = keras.Sequential([keras.Input((5,)), *hidden])
    decoder = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model = compiled(Autoencoder(encoder, decoder), loss=None)
    trainer.fit(model, *regression())
    return model


def train_step_that_clips(trainer):
    class Clips(WithCompiledLoss):
        def changed(self, gradients):
            return tf.clip_by_global_norm(gradients, 0.1)[0]

    model = compiled(Clips())
    trainer.fit(model, *regression())
    return model


def train_step_that_averages_weights(trainer):
    class Steps(Own):
        def build(self, shape):
            super().build(shape)
            self.teacher = Own()
            self.teacher.trainable = False

        def train_step(self, data):
            logs = super().train_step(data)
            averages, own = self.teacher.weights, self.trainable_variables
            for average, weight in zip(averages, own, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
            return logs

    model = compiled(Steps())
    trainer.fit(model, *regression())
    return model


def loss_that_compares_examples(trainer):
    model = dense(loss=keras.losses.Dice())
    x, y = regression()
    trainer.fit(model, x, abs(y))
    return model


def own_compute_loss(trainer):
    class Losses(Own):
        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            size = keras.ops.mean(keras.ops.abs(y_pred))
            return loss + 0.1 * keras.ops.cast(size, loss.dtype)

    model = compiled(Losses())
    trainer.fit(model, *regression())
    return model


def loss_as_a_function(trainer):
    def loss(y, prediction):
        return keras.ops.mean(keras.ops.abs(y - prediction) ** 1.5, axis=-1)

    model = dense(loss=loss)
    trainer.fit(model, *regression())
    return model


def class_weight(trainer):
    model = dense(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, _ = regression()
    trainer.fit(model, x, integers(3), class_weight={0: 0.2, 1: 1.0, 2: 5.0})
    return model


def sample_weight(trainer):
    model = dense(metrics=["mae"], weighted_metrics=["mae"])
    trainer.fit(model, *regression(), sample_weight=weights())
    return model


def validation_data(trainer):
    x, y = regression()
    model = dense(metrics=["mae"])
    trainer.fit(model, x, y, validation_data=(x[::2], y[::2]))
    return model


def validation_split(trainer):
    model = dense(metrics=["mae"])
    trainer.fit(model, *regression(), validation_split=12 / 52)
    return model


def early_stopping(trainer):
    x, y = regression()
    stop = keras.callbacks.EarlyStopping(
        "val_loss", patience=1, restore_best_weights=True
    )
    model = dense(optimizer=keras.optimizers.SGD(1.2))
    data = (x[:9] * 3, y[:9])
    trainer.fit(model, x, y, validation_data=data, callbacks=stop, epochs=5)
    return model


def model_checkpoint(trainer):
    path = str(trainer.folder / "best.keras")
    save = keras.callbacks.ModelCheckpoint(
        path, monitor="loss", save_best_only=True
    )
    trainer.fit(dense(), *regression(), callbacks=[save])
    return keras.models.load_model(path)


def backup_and_restore(trainer):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup = str(trainer.folder / "backup")
    restore = keras.callbacks.BackupAndRestore
    try:
        interrupted = [restore(backup), Interrupt()]
        trainer.fit(dense(), *regression(), callbacks=interrupted, epochs=3)
    except KeyboardInterrupt:
        pass
    model = dense()
    trainer.fit(model, *regression(), callbacks=[restore(backup)], epochs=3)
    return model


def learning_rate_schedule(trainer):
    rate = keras.optimizers.schedules.PiecewiseConstantDecay(
        [2, 4], [0.1, 0.01, 0.05]
    )
    model = dense(optimizer=keras.optimizers.SGD(rate))
    trainer.fit(model, *regression())
    return model


def learning_rate_callbacks(trainer):
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.CSVLogger(str(trainer.folder / "log.csv")),
    ]
    model = dense(optimizer=keras.optimizers.SGD(0.1))
    trainer.fit(model, *regression(), callbacks=callbacks, epochs=3)
    return model


def list_of_callbacks_kept(trainer):
    """The same list of callbacks for two calls of `fit`."""
    callbacks = [keras.callbacks.LambdaCallback()]
    model = dense()
    trainer.fit(model, *regression(), callbacks=callbacks)
    trainer.fit(model, *regression(), callbacks=callbacks)
    assert len(callbacks) == 1
    return model


def callback_list(trainer):
    model = dense()
    callbacks = keras.callbacks.CallbackList(
        [keras.callbacks.LambdaCallback()], add_history=True, model=model
    )
    before = list(callbacks.callbacks)
    trainer.fit(model, *regression(), callbacks=callbacks)
    assert callbacks.callbacks == before
    return model


def tensorboard(trainer):
    board = keras.callbacks.TensorBoard(
        str(trainer.folder / "logs"), histogram_freq=1, update_freq="batch"
    )
    model = dense()
    trainer.fit(model, *regression(), callbacks=[board])
    return model


def train_on_batch(trainer):
    model = dense()
    trainer.train_on_batch(model, *(a[:40] for a in regression()))
    return model


def jit_compile(trainer):
    model = dense(jit_compile=True)
    trainer.fit(model, *regression())
    return model


def run_eagerly(trainer):
    model = dense(run_eagerly=True)
    trainer.fit(model, *regression())
    return model


def steps_per_execution(trainer):
    model = dense(steps_per_execution=2)
    trainer.fit(model, *regression())
    return model


def interrupted_by_a_callback(trainer):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 2:
                raise RuntimeError("stopped")

    model = dense()
    try:
        trainer.fit(model, *regression(), callbacks=[Stop()])
    except RuntimeError as error:
        if str(error) != "stopped":
            raise
    model.fit(*regression(), batch_size=20, shuffle=False, verbose=0)
    return model


USES = [
    *(overridden_fit, fit_with_an_argument_of_its_own),
    *(train_step_with_the_compiled_loss, train_step_without_a_compiled_loss),
    *(train_step_with_two_optimizers, train_step_that_clips),
    *(train_step_that_averages_weights, train_step_that_calls_two_models),
    *(own_compute_loss, loss_as_a_function, loss_that_compares_examples),
    *(class_weight, sample_weight, validation_data, validation_split),
    *(early_stopping, model_checkpoint, backup_and_restore),
    *(learning_rate_schedule, learning_rate_callbacks),
    *(list_of_callbacks_kept, callback_list, tensorboard, train_on_batch),
    *(jit_compile, run_eagerly, steps_per_execution),
    interrupted_by_a_callback,
]
