"""kmem trains Keras models in less memory, with the same numbers.

Import it before the first TensorFlow operation: only then can it count, and
limit, every byte that TensorFlow allocates on the CPU.
"""

from kmem.base import versions

versions.check()

from kmem.base import native  # noqa: E402

native.prepare_on_import()

from kmem import callbacks as callbacks  # noqa: E402
from kmem import distributed as distributed  # noqa: E402
from kmem import dtr as dtr  # noqa: E402
from kmem import memory as memory  # noqa: E402
from kmem import multilevel as multilevel  # noqa: E402
from kmem.base.versions import __version__ as __version__  # noqa: E402
from kmem.budget.planner import plan as plan  # noqa: E402
from kmem.budget.sweeper import sweep as sweep  # noqa: E402
from kmem.dtr.sweep import Sweep as Sweep  # noqa: E402
from kmem.keras_graph.profiling import profile as profile  # noqa: E402
from kmem.model import Model as Model  # noqa: E402
from kmem.model import wrap as wrap  # noqa: E402
from kmem.options import DTR as DTR  # noqa: E402
from kmem.options import Genetic as Genetic  # noqa: E402
from kmem.options import GradientAccumulation as GradientAccumulation  # noqa: E402
from kmem.options import MemoryOptions as MemoryOptions  # noqa: E402
from kmem.options import MicroBatches as MicroBatches  # noqa: E402
from kmem.options import MixedPrecision as MixedPrecision  # noqa: E402
from kmem.options import Remat as Remat  # noqa: E402
from kmem.options import Sharding as Sharding  # noqa: E402
from kmem.planning.plan import Plan as Plan  # noqa: E402
from kmem.reporting import report as report  # noqa: E402
from kmem.sharding.training import ShardedStrategy as ShardedStrategy  # noqa: E402
