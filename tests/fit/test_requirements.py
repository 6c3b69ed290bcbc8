"""What cannot be planned for is refused before anything is made."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers

import kmem


@pytest.mark.parametrize("option", ["remat", "memory_budget"])
@pytest.mark.parametrize(
    "make", [scipy.sparse.csr_matrix, tf.sparse.from_dense]
)
def test_sparse_batches_have_no_plan(make, option):
    model = keras.Sequential(
        [keras.Input((4,), sparse=True), layers.Dense(3), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    x = np.eye(4, dtype="float32")

    with pytest.raises(ValueError, match="give `fit` dense tensors"):
        kmem.wrap(model).fit(make(x), x[:, :1], verbose=0, **{option: 0.5})

    assert model.memory_report is None
