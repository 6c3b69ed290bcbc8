"""What it takes to run part of a network forward and backward, in bytes.

A network is cut into blocks: the stages between two places where segments may
begin or end. The sub-chain (first, last) is blocks `first` to `last`, run
forward and then backward when everything after `last` is done with. This
module knows what each sub-chain adds to memory and where its peaks are; what
to keep and what to run again is the solver's choice.

Memory is counted from the front: a sub-chain is given what is left of the
budget by all that is held, other than the values that it begins with (those
made before it that it still reads), and by the parameters' gradients of what
follows. So stepping over a block costs what that block leaves behind, a chain
of values costs each of them once, and equal blocks cost the same wherever
they are.

Where exact liveness would depend on how the stages before a sub-chain are
run, more is counted: a value that was read or kept earlier counts as held
until its first use is done with. Times are exact but for stages of an inner
segment whose output no later stage of the outer one needs: they are counted.
"""

import math

import numpy as np

from kmem.planning.network import Network


class Line:
    """A network as a line of blocks.

    Args:
        places: Stages at which blocks begin, without 0, in order.

    Attributes:
        places: Block -> its first stage, and the number of stages.
        common_bytes: The largest divisor of all sizes.
        kept_bytes: `[last, block]`: what running the blocks before `block`
            has left behind, counted from the front of the line.
        plain_bytes: `[last, block]`: the peak of running the block so that
            everything is kept, forward or backward, when what follows it, to
            `last`, is done in between.
        again_seconds: `[last, block]`: the time of running the blocks from
            `block` to `last` again.
    """

    def __init__(self, network: Network, places: list[int]):
        self.network = network
        self.places = np.array([0, *places, len(network.stages)])
        self.common_bytes = _common_bytes(network)
        self.num_blocks = len(self.places) - 1
        self._values = _Values(network)
        self._gradients = _Gradients(network)
        count = self.num_blocks
        self.kept_bytes = np.zeros((count, count + 1), np.int64)
        self.plain_bytes = np.zeros((count, count), np.int64)
        self.again_seconds = np.zeros((count, count))
        # By last block: of each value the last read, of each stage the peak.
        self._reads = np.zeros((count, len(self._values.ids)), np.int64)
        self._forward = np.zeros((count, len(network.stages)), np.int64)
        for last in range(self.num_blocks):
            self._measure(last)
        # Of each block the values made before it that a later stage reads.
        maker, last_use = self._values.maker, self._values.last_use
        self._starting = [
            np.flatnonzero((maker < place) & (last_use >= place))
            for place in self.places[:-1]
        ]

    @property
    def full_bytes(self) -> int:
        """What keeping everything takes."""
        return int(np.max(self.plain_bytes[-1] + self.kept_bytes[-1, :-1]))

    def _measure(self, last: int) -> None:
        """Everything about sub-chains that end with block `last`."""
        values, stages = self._values, self.network.stages
        stop = int(self.places[last + 1])
        runs, reads = values.used_until(stop, last == self.num_blocks - 1)
        starting = values.alive(values.maker + 1, reads, stop)
        used_before = np.maximum(values.maker, values.first_use) + 1
        earlier = values.alive(used_before, reads, stop)
        resident = self._gradients.kept[stop]
        later = self._gradients.after[stop] - resident

        # What a stage runs with, forward and backward.
        made = np.where(runs, values.made_bytes[:stop], 0)
        forward = starting + made + later
        backward = (
            earlier
            + values.kept_first_bytes[:stop]
            + self._gradients.during[:stop]
            - resident
        )
        backward[~values.has_backward[:stop]] = 0
        # What it leaves behind: residuals, and what nobody reads any more but
        # a backward pass before or of this stage.
        left = np.where(runs, values.residual_bytes[:stop], 0)
        done = (reads >= 0) & (reads < stop)
        used_before_last = values.first_use < reads
        stays = done & (values.keeps[reads, values.ids] | used_before_last)
        np.add.at(left, reads[stays], values.bytes[stays])
        kept = np.concatenate([[0], np.cumsum(left)])
        plain = np.maximum(forward, backward) + kept[:-1]

        here = self.places[: last + 1]
        self.kept_bytes[last, : last + 2] = kept[self.places[: last + 2]]
        self.plain_bytes[last, : last + 1] = (
            np.maximum.reduceat(plain, here) - kept[here]
        )
        seconds = np.array([s.forward_seconds for s in stages[:stop]]) * runs
        self.again_seconds[last, : last + 1] = np.cumsum(seconds[::-1])[::-1][
            here
        ]
        self._reads[last] = reads
        self._forward[last, :stop] = forward

    def splits(self, first: int, lasts: np.ndarray, final: int) -> np.ndarray:
        """Bytes of the segments with which sub-chains may begin, one for each
        stop: `[part, last, stop]`. What it says of stops that are after the
        sub-chain means nothing.

        The parts are what the segment keeps for later, besides what the blocks
        after it begin with; what is held over the segment, during its backward
        pass, other than what it begins with: also the parameters' gradients of
        the blocks after it; and the peak of its forward pass, which keeps
        nothing; and what of the first part it does not run again from, and
        so cannot send to a host.

        Args:
            first: The first block of the sub-chains.
            lasts: Their last blocks.
            final: The last of the stops, which begin with `first + 1`.
        """
        ends = self.places[first + 1 : final + 1]
        begin = self.places[first]
        forward = self._forward[lasts, begin : ends[-1]]
        stages = np.arange(begin, ends[-1])
        # The parameters' gradients of what is after the segment.
        resident = self._gradients.kept
        waiting = resident[ends] - resident[self.places[lasts + 1], None]
        held, staying = np.zeros_like(waiting), np.zeros_like(waiting)
        for value in self._starting[first]:
            last_read = self._reads[lasts, value, None]
            size = self._values.bytes[value] * (last_read >= begin)
            forward += size * (stages > last_read)
            ending = size * (ends > last_read)
            # Longer segments use what shorter ones do.
            is_unused = self._reads[first:final, value] < begin
            held += ending
            staying += ending * is_unused
            if self._values.first_use[value] < begin:
                waiting += size * is_unused
        np.maximum.accumulate(forward, axis=1, out=forward)
        forward = forward[:, ends - 1 - begin]
        return np.stack([held, waiting, forward, staying])


class _Values:
    """The values that stages make, and who uses them."""

    def __init__(self, network: Network):
        stages = network.stages
        number = {}
        for index, stage in enumerate(stages):
            for value in stage.outputs:
                number[value] = (len(number), index)
        count = len(stages)
        self.ids = np.arange(len(number))
        self.maker = np.array([m for _, m in number.values()], np.int64)
        self.bytes = np.array([network.value_bytes[v] for v in number])
        self.bytes = self.bytes.astype(np.int64)
        self.has_backward = np.array([s.has_backward for s in stages])
        self.keeps = np.zeros((count, len(number)), bool)
        self._inputs, self._outputs, self._kept = [], [], []
        for index, stage in enumerate(stages):
            kept = stage.kept if stage.has_backward else ()
            self._inputs.append(_numbers(stage.inputs, number))
            self._outputs.append(_numbers(stage.outputs, number))
            self._kept.append(_numbers(kept, number))
            self.keeps[index, list(self._kept[-1])] = True
        self.residual_bytes = np.array(
            [s.residual_bytes if s.has_backward else 0 for s in stages]
        )
        # The stage that uses a value first and last; its maker only if it
        # keeps it.
        self.first_use = np.full(len(number), count)
        self.last_use = np.full(len(number), -1)
        for index in range(count):
            for value in self._inputs[index] | self._kept[index]:
                self.first_use[value] = min(self.first_use[value], index)
                self.last_use[value] = index
        # All that a stage makes, and what it needs before its backward pass
        # that no stage before it has used.
        self.made_bytes = np.zeros(count, np.int64)
        self.kept_first_bytes = self.residual_bytes.copy()
        for index, stage in enumerate(stages):
            self.made_bytes[index] = (
                sum(self.bytes[v] for v in self._outputs[index])
                + stage.residual_bytes
                + stage.forward_workspace_bytes
            )
            self.kept_first_bytes[index] += sum(
                self.bytes[v]
                for v in self._kept[index]
                if self.first_use[v] == index
            )

    def used_until(self, stop: int, all_run: bool):
        """Stage -> whether its backward pass, or that of a later stage before
        `stop`, needs it to run; value -> the last stage before `stop` that
        uses it, or -1."""
        runs = np.zeros(stop, bool)
        last = np.full(len(self.ids), -1)
        needed: set[int] = set()
        for index in range(stop - 1, -1, -1):
            outputs, kept_values = self._outputs[index], self._kept[index]
            used = kept_values
            if (
                all_run
                or not needed.isdisjoint(outputs)
                or not kept_values.isdisjoint(outputs)
                or self.residual_bytes[index]
            ):
                runs[index] = True
                used = kept_values | self._inputs[index]
            for value in used:
                if last[value] < 0:
                    last[value] = index
            needed = (needed | used) - outputs
        return runs, last

    def alive(self, begin, last, stop: int) -> np.ndarray:
        """Stage -> bytes of the values with begin <= stage <= last."""
        present = begin <= last
        change = np.zeros(stop + 1, np.int64)
        np.add.at(change, begin[present], self.bytes[present])
        np.add.at(change, last[present] + 1, -self.bytes[present])
        return np.cumsum(change)[:stop]


class _Gradients:
    """The bytes of gradients, which no plan changes.

    Attributes:
        during: Stage -> those in use during its backward pass.
        after: Stage -> those in use when all stages from it on are done.
        kept: Stage -> those of these that stay until the step ends.
    """

    def __init__(self, network: Network):
        graph, count = network.graph, len(network.stages)
        stage_of = {op: s for s, op in network.backward_index.items()}
        last_reader = {}
        for op in range(graph.num_forward, len(graph.operations)):
            for tensor in graph.operations[op].inputs:
                last_reader[tensor] = stage_of[op]
        during = np.zeros(count + 1, np.int64)
        after = np.zeros(count + 2, np.int64)
        kept = np.zeros(count + 1, np.int64)
        for op, stage in stage_of.items():
            operation = graph.operations[op]
            during[stage] += operation.workspace_bytes
            for tensor in operation.outputs:
                size = graph.tensor_bytes[tensor]
                end = last_reader.get(tensor, stage)
                end = 0 if tensor in graph.results else end
                during[end : stage + 1] += size
                # Between the backward passes of `stage` and of `end`.
                after[end + 1 : stage + 1] += size
                if tensor in graph.results:
                    after[0] += size
                    kept[: stage + 1] += size
        self.during, self.after, self.kept = during[:count], after, kept


def _common_bytes(network: Network) -> int:
    """The largest divisor of all sizes."""
    graph = network.graph
    workspaces = (o.workspace_bytes for o in graph.operations)
    sizes = [
        size
        for tensor, size in enumerate(graph.tensor_bytes)
        if tensor not in graph.constants
    ]
    return math.gcd(*sizes, *workspaces) or 1


def _numbers(values, number) -> frozenset[int]:
    return frozenset(number[v][0] for v in values if v in number)
