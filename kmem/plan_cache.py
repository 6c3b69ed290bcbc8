"""Keeps plans: in this process, and on disk in the user's own cache folder.

So a plan is made once for a model, batch and budget, with the same versions,
on the same device. What this module does not do: remove plans from the disk,
where they take about a kilobyte for each of a model's layers.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import re

import keras
import tensorflow as tf

from kmem import cache
from kmem.planning.plan import Plan
from kmem.versions import __version__

_MAX_KEPT = 64
# How far what is in memory besides may differ, as a share of the peak.
_SAME = 0.01
# What has an address is another thing in another process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]")

# By name: what was in memory before, and the plan.
_kept: dict[str, tuple[int, Plan]] = {}


def find(key: tuple, in_use_bytes: int) -> Plan | None:
    """Finds a plan that was kept, by this process or another one.

    Args:
        key: What it was made for; its `repr` is what counts.
        in_use_bytes: What is in memory now, which is part of a plan's peak.
    """
    name = _name(key)
    if name in _kept and _serves(*_kept[name], in_use_bytes):
        return _kept[name][1]
    if _ADDRESS.search(repr(key)):
        return None
    try:
        for folder in (_folder().parent, _folder()):
            cache.check_private(folder)
    except OSError:
        # Nothing was kept, or somebody else could have changed it.
        return None
    for path in sorted(_folder().glob(f"{name}-*.json")):
        try:
            plan = Plan.load(path)
            before = int(path.stem.rpartition("-")[2])
        except (OSError, ValueError):
            # Damaged, or of another version: as if it were not there.
            continue
        if _serves(before, plan, in_use_bytes):
            return plan
    return None


def keep(key: tuple, in_use_bytes: int, plan: Plan) -> None:
    """Keeps a plan; on disk, if the folder is the user's alone.

    Args:
        key: What it was made for.
        in_use_bytes: What was in memory before.
        plan: The plan.
    """
    name = _name(key)
    _kept[name] = in_use_bytes, plan
    while len(_kept) > _MAX_KEPT:
        _kept.pop(next(iter(_kept)))
    if _ADDRESS.search(repr(key)):
        return
    folder = _folder()
    with contextlib.suppress(OSError):
        cache.make_private(folder.parent)
        cache.make_private(folder)
        plan.save(folder / f"{name}-{in_use_bytes}.json")


def _serves(before: int, plan: Plan, now: int) -> bool:
    """Whether a plan is still right for what is in memory."""
    peak = plan.predicted_peak_bytes + now - before
    if abs(now - before) > _SAME * plan.predicted_peak_bytes:
        return False
    return plan.budget_bytes is None or peak <= plan.budget_bytes


def _folder() -> pathlib.Path:
    return cache.folder() / "plans"


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
