"""What one process does while the others wait, and fails with all of them."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from kmem.sharding.engine import Engine
from kmem.sharding.engine import engine
from kmem.sharding.variables import ShardedVariable
from kmem.step.patching import attribute


@contextlib.contextmanager
def together(group: Engine, deed: str) -> Iterator[None]:
    """All processes run a block; if one fails in it, all raise an error.

    Args:
        group: The processes.
        deed: What they do, for the message.

    Raises:
        Exception: As the block raises it, in the process that fails.
        RuntimeError: In the others.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    flags = group.gather(tf.constant([int(error is not None)]), deed)
    if error is not None:
        raise error
    failed = np.flatnonzero(flags)
    if len(failed):
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
    part = path.with_name(f"part-{path.name}")

    def write():
        try:
            model.save_weights(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    group = engine()
    with together(group, "save weights"):
        _alone(group, write, model)


def _alone(group: Engine, deed: Callable, model: keras.Model) -> None:
    """Process 0 does something that reads a model's weights, in any order."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *(optimizer.variables if optimizer else ())]
    # Others are whole in every process.
    sharded = [v for v in found if type(v) is ShardedVariable]
    if group.size == 1:
        deed()
    elif group.rank == 0:
        with contextlib.ExitStack() as stack:
            stack.callback(_announce, group, -1)
            for number, variable in enumerate(sharded):
                read = functools.partial(_read, group, number, variable)
                stack.enter_context(attribute(variable, "_read", read))
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
