"""Chooses a step within a memory budget, and remembers the choice on disk.

The same program need not search again: a choice is found by all that it was
made from, which is the model, its batch, the options, the budget, the device
and the versions. It is tried again before it trains, so one that no longer
fits costs a dry run, and not the budget. What this does not do: search
(search.py).
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import pathlib
from typing import Any

import keras
import tensorflow as tf

from kmem import memory
from kmem.base import cache
from kmem.base.versions import __version__
from kmem.budget import planner
from kmem.budget import tuning
from kmem.budget.estimate import largest_tensors
from kmem.budget.menu import Menu
from kmem.budget.report import Choice
from kmem.budget.report import ImpossibleBudget
from kmem.budget.report import MemoryReport
from kmem.budget.search import Search
from kmem.fit.mechanisms import with_chunks
from kmem.fit.session import Session
from kmem.fit.undoing import Changes
from kmem.options import DTR
from kmem.options import MemoryOptions
from kmem.options import MixedPrecision
from kmem.options import Sharding
from kmem.planning.plan import from_json
from kmem.sharding import agreeing
from kmem.sharding import refusals
from kmem.step import batches

_PREFIX = "choice-"


def choose(
    model: keras.Model,
    options: MemoryOptions,
    batch: Any,
    budget_bytes: int,
    reserved_bytes: int = 0,
    verbose: int = 0,
    spec: Any = None,
) -> tuple[Session, MemoryReport]:
    """Takes what an earlier run chose for a budget, or looks for the fastest.

    The model and its state stay as they are.

    Args:
        model: A compiled model.
        options: Those that hold anyway, and what may be chosen besides.
        batch: What `train_step` gets, as `tf.TensorSpec`s.
        budget_bytes: The device's peak during a step.
        reserved_bytes: What of it is not to be used.
        verbose: 1 shows progress.
        spec: What `fit`'s graph knows of the batches.

    Returns:
        What trains so, and what there was to choose from.

    Raises:
        ImpossibleBudget: If nothing fits.
    """
    planner.build(model, batch)
    # Its variables are in memory in every step.
    Changes(model, model.optimizer).build(batch)
    gc.collect()
    given = dataclasses.replace(options, memory_budget=None, allow=())
    is_counted = memory.is_counted()
    if not is_counted and agreeing.processes(given).size > 1:
        raise ValueError(
            "`memory_budget` of several processes needs bytes that can be "
            "counted: import kmem before the first TensorFlow operation, or "
            "train without a budget. Received: "
            f"memory_budget={options.memory_budget!r}"
        )
    in_use = planner.in_use_bytes(model, batch, given)
    # All have to choose the same.
    in_use = agreeing.highest(agreeing.processes(given), in_use)
    room = budget_bytes - reserved_bytes
    menu = Menu(model, batch, room, in_use, verbose, spec)
    search = Search(menu, "batch_statistics" in options.allow)

    def in_fit(choice: Choice) -> Choice:
        peak_bytes = choice.predicted_peak_bytes + reserved_bytes
        options = choice.options
        if options.dtr is not None:
            # What is reserved counts there.
            options = dataclasses.replace(options, dtr=DTR(budget_bytes))
        return dataclasses.replace(
            choice, options=options, predicted_peak_bytes=peak_bytes
        )

    path = None
    if menu.key and is_counted and agreeing.processes(given).size == 1:
        path = _path(
            *(menu.key, batches.to_json(batch), options, budget_bytes, room)
        )
    report = path and _load(path)
    nearly = tuning.MARGIN * room
    if report and abs(report.in_use_bytes - in_use) <= nearly:
        best = search.again(report.chosen)
        if best is not None:
            changes: Any = {"chosen": in_fit(best), "in_use_bytes": in_use}
            return search.session(best), dataclasses.replace(report, **changes)

    search.plain(given)
    if search.best is None:
        # Between operators, which a graph does not let it do.
        evicting = dataclasses.replace(given, dtr=DTR(max(room, 1)))
        search.run(
            _allowed(model, given, options.allow, batch),
            [evicting] if model.run_eagerly and given.sharding is None else [],
        )
    best = search.best
    if best is None:
        least = search.least and in_fit(search.least)
        # What it names has to do when it is asked for, when the search has
        # left its traces in memory.
        gc.collect()
        left = max(planner.in_use_bytes(model, batch, given) - in_use, 0)
        count = least.options.num_parts if least else 1
        tensors = largest_tensors(model, batch, menu.size(given, count))
        raise ImpossibleBudget(
            *(options.memory_budget, budget_bytes, least),
            *(in_use + reserved_bytes, left, tensors),
        )
    others = [choice for choice in search.tried if choice != best]
    others.sort(key=lambda choice: choice.predicted_seconds)

    report = MemoryReport(
        budget_bytes=budget_bytes,
        plain=in_fit(search.of(given)),
        chosen=in_fit(best),
        alternatives=tuple(map(in_fit, others)),
        in_use_bytes=in_use,
        parameter_bytes=batches.num_bytes(model.variables),
        optimizer_bytes=batches.num_bytes(model.optimizer.variables),
        batch=batches.to_json(batch),
        is_measured=is_counted,
    )
    if path is not None:
        _save(path, report)
    session = search.session(best)
    if session.options != report.chosen.options:
        session = Session(model, report.chosen.options)
    return session, report


def _allowed(
    model, given: MemoryOptions, allow: tuple[str, ...], batch: Any
) -> list:
    """The options to hold, and others that may be chosen."""
    allowed = [given]
    # First, as it may be faster than a step without: others are run less.
    if (chunked := with_chunks(model, given, batch)) != given:
        allowed.insert(0, chunked)
    if refusals.can_be_offloaded(model, given):
        there = Sharding(cpu_offload=True)
        allowed.append(dataclasses.replace(given, sharding=there))
    if "sharding" in allow and given.sharding is not None:
        full = dataclasses.replace(given.sharding, stage="full")
        allowed.append(dataclasses.replace(given, sharding=full))
    if "mixed_precision" in allow and given.mixed_precision is None:
        half = MixedPrecision("bfloat16")
        allowed += [
            dataclasses.replace(each, mixed_precision=half) for each in allowed
        ]
    return allowed


def _path(*facts: Any) -> pathlib.Path | None:
    """Where a choice is kept that was made from some facts; `None` if the
    environment variable KMEM_CACHE is 0."""
    if os.environ.get("KMEM_CACHE") == "0":
        return None
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details
    machine = os.cpu_count(), [sorted(details(gpu).items()) for gpu in gpus]
    versions = __version__, tf.__version__, keras.__version__
    text = repr((facts, machine, versions))
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return cache.folder() / f"{_PREFIX}{name}.json"


def _load(path: pathlib.Path) -> MemoryReport | None:
    """What `_save` wrote; `None` if there is nothing that can be used."""
    try:
        return from_json(MemoryReport, json.loads(path.read_text("utf-8")))
    except (OSError, KeyError, RecursionError, TypeError, ValueError):
        return None


def _save(path: pathlib.Path, report: MemoryReport) -> None:
    """Keeps a report, unless the folder cannot be used, and the newest ones."""
    # Else a search takes its time in the next run, too.
    with contextlib.suppress(OSError):
        cache.make_private(path.parent)
        with cache.appearing(path) as part:
            # A set in order.
            text = json.dumps(dataclasses.asdict(report), default=sorted)
            part.write_text(text, encoding="utf-8")
        kept = sorted(path.parent.glob(f"{_PREFIX}*"), key=os.path.getmtime)
        for old in kept[: -tuning.MAX_KEPT]:
            old.unlink()
