"""Chooses a network's segments for a budget, by any of the solvers."""

import dataclasses
import functools
import math

from kmem.planning import flat
from kmem.planning import genetic
from kmem.planning.bounds import seconds_lower_bound
from kmem.planning.chain import ChainSolver
from kmem.planning.flat import Point
from kmem.planning.genetic import Genetic
from kmem.planning.network import Network

MAX_SLOWDOWN = 1.3  # What "auto" accepts.


@dataclasses.dataclass(frozen=True)
class Chooser:
    """The plans of one solver for one network.

    Attributes:
        network: The network.
        solver: `"optimal"`, `"sqrt"` or `Genetic(...)`.
    """

    network: Network
    solver: str | Genetic = "optimal"

    @functools.cached_property
    def everything(self) -> Point:
        """The plan that keeps everything."""
        return flat.evaluate(self.network, ())

    @functools.cached_property
    def _chain(self) -> ChainSolver:
        return ChainSolver(self.network)

    @property
    def smallest(self) -> Point:
        """The plan with the smallest peak."""
        if self.solver == "optimal":
            return self._chain.smallest
        return self._flat(None)

    def within(self, budget_bytes: int) -> Point:
        """The fastest plan within a budget.

        Raises:
            InfeasibleBudget: If the solver finds none.
        """
        if self.everything.peak_bytes <= budget_bytes:
            return self.everything
        if self.solver == "optimal":
            return self._chain.within(budget_bytes)
        return self._flat(budget_bytes)

    def auto(self) -> Point:
        """The smallest peak whose slowdown is at most `MAX_SLOWDOWN`; of a
        solver that does not trade the two, the smallest peak."""
        if self.solver != "optimal":
            return self._flat(None)
        most = MAX_SLOWDOWN * self.everything.seconds
        return self._chain.smallest_within(most)

    def lower_bound_seconds(self, budget_bytes: int) -> float:
        """No schedule within the budget is faster, of segments or not."""
        bound = seconds_lower_bound(self.network.graph, budget_bytes)
        return bound if math.isfinite(bound) else self.everything.seconds

    def _flat(self, budget_bytes: int | None) -> Point:
        if isinstance(self.solver, Genetic):
            return genetic.search(self.network, self.solver, budget_bytes)
        return flat.sqrt(self.network, budget_bytes=budget_bytes)
