"""Builds a model shard by shard, so that no process ever holds all of it."""

import contextlib
import functools
from collections.abc import Iterator

import keras

from kmem.sharding import variables
from kmem.sharding.engine import engine


class ShardedStrategy:
    """Processes that hold a model together.

    Making one joins the processes that TF_CONFIG names, so it comes before
    TensorFlow's first operation; processes that `kmem launch` has started have
    joined before. A model that is built in its scope is cut as
    it is built: a process holds its shards, and one layer's weight at a time.
    It stays in shards after `fit`. Reading a weight, calling the model and
    saving it take all processes then.

    A model that is made as usual needs no scope: it is cut when `fit` begins,
    and whole again when `fit` ends.

    Attributes:
        num_processes: The number of processes.
        rank: This one's number.

    Example:

    ```python
    import keras

    import kmem

    strategy = kmem.ShardedStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = keras.random.normal((64, 8)), keras.random.normal((64, 1))
    kmem.wrap(model).fit(x, y, sharding="full", verbose=0)
    ```
    """

    def __init__(self):
        self._engine = engine()
        self.num_processes = self._engine.size
        self.rank = self._engine.rank
        self._num_weights = 0

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Within, layers cut their weights as they make them.

        A model that is built later, by its first batch, is cut then, if that
        comes within the scope too.
        """
        add_weight = keras.layers.Layer.add_weight

        @functools.wraps(add_weight)
        def add_shard(layer, *args, **kwargs):
            variable = add_weight(layer, *args, **kwargs)
            if variable.trainable and variables.can_be_cut(variable):
                name = f"weight {self._num_weights}"
                self._num_weights += 1
                variables.shard(variable, self._engine, name)
                variable.shard.stays = True
            return variable

        keras.layers.Layer.add_weight = add_shard
        try:
            yield
        finally:
            keras.layers.Layer.add_weight = add_weight
