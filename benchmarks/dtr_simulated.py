"""What DTR costs recorded steps: kmem's core beside the paper's simulator.

    python benchmarks/dtr_simulated.py TRACE... > benchmarks/dtr_simulated.md

Each figure is the time of all operators that ran, over that of the program,
for a budget that is a share of the program's own peak. "OOM": nothing was left
to give up. ">2x": the limit of the paper's simulator was reached. The row
"paper's h_DTR_eq" is what that simulator gives on the same trace with the same
budget; best is kmem's cheapest heuristic for each budget, and auto what is
chosen if none is named, with the time that all seven choices take.
"""

import argparse
import datetime
import pathlib
import platform
import time

from kmem.base.bindings import AUTO
from kmem.base.versions import __version__
from kmem.dtr.simulator import HEURISTICS
from kmem.dtr.simulator import BudgetFailed
from kmem.dtr.simulator import simulate
from kmem.dtr.trace import Program
from kmem.dtr.trace import read_program

SHARES = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1)
# Measured with simrd (Kirisame et al., ICLR 2021) on its own traces.
PAPER = {
    "resnet32": "1.013 1.046 1.107 1.140 1.179 1.332 OOM",
    "unet": "1.033 1.085 1.159 OOM OOM OOM OOM",
    "transformer": "1.009 1.031 1.058 1.091 1.124 1.545 OOM",
    "lstm": "1.017 1.031 1.071 1.159 1.365 1.550 OOM",
}


def cost(program: Program, budget_bytes: int, **options) -> tuple[str, float]:
    """The figure to print, and to compare."""
    try:
        found = simulate(program, budget_bytes, slowdown_limit=2, **options)
    except BudgetFailed as error:
        return (">2x" if error.thrashed else "OOM"), float("inf")
    if found.peak_bytes > budget_bytes:
        raise RuntimeError(f"{options} broke the budget")
    return f"{found.slowdown:.3f}", found.slowdown


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_table(path: pathlib.Path) -> None:
    program = read_program(path)
    peak_bytes = simulate(program).peak_bytes
    name = path.name.partition(".")[0]
    print(
        f"\n## {name}\n\n{program.num_operators} operators, peak "
        f"{peak_bytes / 1e6:.1f} MB, {program.seconds * 1e3:.1f} ms.\n"
    )
    print_row("heuristic", *SHARES, "deciding, s")
    print("|" + "---|" * (len(SHARES) + 2))
    if name in PAPER:
        print_row("paper's h_DTR_eq", *PAPER[name].split(), "")
    best: list[tuple[float, str]] = [(float("inf"), "-")] * len(SHARES)
    for sqrt_sampling in (False, True):
        names = ("dtr_eq",) if sqrt_sampling else (*HEURISTICS, AUTO)
        for heuristic in names:
            begin = time.perf_counter()
            cells = []
            for i, share in enumerate(SHARES):
                text, slowdown = cost(
                    program,
                    int(share * peak_bytes),
                    heuristic=heuristic,
                    sqrt_sampling=sqrt_sampling,
                )
                cells.append(text)
                if (
                    slowdown < best[i][0]
                    and not sqrt_sampling
                    and heuristic != AUTO
                ):
                    best[i] = slowdown, f"{text} {heuristic}"
            seconds = time.perf_counter() - begin
            title = f"{heuristic}, sampled" if sqrt_sampling else heuristic
            print_row(title, *cells, f"{seconds:.2f}")
    print_row("best", *(text for _, text in best), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    print(
        "# DTR on recorded steps\n\n"
        f"{datetime.date.today()}, {platform.machine()}, kmem {__version__}, "
        f"Python {platform.python_version()}; `benchmarks/dtr_simulated.py` on "
        "four traces published with the DTR paper. Times over the program's "
        "own; budgets as shares of its peak."
    )
    for path in parser.parse_args().traces:
        print_table(path)


if __name__ == "__main__":
    main()
