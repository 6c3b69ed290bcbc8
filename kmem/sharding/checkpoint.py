"""A checkpoint of several processes: a file of each, and an index of all.

Each process writes its shards, so that nothing has to be gathered; what all of
them have whole is written by process 0. The index says where the numbers of
every variable are, so that any number of processes can load it: each reads the
ranges that it needs. It is written last, and the files of an older checkpoint
are removed after that, so there is always one that is complete. What this
module does not do: copy files between hosts. All processes must see the
folder.
"""

import math
import pathlib
import re
import secrets
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kmem import precision
from kmem.base import private_keras
from kmem.sharding import files
from kmem.sharding.agreeing import jointly
from kmem.sharding.agreeing import ranks_where
from kmem.sharding.engine import Engine
from kmem.sharding.engine import engine
from kmem.sharding.variables import ShardedVariable
from kmem.step.accumulation import build_optimizer
from kmem.step.capture import optimizer_config
from kmem.step.capture import optimizers

# The files of this module. A checkpoint's folder may have others.
_OWN = re.compile(r"kmem-[0-9a-f]{16}-\d+-of-\d+\.(shard|part)")


class _Piece(NamedTuple):
    """Consecutive numbers of a variable, and where they are."""

    file: int
    offset_bytes: int
    first: int
    count: int


def save(
    model: keras.Model,
    folder: str | pathlib.Path,
    position: dict[str, Any] | None = None,
) -> None:
    """Saves a model, its optimizer and the state of its random numbers.

    All processes have to call it. It returns when the checkpoint is complete;
    until then the one that was in the folder stays.

    Args:
        model: A built model, in shards or whole.
        folder: Where to. All processes must see it.
        position: What `load` is to return: a dictionary that JSON can hold.

    Raises:
        OSError: If this process cannot write.
        ValueError: If JSON cannot hold the position, the folder has an
            `index.json` of something else, or the model has optimizers
            besides `model.optimizer`.
        RuntimeError: If another one cannot.

    Example:

    ```python
    import keras

    import kmem

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    kmem.distributed.save(model, "checkpoint", {"epoch": 3})
    kmem.distributed.load(model, "checkpoint")  # {"epoch": 3}
    ```
    """
    check_optimizers(model)
    group = engine()
    folder = pathlib.Path(folder)
    placed, sizes = _placed(model, group.size)
    # No other checkpoint has files of these names.
    token = group.broadcast(tf.constant([secrets.randbits(62)]), "save")
    names = [
        f"kmem-{int(token[0]):016x}-{rank}-of-{group.size}.shard"
        for rank in range(group.size)
    ]
    writer = files.Writer(folder / names[group.rank])
    with jointly(group, "write a checkpoint"):
        position = files.plain({} if position is None else position)
        folder.mkdir(parents=True, exist_ok=True)
        files.check_is_free(folder)
        with writer:
            for _, variable, pieces in placed:
                for piece in pieces:
                    if piece.file == group.rank:
                        writer.write(_own_numbers(variable)[: piece.count])
    checksums = _all_checksums(group, writer.checksums, sizes)
    with jointly(group, "write a checkpoint's index"):
        if group.rank == 0:
            optimizer = getattr(model, "optimizer", None)
            content = {
                "position": position,
                "optimizer": _kind(optimizer),
                "loss_scale": precision.scale_of(optimizer),
                "files": [
                    {"name": name, "num_bytes": size, "checksums": sums}
                    for name, size, sums in zip(
                        names, sizes, checksums, strict=True
                    )
                ],
                "variables": [
                    {**_description(kind, variable), "pieces": pieces}
                    for kind, variable, pieces in placed
                ],
            }
            files.write_index(folder, content)
            for path in folder.iterdir():
                if _OWN.fullmatch(path.name) and path.name not in names:
                    path.unlink(missing_ok=True)


def load(model: keras.Model, folder: str | pathlib.Path) -> dict[str, Any]:
    """Loads what `save` has saved, from any number of processes into any.

    All processes have to call it. Each reads and checks what it needs before
    any of them changes the model.

    Args:
        model: A built model of the same form. It may be uncompiled, and is
            then loaded without the optimizer.
        folder: Where from.

    Returns:
        The position that was saved with it.

    Raises:
        OSError: If this process cannot read.
        ValueError: If a file is missing, truncated or altered, or belongs to
            another model. The message names it.
        RuntimeError: If another process cannot load its part.
    """
    group = engine()
    with jointly(group, "load a checkpoint"):
        checkpoint = _Checkpoint(pathlib.Path(folder))
        for variable, record in checkpoint.matched(model):
            checkpoint.read(record, *_own_range(variable))
    optimizer = getattr(model, "optimizer", None)
    if checkpoint.has_optimizer and optimizer is not None:
        build_optimizer(optimizer, model.trainable_variables)
    for variable, record in checkpoint.matched(model):
        numbers = checkpoint.read(record, *_own_range(variable))
        _assign(variable, numbers, group)
    if checkpoint.loss_scale is not None and optimizer is not None:
        precision.set_scale(optimizer, checkpoint.loss_scale)
    return checkpoint.position


def exists(folder: str | pathlib.Path) -> bool:
    """Whether a process sees a checkpoint; all have to call it."""
    is_here = files.has_index(pathlib.Path(folder))
    return bool(ranks_where(engine(), is_here, "exists"))


class _Checkpoint:
    """A checkpoint that is being read."""

    def __init__(self, folder: pathlib.Path):
        content = files.read_index(folder)
        self.position: dict[str, Any] = content["position"]
        self.loss_scale: list | None = content["loss_scale"]
        self._optimizer: str | None = content["optimizer"]
        self._records = content["variables"]
        self._folder = folder
        self._readers = [
            files.Reader(
                folder / file["name"], file["num_bytes"], file["checksums"]
            )
            for file in content["files"]
        ]

    @property
    def has_optimizer(self) -> bool:
        return any(record["of"] == "optimizer" for record in self._records)

    def matched(self, model: keras.Model) -> list:
        """The model's variables, each with the checkpoint's record of it."""
        optimizer = getattr(model, "optimizer", None)
        own = [v for kind, v in _variables(model) if kind == "model"]
        pairs = self._matched("model", own)
        if self.has_optimizer and optimizer is not None:
            if self._optimizer != _kind(optimizer):
                raise self._another(
                    "optimizer", _kind(optimizer), self._optimizer
                )
            own = _slots(optimizer, model.trainable_variables)
            pairs += self._matched("optimizer", own)
        return pairs

    def _matched(self, kind: str, own: list) -> list:
        own_records = [_description(kind, variable) for variable in own]
        records = [r for r in self._records if r["of"] == kind]
        if len(own_records) != len(records):
            raise self._another(
                kind,
                f"with {len(own_records)} variables",
                f"with {len(records)}",
            )
        for each, record in zip(own_records, records, strict=True):
            if any(each[x] != record[x] for x in ("shape", "dtype")):
                raise self._another(
                    kind,
                    f"whose {each['name']} is {each['dtype']} of "
                    f"{each['shape']}",
                    f"with {record['dtype']} of {record['shape']}",
                )
        names = [[each["name"] for each in x] for x in (own_records, records)]
        for name, other, *alike in zip(
            *names, *map(files.forms, names), strict=True
        ):
            if alike[0] != alike[1]:
                raise self._another(
                    kind, f"with {name} in this place", f"with {other}"
                )
        return list(zip(own, records, strict=True))

    def _another(self, kind: str, expected, received) -> ValueError:
        return ValueError(
            f"The checkpoint must be of a {kind} like this one, {expected}: "
            f"make the {kind} as it was when it was saved. Received: "
            f"{self._folder} {received}"
        )

    def read(self, record: dict, first: int, count: int) -> np.ndarray:
        """Consecutive numbers of a variable, from the files that have them."""
        dtype = tf.as_dtype(record["dtype"])
        contents = bytearray()
        for piece in [_Piece(*fields) for fields in record["pieces"]]:
            start = max(first, piece.first)
            stop = min(first + count, piece.first + piece.count)
            if start < stop:
                offset = piece.offset_bytes - piece.first * dtype.size
                contents += self._readers[piece.file].read(
                    offset + start * dtype.size, offset + stop * dtype.size
                )
        return np.frombuffer(contents, dtype.as_numpy_dtype)


def check_optimizers(model: keras.Model) -> None:
    """Refuses a model that has other optimizers than its own.

    Which variables each of them trains is known to its `train_step` alone, so
    another process could not make their variables before it loads them.
    """
    own = getattr(model, "optimizer", None)
    known = {id(own), id(getattr(own, "inner_optimizer", None))}
    others = [each for each in optimizers(model) if id(each) not in known]
    if others:
        names = ", ".join(type(each).__name__ for each in others)
        raise ValueError(
            "A sharded checkpoint holds no optimizer but `model.optimizer`: "
            "the state of the others would be lost. Save the model with "
            "`keras.callbacks.BackupAndRestore`, or its other optimizers by "
            f"yourself. Received: {names} as well"
        )


def _variables(model: keras.Model) -> list[tuple[str, keras.Variable]]:
    """What is saved. Metrics begin anew with each epoch."""
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    saved = [("model", v) for v in model.variables if id(v) not in metrics]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        saved += [("optimizer", v) for v in optimizer.variables]
    return saved


def _kind(optimizer) -> str | None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return None if inner is None else type(inner).__name__


def _slots(optimizer, weights: list) -> list[keras.Variable]:
    """An optimizer's variables; of one that is not built, some like them."""
    if optimizer.built:
        return optimizer.variables
    config = optimizer_config(optimizer)
    # Where they have no memory.
    with tf.Graph().as_default():
        alike = []
        for weight in weights:
            alike.append(
                keras.Variable(
                    "zeros", tuple(weight.shape), weight.dtype, name=weight.name
                )
            )
            private_keras.set_path(alike[-1], weight.path)
        like = type(optimizer).from_config(config)
        build_optimizer(like, alike)
    return like.variables


def _description(kind: str, variable) -> dict:
    name = variable.path
    return {
        "of": kind,
        # The optimizer itself may have any name.
        "name": name.partition("/")[2] if kind == "optimizer" else name,
        "shape": list(variable.shape),
        "dtype": keras.backend.standardize_dtype(variable.dtype),
    }


def _placed(model: keras.Model, size: int) -> tuple[list[tuple], list[int]]:
    """What is saved, each with where its numbers go, and each file's bytes."""
    sizes = [0] * size
    placed = []
    for kind, variable in _variables(model):
        total = math.prod(variable.shape)
        is_cut = isinstance(variable, ShardedVariable)
        length = variable.shard.layout.length if is_cut else total
        pieces = []
        for file, first in enumerate(range(0, total, max(length, 1))):
            count = min(length, total - first)
            pieces.append(_Piece(file, sizes[file], first, count))
            sizes[file] += count * tf.as_dtype(variable.dtype).size
        placed.append((kind, variable, pieces))
    return placed, sizes


def _own_range(variable) -> tuple[int, int]:
    """The first number that this process holds, and how many it does."""
    total = math.prod(variable.shape)
    if type(variable) is not ShardedVariable:
        return 0, total
    length = variable.shard.layout.length
    first = min(variable.shard.rank * length, total)
    return first, min(length, total - first)


def _own_numbers(variable) -> np.ndarray:
    """What this process saves of a variable, and perhaps padding."""
    if isinstance(variable, ShardedVariable):
        return variable.numbers.numpy()
    return np.asarray(variable.value).reshape(-1)


def _assign(variable, numbers: np.ndarray, group: Engine) -> None:
    if type(variable) is ShardedVariable:
        target = variable.shard.variable
        length = variable.shard.layout.length
        numbers = np.pad(numbers, (0, length - len(numbers)))
    else:
        target = variable
        numbers = numbers.reshape(variable.shape)
        # Of a `keras.random.SeedGenerator`.
        if variable.name == "seed_generator_state":
            numbers = _as_seed(variable, numbers, group)
    # In the device's memory, not in NumPy's.
    target.assign(tf.raw_ops.DeepCopy(x=numbers))


def _as_seed(variable, numbers: np.ndarray, group: Engine) -> np.ndarray:
    """A seed, as far from that of process 0 as this process's was."""
    own = tf.convert_to_tensor(variable.value)
    leading = group.broadcast(own, "seed of a checkpoint")
    distance = np.asarray(own - leading)[0]
    return np.stack([numbers[0] + distance, numbers[1]])


def _all_checksums(
    group: Engine, own: list[int], sizes: list[int]
) -> list[list[int]]:
    counts = [-(-size // files.BLOCK_BYTES) for size in sizes]
    padded = own + [0] * (max(counts, default=0) - len(own))
    rows = group.gather(tf.constant(padded, tf.int64), "checksums").numpy()
    return [
        row[:count].tolist() for row, count in zip(rows, counts, strict=True)
    ]
