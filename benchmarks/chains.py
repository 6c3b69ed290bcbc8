"""kmem's optimal segments beside simpler ones, on synthetic chains.

    python benchmarks/chains.py > benchmarks/chains.md

A stage keeps its output and up to 1.5 times as much besides, takes a random
time forward and twice that backward; sizes are small integers, so that memory
can be divided exactly. In the uniform chain a stage keeps two units and makes
one. A cell is the simulated time over that of the step that keeps everything,
with the peak that is allowed as a share of that step's; "-" is infeasible.
With 1000 stages segments may begin and end at 300 places only, and sizes are
rounded up to slots. The seconds to plan are a process's own, not those that
others take from it: for all budgets together in the case of "optimal" and per
budget for the others.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import random
import subprocess
import time

from kmem.planning import choosing
from kmem.planning import flat
from kmem.planning.bounds import InfeasibleBudget
from kmem.planning.flat import Genetic
from kmem.planning.network import Network
from kmem.planning.network import Stage

SHARES = (0.9, 0.7, 0.5, 0.3, 0.2)
NUM_SLOTS = 8000


def uniform(count: int) -> Network:
    return _chain([1] * (count + 1), [1] * count, [1] * count)


def heterogeneous(count: int, seed: int = 0) -> Network:
    draw = random.Random(seed)
    values = [draw.randint(1, 30) for _ in range(count + 1)]
    besides = [draw.randint(0, 45) for _ in range(count)]
    return _chain(values, besides, [draw.randint(1, 20) for _ in range(count)])


def _chain(values, besides, forward) -> Network:
    stages = [
        Stage(
            name=str(i),
            inputs=(i,),
            outputs=(i + 1,),
            kept=(i, i + 1),
            gradients=(i,),
            residual_bytes=besides[i],
            forward_seconds=forward[i],
            backward_seconds=2 * forward[i],
        )
        for i in range(len(forward))
    ]
    return Network(tuple(stages), tuple(values), frozenset({0}))


def equal(network: Network, budget_bytes: int) -> flat.Point:
    """The best of all segmentations with equal numbers of stages."""
    count = len(network.stages)
    cutter = flat.Cutter(network)
    lengths = range(1, count + 1)
    points = [cutter.evaluate(range(n, count, n)) for n in lengths]
    within = [p for p in points if p.peak_bytes <= budget_bytes]
    if not within:
        smallest = min(point.peak_bytes for point in points)
        raise InfeasibleBudget(budget_bytes, smallest, 0)
    return min(within, key=lambda point: point.seconds)


def rows(network: Network):
    """Names of solvers, their cells, and the seconds that they took."""
    full = flat.evaluate(network, ())
    constant_bytes = network.graph.constant_bytes
    begin = time.process_time()
    exact = len(network.stages) <= 200
    solver = choosing.ChainSolver(network, NUM_SLOTS if exact else None)
    seconds = time.process_time() - begin
    ways = {
        "optimal": solver.within,
        "sqrt": lambda budget: flat.sqrt(network, budget_bytes=budget),
        "genetic, as is": lambda budget: flat.search(
            network, Genetic(), budget
        ),
        "genetic, 20 generations": lambda budget: flat.search(
            network, Genetic(genetic_nr_iter=20), budget
        ),
        "equal lengths": lambda budget: equal(network, budget),
    }
    for name, way in ways.items():
        cells, begin = [], time.process_time()
        for share in SHARES:
            room = full.peak_bytes - constant_bytes
            budget_bytes = constant_bytes + int(share * room)
            try:
                point = way(budget_bytes)
                cells.append(f"{point.seconds / full.seconds:.3f}")
            except InfeasibleBudget:
                cells.append("-")
        taken = (time.process_time() - begin) / len(SHARES)
        yield name, cells, seconds if name == "optimal" else taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=1000)
    largest = parser.parse_args().largest
    chains = {"uniform, 32 stages": uniform(32)}
    for count in (100, 200, 1000):
        if count <= largest:
            chains[f"{count} stages"] = heterogeneous(count)
    print("# Plans of synthetic chains\n")
    print(__doc__.split("\n\n", 2)[2])
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("kmem", "numpy")
    )
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"])
    print(
        f"{datetime.date.today()}; {platform.machine()}, {os.cpu_count()} "
        f"cores; {versions}; Python {platform.python_version()}. Made by "
        f"`benchmarks/chains.py` at commit {commit.decode().strip()}.\n"
    )
    shares = " | ".join(f"{share:.1f}" for share in SHARES)
    print(f"| chain | plan | {shares} | seconds to plan |")
    print("|---" * (3 + len(SHARES)) + "|")
    for title, network in chains.items():
        for name, cells, seconds in rows(network):
            print(f"| {title} | {name} | {' | '.join(cells)} | {seconds:.2f} |")
            title = ""


if __name__ == "__main__":
    main()
