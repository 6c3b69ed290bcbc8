"""When a graph's executor allocates what, and gives it back: simulated.

A node is run once what it reads is there. Its results take new memory, or that
of an argument that nobody else is going to read, or are another view of one;
an array is freed with its last reader. In which order nodes run decides the
peak. TensorFlow's executor hands a node's readers to its threads: those that
are cheap run next in the same thread; of the others the last one does, if
there is no cheap one, and the rest wait in a queue, from which their thread
takes the youngest and another one the oldest. The simulation has as many
threads as the executor, and knows times only roughly. So it is exact where
the order is given, by what reads what or by control dependencies, and near
where threads decide.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

# Below this a node runs in the thread that it got ready in.
_CHEAP_SECONDS = 5e-6
_NEVER = 1 << 62


@dataclasses.dataclass(slots=True)
class Node:
    """An operation of a graph.

    Attributes:
        reads: The values that it reads, by number.
        waits: The nodes that it waits for besides.
        makes: The values that it makes.
        sizes: Their bytes.
        views: For each of them the place, among `reads`, of the argument that
            it shows; -1 if it is no view.
        forwards: Whether it may write into an argument of the same size.
        workspace_bytes: What it needs besides, while it runs.
        seconds: About how long it runs.
    """

    name: str
    reads: list[int]
    waits: list[int]
    makes: list[int]
    sizes: list[int]
    views: list[int]
    forwards: bool = False
    workspace_bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(slots=True)
class Held:
    """An array that is in memory for some time.

    Attributes:
        node: The number of the node that made it.
        index: Which of the node's results it is; -1 for its workspace.
        num_bytes: Its size.
        born: How many nodes had begun when it was made, and
        died: when a node began without it.
    """

    node: int
    index: int
    num_bytes: int
    born: int
    died: int = _NEVER


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of a run.

    Attributes:
        num_bytes: Of what the nodes make.
        held: What is in memory then, the largest first.
        end_bytes: What is left at the end: results.
        arrays: All that was in memory at any time.
        starts: When nodes began, in their order, and when the last one ended.
    """

    num_bytes: int
    held: tuple[Held, ...]
    end_bytes: int = 0
    arrays: tuple[Held, ...] = ()
    starts: tuple[float, ...] = ()

    def in_use(self, arrays: Iterable[Held]) -> np.ndarray:
        """The bytes of some arrays, from each node's start to the next."""
        changes = np.zeros(len(self.starts) + 1, int)
        for each in arrays:
            changes[each.born] += each.num_bytes
            changes[min(each.died, len(self.starts))] -= each.num_bytes
        return np.cumsum(changes)[1:-1]


def simulate(
    nodes: Sequence[Node], results: Sequence[int], num_threads: int = 1
) -> Peak:
    """Runs nodes, and returns the peak.

    Args:
        nodes: A graph's. Values that none of them makes are there already and
            stay: variables, arguments.
        results: The values that stay.
        num_threads: The executor's.
    """
    return _Run(nodes, results, num_threads).peak()


def on_demand(nodes: Sequence[Node], given: Sequence[int]) -> list[Node]:
    """The nodes, such that what needs nothing of what is given runs late.

    An update of the weights begins with products of what the optimizer keeps,
    which idle threads may make during the whole step, or not. Here they wait
    for whatever else their only reader needs.

    Args:
        nodes: In an order in which they can run.
        given: The values that are new in each step: the batch.
    """
    maker: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    depends: list[bool] = []
    new = set(given)
    for number, node in enumerate(nodes):
        sources = {maker[v] for v in node.reads if v in maker}
        sources.update(node.waits)
        depends.append(
            not new.isdisjoint(node.reads)
            or any(depends[source] for source in sources)
        )
        maker.update(dict.fromkeys(node.makes, number))
        for source in sources:
            readers.setdefault(source, set()).add(number)
    late = list(nodes)
    for number, node in enumerate(nodes):
        if depends[number] or len(readers.get(number, ())) != 1:
            continue
        (reader,) = readers[number]
        others = {maker[v] for v in nodes[reader].reads if v in maker}
        waits = [other for other in others if depends[other]]
        late[number] = dataclasses.replace(node, waits=node.waits + waits)
    return late


class _Run:
    """One run: which arrays are there, and what each thread is to do."""

    def __init__(self, nodes, results, num_threads: int):
        self._nodes = nodes
        # Uses of a value that are to come.
        self._num_uses = collections.Counter(results)
        maker: dict[int, int] = {}
        for number, node in enumerate(nodes):
            self._num_uses.update(node.reads)
            maker.update(dict.fromkeys(node.makes, number))
        self._followers: list[list[int]] = [[] for _ in nodes]
        self._num_missing = [0] * len(nodes)
        for number, node in enumerate(nodes):
            sources = {maker[v] for v in node.reads if v in maker}
            sources.update(node.waits)
            self._num_missing[number] = len(sources)
            for source in sources:
                self._followers[source].append(number)
        # The array of a value, all arrays, and of each the uses to come.
        self._array: dict[int, int] = {}
        self._held: list[Held] = []
        self._uses: list[int] = []
        self._workspace: dict[int, int] = {}
        self._in_use = self._peak_bytes = 0
        self._num_begun = self._peak_at = 0
        self._starts: list[float] = []
        self._queues = [collections.deque() for _ in range(num_threads)]
        self._next = [collections.deque() for _ in range(num_threads)]

    def peak(self) -> Peak:
        """Runs all nodes."""
        missing = enumerate(self._num_missing)
        first = [number for number, count in missing if not count]
        for thread, queue in enumerate(self._queues):
            queue.extend(first[thread :: len(self._queues)])
        running: list[tuple[float, int, int]] = []
        idle, now = list(range(len(self._queues))), 0.0
        while True:
            for thread in tuple(idle):
                number = self._take(thread)
                if number is not None:
                    idle.remove(thread)
                    self._starts.append(now)
                    self._begin(number)
                    end = now + self._nodes[number].seconds
                    heapq.heappush(running, (end, thread, number))
            if not running:
                break
            now, thread, number = heapq.heappop(running)
            self._end(number)
            self._hand_out(thread, number)
            idle = sorted([*idle, thread])
        arrays = [each for each in self._held if each.num_bytes]
        held = [a for a in arrays if a.born <= self._peak_at < a.died]
        held.sort(key=lambda each: -each.num_bytes)
        starts = *self._starts, now
        return Peak(
            self._peak_bytes, tuple(held), self._in_use, tuple(arrays), starts
        )

    def _take(self, thread: int) -> int | None:
        for own in (self._next[thread], self._queues[thread]):
            if own:
                return own.popleft()
        for other in self._queues:
            if other:
                return other.pop()
        return None

    def _hand_out(self, thread: int, number: int) -> None:
        """Hands out what has got ready."""
        cheap, expensive = self._next[thread], []
        for follower in self._followers[number]:
            self._num_missing[follower] -= 1
            if not self._num_missing[follower]:
                is_cheap = self._nodes[follower].seconds < _CHEAP_SECONDS
                (cheap if is_cheap else expensive).append(follower)
        if expensive and not cheap:
            cheap.append(expensive.pop())
        self._queues[thread].extendleft(expensive)

    def _begin(self, number: int) -> None:
        node = self._nodes[number]
        self._num_begun += 1
        for place, value in enumerate(node.makes):
            uses, size = self._num_uses[value], node.sizes[place]
            view = node.views[place]
            array = None
            if view >= 0:
                array = self._array.get(node.reads[view], -1)
            elif node.forwards:
                array = self._forwarded(node, size)
            if array is None:
                array = self._new(number, place, size)
            self._array[value] = array
            if array >= 0:
                self._uses[array] += uses
        if node.workspace_bytes:
            array = self._new(number, -1, node.workspace_bytes)
            self._workspace[number] = array
        if self._in_use > self._peak_bytes:
            self._peak_bytes, self._peak_at = self._in_use, self._num_begun

    def _forwarded(self, node: Node, size: int) -> int | None:
        for value in node.reads:
            array = self._array.get(value, -1)
            if (
                array >= 0
                and self._uses[array] == 1
                and self._held[array].num_bytes == size
            ):
                return array
        return None

    def _new(self, number: int, place: int, size: int) -> int:
        self._held.append(Held(number, place, size, self._num_begun))
        # Until the node ends.
        self._uses.append(0)
        self._in_use += size
        return len(self._held) - 1

    def _end(self, number: int) -> None:
        node = self._nodes[number]
        arrays = [self._array.get(value, -1) for value in node.reads]
        for array in arrays:
            if array >= 0:
                self._uses[array] -= 1
        arrays += [self._array[value] for value in node.makes]
        arrays.append(self._workspace.pop(number, -1))
        for array in set(arrays) - {-1}:
            held = self._held[array]
            if not self._uses[array] and held.died == _NEVER:
                self._in_use -= held.num_bytes
                held.died = self._num_begun + 1
