"""Multilevel optimization, with the same memory options at every level.

min over x of U(w*(x), x), where w*(x) minimises L(w, x), and so on for more
levels: hyperparameters, data weights, architectures, meta-learning.
"""

from kmem.multilevel.hypergradients import SAMA as SAMA
from kmem.multilevel.hypergradients import FiniteDifference as FiniteDifference
from kmem.multilevel.hypergradients import Identity as Identity
from kmem.multilevel.hypergradients import Unrolled as Unrolled
from kmem.multilevel.level import Level as Level
from kmem.multilevel.program import Program as Program
from kmem.multilevel.solvers import ConjugateGradient as ConjugateGradient
from kmem.multilevel.solvers import MinimalResidual as MinimalResidual
from kmem.multilevel.solvers import Neumann as Neumann
