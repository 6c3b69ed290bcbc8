"""What a plan costs: kmem's solver beside what runtimes decide as they go.

    python benchmarks/planning.py --traces FOLDER > benchmarks/planning.md

FOLDER holds recorded steps (`*.log`, `*.log.gz`) in the format of the DTR
paper's simulator.

Each figure is the time of all operations that run, over that of the program,
for a budget that is a share of the program's own peak; every schedule is
replayed by `kmem.planning.simulate`. "-" means that no schedule was found. The
bound holds for every schedule that runs the operations for the first time in
the program's order; the gap is what lies between it and kmem's plan, 0 where
the plan is proved the best of its class.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable

from kmem.planning.bounds import peak_lower_bound
from kmem.planning.bounds import seconds_lower_bound
from kmem.planning.graph import Graph
from kmem.planning.graph import Operation
from kmem.planning.simulate import simulate
from kmem.planning.solvers.dag import solve
from kmem.planning.solvers.greedy import HEURISTICS
from kmem.planning.solvers.greedy import run_within
from kmem.planning.traces import read_trace

SHARES = (0.9, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2)
MEGABYTE = 10**6


@dataclasses.dataclass(frozen=True)
class Found:
    """A schedule, and what is known of it."""

    schedule: tuple[int, ...]
    is_optimal: bool = False
    lower_bound_seconds: float = 0.0


def by_kmem(graph: Graph, budget_bytes: int, seconds: float) -> Found | None:
    try:
        solution = solve(graph, budget_bytes, seconds_limit=seconds)
    except ValueError as error:
        print(f"  {error}", file=sys.stderr)
        return None
    return Found(
        solution.schedule, solution.is_optimal, solution.lower_bound_seconds
    )


def by_heuristic(name: str) -> Callable:
    def plan(graph: Graph, budget_bytes: int, seconds: float) -> Found | None:
        schedule = run_within(graph, budget_bytes, HEURISTICS[name])
        return None if schedule is None else Found(schedule)

    return plan


# Title -> a function of a graph, a budget and the seconds it may take.
COLUMNS: dict[str, Callable] = {
    "kmem": by_kmem,
    "h_DTR_eq": by_heuristic("h_DTR_eq"),
    "MSPS": by_heuristic("MSPS"),
}


def unit_chain(num_layers: int) -> Graph:
    """Checkmate's chain: all tensors and times are 1."""
    operations = []
    for index in range(num_layers + 1):
        inputs = (index - 1,) if index else ()
        operations.append(Operation("forward", inputs, (index,), 1.0))
    for index in range(num_layers - 1, -1, -1):
        made = len(operations)
        inputs = (made - 1, index)
        operations.append(
            Operation("backward", inputs, (made,), 1.0, recomputable=False)
        )
    return Graph(
        operations=tuple(operations),
        tensor_bytes=(MEGABYTE,) * len(operations),
        results=frozenset({len(operations) - 1}),
        num_forward=num_layers + 1,
    )


def transformer(num_blocks: int) -> Graph:
    """Equal blocks: attention and a feed-forward part, both residual.

    Sizes in MB and times are those of a block in proportion: what is four
    times as wide takes four times as much.
    """
    # Name, inputs (outputs of earlier rows, or -1 for what enters), MB, time,
    # and whose values the backward operation reads (99: its own output).
    rows = (
        ("norm", (-1,), 4, 1, (-1,)),
        ("query", (0,), 4, 8, (0,)),
        ("key", (0,), 4, 8, (0,)),
        ("value", (0,), 4, 8, (0,)),
        ("scores", (1, 2), 16, 8, (1, 2)),
        ("softmax", (4,), 16, 2, (99,)),
        ("dropout", (5,), 16, 2, ()),
        ("mix", (6, 3), 4, 8, (6, 3)),
        ("project", (7,), 4, 8, (7,)),
        ("add", (8, -1), 4, 1, ()),
        ("norm", (9,), 4, 1, (9,)),
        ("expand", (10,), 16, 32, (10,)),
        ("gelu", (11,), 16, 2, (11,)),
        ("contract", (12,), 4, 32, (12,)),
        ("add", (13, 9), 4, 1, ()),
    )
    sizes, operations, blocks = [4 * MEGABYTE], [], []

    def make(name, inputs, megabytes, seconds):
        sizes.append(megabytes * MEGABYTE)
        made = len(sizes) - 1
        operations.append(
            Operation(name, tuple(dict.fromkeys(inputs)), (made,), seconds)
        )
        return made

    enters = 0
    for _ in range(num_blocks):
        values: dict[int, int] = {-1: enters}
        for row, (name, inputs, megabytes, seconds, _) in enumerate(rows):
            read = [values[i] for i in inputs]
            values[row] = make(name, read, megabytes, float(seconds))
        blocks.append(values)
        enters = values[len(rows) - 1]
    num_forward = len(operations)
    leaves = make("loss", (enters,), 4, 1.0)
    for values in reversed(blocks):
        shares: dict[int, list[int]] = {len(rows) - 1: [leaves]}
        for row in range(len(rows) - 1, -1, -1):
            name, inputs, _, seconds, kept = rows[row]
            read = [values[row if i == 99 else i] for i in kept]
            gradients = shares[row]
            for source in inputs:
                size = sizes[values[source]] // MEGABYTE
                made = make(
                    f"{name}, backward", [*read, *gradients], size, seconds
                )
                shares.setdefault(source, []).append(made)
        leaves = make("add, backward", shares[-1], 4, 1.0)
    return Graph(
        operations=tuple(operations),
        tensor_bytes=tuple(sizes),
        constants=frozenset({0}),
        results=frozenset({leaves}),
        num_forward=num_forward,
    )


SYNTHETIC = {
    "unit chain, 16 layers": lambda: unit_chain(16),
    "unit chain, 64 layers": lambda: unit_chain(64),
    "transformer, 12 blocks": lambda: transformer(12),
    "transformer, 70 blocks": lambda: transformer(70),
}


def graphs(arguments) -> dict[str, Callable[[], Graph]]:
    found = {} if arguments.traces_only else dict(SYNTHETIC)
    if arguments.traces:
        for path in sorted(pathlib.Path(arguments.traces).glob("*.log*")):
            name = path.name.partition(".")[0]
            found[f"{name} (trace)"] = lambda path=path: read_trace(path)
    if arguments.names:
        wanted = arguments.names
        found = {k: v for k, v in found.items() if any(w in k for w in wanted)}
    return found


def print_table(name: str, graph: Graph, arguments) -> None:
    program = simulate(graph, graph.program)
    least = peak_lower_bound(graph) / program.peak_bytes
    print(
        f"\n## {name}\n\n{len(graph.operations)} operations, peak "
        f"{program.peak_bytes / MEGABYTE:.1f} MB; no schedule needs less than "
        f"{least:.3f} of it.\n"
    )
    titles = ["budget", *COLUMNS, "bound", "gap", "planned in"]
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    for share in arguments.shares:
        budget_bytes = int(share * program.peak_bytes)
        cells = [f"{share:g}"]
        bound = seconds_lower_bound(graph, budget_bytes) / program.seconds
        gap, passed = "-", 0.0
        for title, plan in COLUMNS.items():
            begin = time.perf_counter()
            found = plan(graph, budget_bytes, arguments.seconds)
            if title == "kmem":
                passed = time.perf_counter() - begin
            if found is None:
                cells.append("-")
                continue
            simulation = simulate(graph, found.schedule)
            if simulation.peak_bytes > budget_bytes:
                raise RuntimeError(f"{title} broke the budget on {name}")
            ratio = simulation.seconds / program.seconds
            cells.append(f"{ratio:.4f}")
            if title == "kmem":
                bound = found.lower_bound_seconds / program.seconds
                gap = "0" if found.is_optimal else f"{1 - bound / ratio:.2%}"
        cells += [f"{bound:.4f}", gap, f"{passed:.0f} s"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", help="folder of recorded steps")
    parser.add_argument("--traces-only", action="store_true")
    parser.add_argument("--names", nargs="+", help="parts of names to keep")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    arguments = parser.parse_args()
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("kmem", "ortools", "numpy")
    )
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"])
    print(
        "# Planning\n\n"
        f"{datetime.date.today()}; {platform.machine()}, {os.cpu_count()} "
        f"cores; {versions}; Python {platform.python_version()}. Made by "
        f"`benchmarks/planning.py` at commit {commit.decode().strip()}, in at "
        f"most {arguments.seconds:g} s a plan.\n\n" + __doc__.split("\n\n")[3]
    )
    for name, make in graphs(arguments).items():
        print_table(name, make(), arguments)


if __name__ == "__main__":
    main()
