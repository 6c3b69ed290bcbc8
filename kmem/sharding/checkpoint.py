"""A checkpoint of several processes: a file of each, and an index of all.

Each process writes its shards, so that nothing has to be gathered; what all of
them have whole is written by process 0. The index says where the numbers of
every variable are, so that any number of processes can load it: each reads the
ranges that it needs. It is written last, and the files of an older checkpoint
are removed after that, so there is always one that is complete. What this
module does not do: copy files between hosts. All processes must see the
folder.
"""

import dataclasses
import json
import math
import pathlib
import secrets

import keras
import numpy as np
import tensorflow as tf

from kmem import precision
from kmem.accumulation import build_optimizer
from kmem.sharding import files
from kmem.sharding.engine import Engine
from kmem.sharding.engine import engine
from kmem.sharding.together import together
from kmem.sharding.variables import ShardedVariable

_INDEX = "index.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive numbers of a variable, and where they are."""

    file: int
    offset_bytes: int
    first: int
    count: int


def save(
    model: keras.Model,
    folder: str | pathlib.Path,
    position: dict[str, int] | None = None,
) -> None:
    """Saves a model, its optimizer and the state of its random numbers.

    All processes have to call it. It returns when the checkpoint is complete;
    until then the one that was in the folder stays.

    Args:
        model: A built model, in shards or whole.
        folder: Where to. All processes must see it.
        position: What `load` is to return.

    Raises:
        OSError: If this process cannot write.
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
    group = engine()
    folder = pathlib.Path(folder)
    variables = _variables(model)
    pieces, sizes = _placed(variables, group.size)
    # No other checkpoint has files of these names.
    token = group.broadcast(tf.constant([secrets.randbits(62)]), "save")
    names = [
        f"{int(token[0]):016x}-{rank}-of-{group.size}.shard"
        for rank in range(group.size)
    ]
    writer = files.Writer(folder / names[group.rank])
    with together(group, "write a checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        with writer:
            for (_, variable), placed in zip(variables, pieces, strict=True):
                for piece in placed:
                    if piece.file == group.rank:
                        writer.write(_own_numbers(variable)[: piece.count])
    checksums = _all_checksums(group, writer.checksums, sizes)
    with together(group, "write a checkpoint's index"):
        if group.rank == 0:
            optimizer = getattr(model, "optimizer", None)
            index = {
                "format": _FORMAT,
                "position": position or {},
                "loss_scale": precision.scale_of(optimizer),
                "files": [
                    {"name": name, "num_bytes": size, "checksums": found}
                    for name, size, found in zip(
                        names, sizes, checksums, strict=True
                    )
                ],
                "variables": [
                    {
                        **_description(kind, variable),
                        "pieces": [dataclasses.astuple(p) for p in placed],
                    }
                    for (kind, variable), placed in zip(
                        variables, pieces, strict=True
                    )
                ],
            }
            files.replace(folder / _INDEX, json.dumps(index))
            for path in [*folder.glob("*.shard"), *folder.glob("*.part")]:
                if path.name not in names:
                    path.unlink(missing_ok=True)


def load(model: keras.Model, folder: str | pathlib.Path) -> dict[str, int]:
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
    with together(group, "load a checkpoint"):
        checkpoint = _Checkpoint(pathlib.Path(folder))
        pairs = checkpoint.matched(model)
        for variable, record in pairs:
            checkpoint.read(record, *_own_range(variable))
    for variable, record in pairs:
        numbers = checkpoint.read(record, *_own_range(variable))
        _assign(variable, numbers, group)
    optimizer = getattr(model, "optimizer", None)
    if checkpoint.loss_scale is not None and optimizer is not None:
        precision.set_scale(optimizer, checkpoint.loss_scale)
    return checkpoint.position


def exists(folder: str | pathlib.Path) -> bool:
    """Whether a process sees a checkpoint; all have to call it."""
    found = (pathlib.Path(folder) / _INDEX).is_file()
    flags = engine().gather(tf.constant([int(found)]), "exists")
    return bool(np.any(flags))


class _Checkpoint:
    """A checkpoint that is being read."""

    def __init__(self, folder: pathlib.Path):
        path = folder / _INDEX
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
            if index["format"] != _FORMAT:
                raise ValueError(f"format={index['format']}")
            self.position: dict[str, int] = index["position"]
            self.loss_scale: list | None = index["loss_scale"]
            self._records = index["variables"]
            self._files = index["files"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "A checkpoint's index must be as this version of kmem writes "
                f"it. Received: {path} ({error})"
            ) from error
        self._folder = folder
        self._readers: dict[int, files.Reader] = {}

    def matched(self, model: keras.Model) -> list:
        """The model's variables, each with the checkpoint's record of it."""
        has_optimizer = any(r["of"] == "optimizer" for r in self._records)
        optimizer = getattr(model, "optimizer", None)
        if has_optimizer and optimizer is not None:
            build_optimizer(optimizer, model.trainable_variables)
        else:
            optimizer = None
        pairs = []
        for kind, owner in (("model", model), ("optimizer", optimizer)):
            if owner is None:
                continue
            records = [r for r in self._records if r["of"] == kind]
            own = [v for of, v in _variables(model) if of == kind]
            if len(own) != len(records):
                raise ValueError(
                    f"The checkpoint must be of a {kind} like this one, with "
                    f"{len(own)} variables. Received: {self._folder} with "
                    f"{len(records)}"
                )
            pairs += zip(own, records, strict=True)
            for variable, record in zip(own, records, strict=True):
                known = _description(kind, variable)
                if any(known[x] != record[x] for x in ("shape", "dtype")):
                    raise ValueError(
                        f"The checkpoint must be of a {kind} like this one, "
                        f"whose {variable.path} is {known['dtype']} of "
                        f"{known['shape']}. Received: {self._folder} with "
                        f"{record['dtype']} of {record['shape']}"
                    )
        return pairs

    def read(self, record: dict, first: int, count: int) -> np.ndarray:
        """Consecutive numbers of a variable, from the files that have them."""
        dtype = tf.as_dtype(record["dtype"])
        found = bytearray()
        for piece in [_Piece(*fields) for fields in record["pieces"]]:
            start = max(first, piece.first)
            stop = min(first + count, piece.first + piece.count)
            if start < stop:
                offset = piece.offset_bytes - piece.first * dtype.size
                found += self._reader(piece.file).read(
                    offset + start * dtype.size, offset + stop * dtype.size
                )
        return np.frombuffer(found, dtype.as_numpy_dtype)

    def _reader(self, number: int) -> files.Reader:
        if number not in self._readers:
            file = self._files[number]
            path = self._folder / file["name"]
            self._readers[number] = files.Reader(
                path, file["num_bytes"], file["checksums"]
            )
        return self._readers[number]


def _variables(model: keras.Model) -> list[tuple[str, keras.Variable]]:
    """What is saved. Metrics begin anew with each epoch."""
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    found = [("model", v) for v in model.variables if id(v) not in metrics]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        found += [("optimizer", v) for v in optimizer.variables]
    return found


def _description(kind: str, variable) -> dict:
    return {
        "of": kind,
        "name": variable.path,
        "shape": list(variable.shape),
        "dtype": keras.backend.standardize_dtype(variable.dtype),
    }


def _placed(variables: list, size: int) -> tuple[list[list[_Piece]], list[int]]:
    """Where each variable's numbers go, and the bytes of each file."""
    sizes = [0] * size
    pieces: list[list[_Piece]] = []
    for _, variable in variables:
        total = math.prod(variable.shape)
        is_cut = isinstance(variable, ShardedVariable)
        length = variable.shard.layout.length if is_cut else total
        pieces.append([])
        for file, first in enumerate(range(0, total, max(length, 1))):
            count = min(length, total - first)
            pieces[-1].append(_Piece(file, sizes[file], first, count))
            sizes[file] += count * tf.as_dtype(variable.dtype).size
    return pieces, sizes


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
        if _is_seed(variable):
            numbers = _as_seed(variable, numbers, group)
    # In the device's memory, not in NumPy's.
    target.assign(tf.raw_ops.DeepCopy(x=numbers))


def _is_seed(variable) -> bool:
    """Whether it is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state"


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
