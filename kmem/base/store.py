"""Keeps what was found out: in this process, and on disk in the user's own
cache folder.

So a model is planned for once, with the same versions, on the same device. What
was found with other things in memory counts those: the peak of a step is that
of all that is there. What this module does not do: remove anything from the
disk, where a plan takes about a kilobyte for each of a model's layers.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import re
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kmem.base import cache
from kmem.base.versions import __version__

_MAX_KEPT = 256
# What has an address is another thing in another process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]")


class Store:
    """Things of one kind.

    Args:
        name: Of their folder.
        save: Writes one to a path; the file appears whole or not at all.
        load: Reads one from a path, or raises an `OSError` or a `ValueError`.
    """

    def __init__(
        self,
        name: str,
        save: Callable[[Any, pathlib.Path], None],
        load: Callable[[pathlib.Path], Any],
    ):
        self.name = name
        self._save = save
        self._load = load
        # By name: what was in memory before, and the thing.
        self._kept: dict[str, tuple[int, Any]] = {}

    def find(self, key: tuple) -> Iterator[tuple[int, Any]]:
        """What was kept, by this process or another one.

        Args:
            key: What it was found for; its `repr` is what counts.

        Returns:
            Pairs of what was in memory before, in bytes, and the thing.
        """
        name = _name(key)
        if name in self._kept:
            yield self._kept[name]
        if _ADDRESS.search(repr(key)):
            return
        folder = self.folder()
        try:
            for each in (folder.parent, folder):
                cache.check_private(each)
        except OSError:
            # Nothing was kept, or somebody else could have changed it.
            return
        for path in sorted(folder.glob(f"{name}-*.json")):
            try:
                entry = int(path.stem.rpartition("-")[2]), self._load(path)
            except (OSError, ValueError):
                # Damaged, or of another version: as if it were not there.
                continue
            yield entry

    def keep(self, key: tuple, in_use_bytes: int, thing: Any) -> None:
        """Keeps a thing; on disk, if the folder is the user's alone.

        Args:
            in_use_bytes: What was in memory before.
        """
        name = _name(key)
        self._kept[name] = in_use_bytes, thing
        while len(self._kept) > _MAX_KEPT:
            self._kept.pop(next(iter(self._kept)))
        if _ADDRESS.search(repr(key)):
            return
        folder = self.folder()
        with contextlib.suppress(OSError):
            cache.make_private(folder.parent)
            cache.make_private(folder)
            self._save(thing, folder / f"{name}-{in_use_bytes}.json")

    def folder(self) -> pathlib.Path:
        """Where things are on disk. It may not exist yet."""
        return cache.folder() / self.name


def _name(key: tuple) -> str:
    parts = __version__, tf.__version__, keras.__version__, _device(), key
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _device() -> tuple:
    threads = tf.config.threading
    gpus = tf.config.list_physical_devices("GPU")
    return (
        platform.machine(),
        os.cpu_count(),
        threads.get_intra_op_parallelism_threads(),
        threads.get_inter_op_parallelism_threads(),
        tuple(
            tf.config.experimental.get_device_details(gpu).get("device_name")
            for gpu in gpus
        ),
    )
