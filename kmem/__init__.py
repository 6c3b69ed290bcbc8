"""kmem trains Keras models in less memory, with the same numbers.

Import it before the first TensorFlow operation: only then can it count, and
limit, every byte that TensorFlow allocates on the CPU. A public name is
imported when it is first used; the `kmem` command imports TensorFlow only
once it has read its command line.
"""

import importlib
import os
from typing import TYPE_CHECKING

from kmem.base import native
from kmem.base import versions
from kmem.base.versions import __version__ as __version__
from kmem.launching import cluster

if TYPE_CHECKING:  # For editors: what `_MODULES` says.
    from kmem import callbacks as callbacks
    from kmem import distributed as distributed
    from kmem import dtr as dtr
    from kmem import losses as losses
    from kmem import memory as memory
    from kmem import multilevel as multilevel
    from kmem import optimizers as optimizers
    from kmem import planning as planning
    from kmem import remat as remat
    from kmem.budget.estimate import Estimate as Estimate
    from kmem.budget.estimate import estimate as estimate
    from kmem.budget.largest import LargestBatch as LargestBatch
    from kmem.budget.largest import largest_batch as largest_batch
    from kmem.budget.planner import plan as plan
    from kmem.budget.sweeper import sweep as sweep
    from kmem.dtr.sweep import Sweep as Sweep
    from kmem.keras_graph.profiling import profile as profile
    from kmem.model import Model as Model
    from kmem.model import wrap as wrap
    from kmem.options import DTR as DTR
    from kmem.options import GradientAccumulation as GradientAccumulation
    from kmem.options import MemoryOptions as MemoryOptions
    from kmem.options import MicroBatches as MicroBatches
    from kmem.options import MixedPrecision as MixedPrecision
    from kmem.options import Remat as Remat
    from kmem.options import Sharding as Sharding
    from kmem.planning.flat import Genetic as Genetic
    from kmem.planning.plan import Plan as Plan
    from kmem.reporting import report as report
    from kmem.sharding.training import ShardedStrategy as ShardedStrategy

# Where the public names stand.
_MODULES = {
    "kmem": "callbacks distributed dtr losses memory multilevel optimizers "
    "planning remat",
    "kmem.budget.estimate": "Estimate estimate",
    "kmem.budget.largest": "LargestBatch largest_batch",
    "kmem.budget.planner": "plan",
    "kmem.budget.sweeper": "sweep",
    "kmem.dtr.sweep": "Sweep",
    "kmem.keras_graph.profiling": "profile",
    "kmem.model": "Model wrap",
    "kmem.options": "DTR GradientAccumulation MemoryOptions MicroBatches "
    "MixedPrecision Remat Sharding",
    "kmem.planning.flat": "Genetic",
    "kmem.planning.plan": "Plan",
    "kmem.reporting": "report",
    "kmem.sharding.training": "ShardedStrategy",
}
_MODULE_OF = {
    name: module for module, names in _MODULES.items() for name in names.split()
}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'kmem' has no attribute {name!r}")
    if module == "kmem":
        value = importlib.import_module(f"kmem.{name}")
    else:
        value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if not native.is_command():
    versions.check()
    native.prepare()
    if cluster.LAUNCHED in os.environ:
        # One of several processes: it joins the others as it is imported.
        importlib.import_module("kmem.distributed")
