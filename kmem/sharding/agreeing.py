"""What processes that train together decide, do and fail in as one.

Processes that plan have to plan alike: a plan says which weights are gathered
again, and all must take part. They measure the same steps, and take the
numbers of one of them. An error of one process is an error in all. And where
one of them reads weights, in any order, the others help it. What this module
does not do: help a process that fails to measure; the others wait for it.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from kmem.base import cache
from kmem.base.patching import attribute
from kmem.options import MemoryOptions
from kmem.options import Sharding
from kmem.sharding.engine import Engine
from kmem.sharding.engine import engine
from kmem.sharding.variables import ShardedVariable


def processes(options: MemoryOptions) -> Engine:
    """Those that train together under some options."""
    return Engine() if options.sharding is None else engine()


def highest(group: Engine, number: int) -> int:
    """The highest of the processes' numbers."""
    own = tf.constant([number], tf.int64)
    return int(group.all_reduce(own, "highest", "Max")[0])


def of_first(group: Engine, numbers: np.ndarray) -> np.ndarray:
    """The numbers of process 0; those of the others have their shape."""
    return group.broadcast(tf.constant(numbers), "numbers").numpy()


def ranks_where(group: Engine, is_so: bool, name: str) -> list[int]:
    """The processes where something is so; all have to call it."""
    flags = group.gather(tf.constant([int(is_so)]), name)
    return np.flatnonzero(flags).tolist()


@contextlib.contextmanager
def jointly(group: Engine, deed: str) -> Iterator[None]:
    """All processes run a block; if one fails in it, all raise an error, the
    others a `RuntimeError` that says what they do."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = ranks_where(group, error is not None, deed)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            f"All processes must {deed} together. Received: an error in "
            f"rank {failed[0]}, whose message says more"
        )


def save_weights(model: keras.Model, path: str | pathlib.Path) -> None:
    """Saves whole weights in one file, as `model.save_weights` does.

    All processes have to call it. Process 0 writes the file, and the others
    help it to gather one weight after another: nobody holds all of them. The
    file needs no kmem to be loaded.

    Args:
        model: A built model, in shards or whole.
        path: The file, whose name ends in `.weights.h5`.

    Raises:
        OSError: If process 0 cannot write it.
        ValueError: If the name ends otherwise.
        RuntimeError: If another process could not.

    Example:

    ```python
    import keras

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    kmem.distributed.save_weights(model, "model.weights.h5")
    model.load_weights("model.weights.h5")
    ```
    """
    path = pathlib.Path(path)

    def write():
        with cache.appearing(path, f"part-{path.name}") as part:
            model.save_weights(part)

    group = engine()
    with jointly(group, "save weights"):
        _alone(group, write, model)


def _alone(group: Engine, deed: Callable, model: keras.Model) -> None:
    """Process 0 does something that reads a model's weights, in any order."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer else ())]
    # Others are whole in every process.
    sharded = [v for v in variables if type(v) is ShardedVariable]
    if group.rank == 0:
        with contextlib.ExitStack() as stack:
            stack.callback(_announce, group, -1)
            for number, variable in enumerate(sharded):
                read = functools.partial(_read, group, number, variable)
                stack.enter_context(attribute(variable, "read_whole", read))
            deed()
    else:
        while (number := _announce(group, -1)) >= 0:
            sharded[number].shard.read_full()


def _read(group: Engine, number: int, variable: ShardedVariable) -> tf.Tensor:
    _announce(group, number)
    return variable.shard.read_full()


def _announce(group: Engine, number: int) -> int:
    """What process 0 reads next; -1 at the end."""
    return int(group.broadcast(tf.constant([number]), "reads next")[0])


def in_processes(options: MemoryOptions) -> MemoryOptions:
    """Options that shard a budgeted training, if several processes train and
    that is allowed: by the stage that sends least."""
    allowed = "sharding" in options.allow and options.sharding is None
    if not allowed or engine().size == 1:
        return options
    return dataclasses.replace(options, sharding=Sharding("gradients"))
