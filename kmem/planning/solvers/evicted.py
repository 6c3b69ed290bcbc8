"""What it would cost to make a tensor again, given what else is gone.

The three answers of the DTR paper, from cheap to exact: its operation alone;
that and the connected region of evicted tensors around it, kept in a
union-find (h_DTR_eq: a tensor that comes back takes its own cost with it, but
does not split its region); or that and all evicted tensors that it is made
from. Costs are kept until something changes near a tensor.
"""

from typing import Protocol

import numpy as np

from kmem.planning.graph import Graph


class Costs(Protocol):
    """Knows what is evicted, and what follows."""

    def __init__(self, graph: Graph): ...

    def drop(self, tensor: int) -> None: ...

    def restore(self, tensor: int) -> None: ...

    def seconds(self, tensors: np.ndarray) -> np.ndarray: ...


class Own:
    """The time of the tensor's own operation."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.own = np.zeros(len(graph.tensor_bytes))
        for tensor, maker in graph.maker.items():
            self.own[tensor] = graph.operations[maker].seconds
        self.gone = bytearray(len(graph.tensor_bytes))
        self.known = self.own.copy()
        self.outdated: set[int] = set()

    def drop(self, tensor: int) -> None:
        self.gone[tensor] = 1

    def restore(self, tensor: int) -> None:
        self.gone[tensor] = 0

    def seconds(self, tensors: np.ndarray) -> np.ndarray:
        for tensor in self.outdated.intersection(tensors.tolist()):
            self.known[tensor] = self._cost(tensor)
            self.outdated.discard(tensor)
        return self.known[tensors]

    def _cost(self, tensor: int) -> float:
        return self.own[tensor]

    def _inputs(self, tensor: int) -> tuple[int, ...]:
        maker = self.graph.maker.get(tensor)
        return () if maker is None else self.graph.operations[maker].inputs

    def _made_from(self, tensor: int) -> list[int]:
        return [
            output
            for reader in self.graph.readers[tensor]
            for output in self.graph.operations[reader].outputs
        ]


class Ancestors(Own):
    """All operations that have to run."""

    def drop(self, tensor: int) -> None:
        self.gone[tensor] = 1
        self._outdate(tensor)

    def restore(self, tensor: int) -> None:
        self._outdate(tensor)
        self.gone[tensor] = 0

    def _outdate(self, tensor: int) -> None:
        """What is made from it, by way of what is gone, or will be."""
        waiting, seen = [tensor], {tensor}
        while waiting:
            for made in self._made_from(waiting.pop()):
                if made not in seen:
                    seen.add(made)
                    if self.gone[made]:
                        waiting.append(made)
        self.outdated |= seen

    def _cost(self, tensor: int) -> float:
        operations, maker = self.graph.operations, self.graph.maker
        waiting = [maker[tensor]]
        seen = set(waiting)
        seconds = 0.0
        while waiting:
            operation = operations[waiting.pop()]
            seconds += operation.seconds
            for source in operation.inputs:
                if self.gone[source] and maker[source] not in seen:
                    seen.add(maker[source])
                    waiting.append(maker[source])
        return seconds


class Neighbourhood(Own):
    """The evicted regions that a tensor touches."""

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.region: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}
        self.sums: dict[int, float] = {}
        self.around = [
            sorted(
                {*self._inputs(tensor), *self._made_from(tensor)}
                - graph.constants
            )
            for tensor in range(len(graph.tensor_bytes))
        ]

    def drop(self, tensor: int) -> None:
        self.gone[tensor] = 1
        regions = {
            self.region[near] for near in self.around[tensor] if self.gone[near]
        }
        # Tensors that came back are still listed, so that members are found
        # without a search; they are found by `region` only while gone.
        largest = max(regions, key=lambda r: len(self.members[r]), default=-1)
        if largest == -1:
            largest = len(self.sums)
            self.members[largest], self.sums[largest] = [], 0.0
        for region in regions - {largest}:
            for member in self.members.pop(region):
                self.region[member] = largest
                self.members[largest].append(member)
            self.sums[largest] += self.sums[region]
        self.region[tensor] = largest
        self.members[largest].append(tensor)
        self.sums[largest] += self.own[tensor]
        self._outdate(largest)

    def restore(self, tensor: int) -> None:
        if not self.gone[tensor]:
            return
        self.gone[tensor] = 0
        region = self.region[tensor]
        self._outdate(region)
        self.members[region].remove(tensor)
        self.sums[region] -= self.own[tensor]
        self.outdated.add(tensor)

    def _outdate(self, region: int) -> None:
        for member in self.members[region]:
            self.outdated.update(self.around[member])

    def _cost(self, tensor: int) -> float:
        regions = {
            self.region[near] for near in self.around[tensor] if self.gone[near]
        }
        return self.own[tensor] + sum(self.sums[r] for r in regions)
