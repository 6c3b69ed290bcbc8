"""Uses in which a model is copied, compiled anew or trained elsewhere."""

import copy
import pickle
import threading

import keras

from uses.arrays import compiled
from uses.arrays import dense
from uses.arrays import regression


def clone(trainer):
    first = dense()
    trainer.fit(first, *regression())
    model = keras.models.clone_model(first)
    model.set_weights(first.get_weights())
    compiled(model)
    trainer.fit(model, *regression())
    return model


def deepcopy(trainer):
    first = dense()
    trainer.fit(first, *regression())
    weights = first.get_weights()
    model = copy.deepcopy(first)
    trainer.fit(model, *regression())
    for now, before in zip(first.get_weights(), weights, strict=True):
        assert (now == before).all(), "the copy's `fit` trained the first one"
    return model


def pickled(trainer):
    first = dense()
    trainer.fit(first, *regression())
    model = pickle.loads(pickle.dumps(first))
    trainer.fit(model, *regression())
    return model


def saved_and_loaded(trainer):
    first = dense()
    trainer.fit(first, *regression())
    path = trainer.folder / "model.keras"
    first.save(path)
    model = keras.models.load_model(path)
    trainer.fit(model, *regression())
    return model


def compiled_again(trainer):
    model = dense()
    trainer.fit(model, *regression())
    compiled(model, loss="mae", metrics=["mse"])
    trainer.fit(model, *regression())
    return model


def trained_in_stages(trainer):
    """Frozen at first, then fine-tuned."""
    model = dense()
    model.layers[0].trainable = False
    compiled(model)
    trainer.fit(model, *regression())
    model.layers[0].trainable = True
    compiled(model, optimizer=keras.optimizers.Adam(1e-3))
    trainer.fit(model, *regression())
    return model


def plainly_between(trainer):
    """Options in one call, none in the next, and again."""
    model = dense()
    trainer.fit(model, *regression())
    model.fit(*regression(), batch_size=20, shuffle=False, verbose=0)
    trainer.fit(model, *regression())
    return model


def trained_in_a_thread(trainer):
    model = dense()
    errors = []

    def work():
        try:
            trainer.fit(model, *regression())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return model


USES = [
    *(clone, deepcopy, pickled, saved_and_loaded, compiled_again),
    *(trained_in_stages, plainly_between, trained_in_a_thread),
]
