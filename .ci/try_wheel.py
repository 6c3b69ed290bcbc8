"""`fit(memory_budget=...)` with an installed wheel, and what it may not need.

`CXX=/bin/false XDG_CACHE_HOME=EMPTY PYTHONPATH=FOLDER python try_wheel.py
FOLDER`: the library must be the wheel's, as no other can be made.
"""

import pathlib
import sys

import keras
import numpy as np

import kmem
from kmem.base import building

folder = pathlib.Path(sys.argv[1]).resolve()
assert pathlib.Path(kmem.__file__).is_relative_to(folder), kmem.__file__
library = building.find_library()
assert library is not None, "the wheel has no library for this TensorFlow"
assert library.is_relative_to(folder), library

inputs = keras.Input((64,))
hidden = keras.layers.Dense(256, activation="relu")(inputs)
model = kmem.wrap(keras.Model(inputs, keras.layers.Dense(1)(hidden)))
model.compile("sgd", "mse")
x = np.ones((512, 64), "float32")
model.fit(x, x[:, :1], batch_size=512, memory_budget="200MB", verbose=0)
report = model.memory_report
assert report.is_measured
print(f"with {library.name}: {report.summary()}")
