"""Uses that differ in where the batches come from."""

import keras
import pandas
import tensorflow as tf

from uses.arrays import NUM_ROWS
from uses.arrays import dense
from uses.arrays import regression
from uses.arrays import weights


def batches_of(size, arrays):
    for first in range(0, NUM_ROWS, size):
        yield tuple(array[first : first + size] for array in arrays)


class Batches(keras.utils.PyDataset):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self._batches = list(batches_of(size, regression()))

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def py_dataset_with_workers(trainer):
    model = dense()
    trainer.fit(model, Batches(trainer.batch_size, workers=2))
    return model


def generator(trainer):
    def forever():
        while True:
            yield from batches_of(trainer.batch_size, regression())

    model = dense()
    steps = -(-NUM_ROWS // trainer.batch_size)
    trainer.fit(model, forever(), steps_per_epoch=steps)
    return model


def tf_dataset(trainer):
    model = dense()
    data = tf.data.Dataset.from_tensor_slices((*regression(), weights()))
    # In another order each time that it is asked for.
    data = data.shuffle(NUM_ROWS, seed=1).batch(trainer.batch_size)
    trainer.fit(model, data.prefetch(1))
    return model


def data_frame(trainer):
    model = dense()
    x, y = map(pandas.DataFrame, regression())
    given = {"sample_weight": pandas.Series(weights())}
    given |= {"batch_size": trainer.batch_size, "validation_split": 0.2}
    trainer.fit(model, x, y, **given)
    return model


def infinite_tf_dataset(trainer):
    model = dense()
    data = tf.data.Dataset.from_tensor_slices(regression()).take(40)
    data = data.batch(trainer.batch_size, drop_remainder=True).repeat()
    trainer.fit(model, data, steps_per_epoch=40 // trainer.batch_size)
    return model


def tensors(trainer):
    model = dense()
    x, y = map(tf.constant, regression())
    trainer.fit(model, x, y, batch_size=trainer.batch_size)
    return model


def one_batch_for_all(trainer):
    model = dense()
    x, y = regression()
    size = len(x) * trainer.batch_size // 20
    trainer.fit(model, x, y, batch_size=size)
    return model


USES = [
    *(py_dataset_with_workers, generator, tf_dataset, infinite_tf_dataset),
    data_frame,
    *(tensors, one_batch_for_all),
]
