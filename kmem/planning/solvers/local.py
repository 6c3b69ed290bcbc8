"""Improves a schedule: takes recomputations out, and repairs what overflows.

Ruin and recreate (Schrimpf et al., 2000). Taking a repeated step out means
that the tensor is kept instead, from its last use on. Where that is too much
for the budget, other tensors are dropped over the worst moment and made again
just before their next use: those that cost least for the bytes and for the
overflowing steps they free, with some noise, so that rounds differ. Every
schedule is measured by a full replay.
"""

import bisect
import math
import random
import time

from kmem.planning.graph import Graph


class LocalSearch:
    """Schedules of a graph, their bytes, and changes to them.

    Steps are lists here, constants are left out, and all bytes are those of
    `simulate` less what is always there.
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        seed: int = 0,
        deadline: float = math.inf,
    ):
        self.graph = graph
        # When to stop, by `time.monotonic()`.
        self.deadline = deadline
        self.budget_bytes = budget_bytes - graph.constant_bytes
        self.random = random.Random(seed)
        self.sizes = graph.tensor_bytes
        self.seconds = [o.seconds for o in graph.operations]
        self.workspace = [o.workspace_bytes for o in graph.operations]
        self.outputs = [o.outputs for o in graph.operations]
        self.inputs = [
            tuple(set(o.inputs) - graph.constants) for o in graph.operations
        ]
        self.results = sorted(graph.results - graph.constants)

    def cost(self, steps: list[int]) -> float:
        return sum(map(self.seconds.__getitem__, steps))

    def usage(self, steps: list[int]) -> list[int]:
        """Bytes in use during each step, as `simulate` has them."""
        alive = bytearray(len(self.sizes))
        in_use = 0
        for tensor in self.results:
            alive[tensor] = 1
            in_use += self.sizes[tensor]
        usage = []
        for index in reversed(steps):
            for tensor in self.inputs[index]:
                if not alive[tensor]:
                    alive[tensor] = 1
                    in_use += self.sizes[tensor]
            made = unused = 0
            for tensor in self.outputs[index]:
                if alive[tensor]:
                    alive[tensor] = 0
                    made += self.sizes[tensor]
                else:
                    unused += self.sizes[tensor]
            usage.append(in_use + unused + self.workspace[index])
            in_use -= made
        usage.reverse()
        return usage

    def peak(self, steps: list[int]) -> int:
        return max(self.usage(steps), default=0)

    def without(self, steps: list[int], removed: set[int]) -> list[int]:
        """Leaves steps out, and repeats that were there only for them."""
        repeats = set(self.repeats(steps))
        alive = bytearray(len(self.sizes))
        for tensor in self.results:
            alive[tensor] = 1
        kept = []
        for step in range(len(steps) - 1, -1, -1):
            index = steps[step]
            outputs = self.outputs[index]
            if step in repeats and (
                step in removed or not any(alive[t] for t in outputs)
            ):
                continue
            kept.append(index)
            for tensor in outputs:
                alive[tensor] = 0
            for tensor in self.inputs[index]:
                alive[tensor] = 1
        kept.reverse()
        return kept

    def repeats(self, steps: list[int]) -> list[int]:
        """The steps that run an operation again."""
        seen = bytearray(len(self.seconds))
        found = []
        for step, index in enumerate(steps):
            if seen[index]:
                found.append(step)
            seen[index] = 1
        return found

    def events(self, steps: list[int]) -> list[list[int]]:
        """Tensor -> what happens to it: twice the step, and one if read."""
        events: list[list[int]] = [[] for _ in self.sizes]
        for step, index in enumerate(steps):
            for tensor in self.inputs[index]:
                events[tensor].append(2 * step + 1)
            for tensor in self.outputs[index]:
                events[tensor].append(2 * step)
        for tensor in self.results:
            events[tensor].append(2 * len(steps) + 1)
        return events

    def repair(
        self, steps: list[int], seconds_limit: float, noise: float = 0.0
    ) -> list[int] | None:
        """Drops tensors until all steps fit; `None` if that fails."""
        seconds = self.cost(steps)
        rounds = 3 * len(self.seconds)
        reach = self.random.choice((0.0, 0.5, 1.0)) if noise else 0.5
        while (
            seconds < seconds_limit
            and rounds
            and time.monotonic() < self.deadline
        ):
            usage = self.usage(steps)
            worst = max(range(len(usage)), key=usage.__getitem__)
            if usage[worst] <= self.budget_bytes:
                return steps
            drop = self._best_drop(steps, usage, worst, noise, reach)
            if drop is None:
                return None
            position, again = drop
            steps = steps[:position] + again + steps[position:]
            seconds += sum(self.seconds[index] for index in again)
            rounds -= 1
        return None

    def _best_drop(self, steps, usage, worst, noise, reach):
        """Where to insert which steps, to free bytes at step `worst`."""
        budget = self.budget_bytes
        events = self.events(steps)
        overflowing = [0]
        for num_bytes in usage:
            overflowing.append(overflowing[-1] + (num_bytes > budget))
        excess = usage[worst] - budget
        here = steps[worst]
        busy = {*self.inputs[here], *self.outputs[here]}
        best, best_score = None, float("inf")
        for tensor, happened in enumerate(events):
            size = self.sizes[tensor]
            if not size or not happened or tensor in busy:
                continue
            at = bisect.bisect_left(happened, 2 * worst)
            if at == 0 or at == len(happened) or not happened[at] & 1:
                continue
            after = happened[at] >> 1
            again = self._again(tensor, after, worst, events, usage)
            if again is None:
                continue
            freed = min(size - again[1], excess)
            if freed <= 0:
                continue
            before = happened[at - 1] >> 1
            stretch = overflowing[after] - overflowing[before + 1]
            cost = sum(self.seconds[index] for index in again[0])
            score = cost / (freed * stretch**reach)
            if noise:
                score *= self.random.uniform(1 - noise, 1 + noise)
            if score < best_score:
                best, best_score = (after, again[0]), score
        return best

    def _again(self, tensor, after, worst, events, usage):
        """What makes a tensor again at step `after`, in program order, and
        the bytes that must be kept over step `worst` for that."""
        operations, maker = self.graph.operations, self.graph.maker
        waiting = [maker[tensor]]
        seen = set(waiting)
        kept_bytes = 0
        while waiting:
            index = waiting.pop()
            if not operations[index].recomputable:
                return None
            for source in self.inputs[index]:
                happened = events[source]
                at = bisect.bisect_left(happened, 2 * after)
                if at < len(happened) and happened[at] & 1:
                    continue  # It is there anyway.
                last = happened[at - 1] >> 1
                size = self.sizes[source]
                origin = maker[source]
                if last >= worst:
                    room = self.budget_bytes - size
                    if max(usage[last + 1 : after], default=0) <= room:
                        continue  # It can be kept a little longer.
                elif not operations[origin].recomputable or (
                    4 * size <= self.sizes[tensor]
                ):
                    kept_bytes += size
                    continue
                if origin not in seen:
                    seen.add(origin)
                    waiting.append(origin)
        return sorted(seen), kept_bytes

    def tighten(self, steps: list[int]) -> list[int]:
        """Takes out every repeat for which there is room, dear ones first."""
        while time.monotonic() < self.deadline:
            usage, events = self.usage(steps), self.events(steps)
            fitting = [
                step
                for step in self.repeats(steps)
                if self._fits(steps, step, usage, events)
            ]
            fitting.sort(key=lambda step: -self.seconds[steps[step]])
            shorter = None
            while fitting and shorter is None:
                # Each has room, but all of them may not.
                shorter = self.without(steps, set(fitting))
                if self.peak(shorter) > self.budget_bytes:
                    shorter = None
                    fitting = fitting[: len(fitting) // 2]
            if shorter is None:
                break
            steps = shorter
        return steps

    def _fits(self, steps, step, usage, events) -> bool:
        """Whether the last copy could stay until what this step makes."""
        for tensor in self.outputs[steps[step]]:
            happened = events[tensor]
            at = bisect.bisect_left(happened, 2 * step)
            if at + 1 == len(happened) or not happened[at + 1] & 1:
                continue  # Nothing reads this copy.
            room = self.budget_bytes - self.sizes[tensor]
            last = happened[at - 1] >> 1
            if max(usage[last + 1 : step], default=0) > room:
                return False
        return True

    def ruin(self, steps: list[int]) -> list[int]:
        """Takes some repeats out: scattered, neighbours, or of one kind."""
        repeats = self.repeats(steps)
        count = min(len(repeats), self.random.randint(1, 10))
        kind = self.random.random()
        if kind < 0.3:
            chosen = self.random.sample(repeats, count)
        elif kind < 0.8:
            first = self.random.randint(0, len(repeats) - count)
            chosen = repeats[first : first + count]
        else:
            index = steps[self.random.choice(repeats)]
            chosen = [step for step in repeats if steps[step] == index]
        return self.without(steps, set(chosen))
