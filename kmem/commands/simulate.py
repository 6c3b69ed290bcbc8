"""`kmem simulate`: what DTR would cost a recorded step in less memory."""

import argparse

from kmem.base.bindings import AUTO
from kmem.base.bindings import HEURISTICS
from kmem.base.sizes import format_size
from kmem.commands import arguments

_ROW = "{:<16} {:>8} {:>10} {:>11} {:>11} {:>10}"


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.epilog = "Example: kmem simulate step.log.gz --budget 0.5 --best"
    parser.add_argument(
        "trace",
        type=arguments.existing_file,
        help="a recorded step: JSON lines, or .gz",
    )
    parser.add_argument(
        "--budget",
        type=arguments.share_or_size,
        default="0.5",
        help='the peak to keep: "2GB", or a share of the step\'s own peak '
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--heuristic", choices=(AUTO, *HEURISTICS), default=AUTO
    )
    parser.add_argument(
        "--best", action="store_true", help="run all heuristics, name the best"
    )
    parser.add_argument(
        "--sqrt-sampling",
        action="store_true",
        help="look at about the square root of the candidates",
    )
    parser.add_argument(
        "--pool",
        action="store_true",
        help="the memory is a pool of the budget's size: what is free in it "
        "may lie in pieces",
    )
    help = "of random choices"
    parser.add_argument("--seed", type=arguments.seed, default=0, help=help)


def run(args: argparse.Namespace) -> int:
    """Prints what the budget costs; 0 if it can be kept."""
    from kmem.dtr.simulator import BudgetFailed
    from kmem.dtr.simulator import simulate
    from kmem.dtr.trace import read_program

    try:
        program = read_program(args.trace)
    except ValueError as error:
        raise arguments.WrongArgumentError(str(error)) from error
    plain = simulate(program)
    budget_bytes = args.budget
    if isinstance(budget_bytes, float):
        budget_bytes = int(budget_bytes * plain.peak_bytes)
    print(
        f"{args.trace.name}: {program.num_operators} operators, "
        f"{program.seconds * 1e3:.1f} ms, peak {format_size(plain.peak_bytes)}"
    )
    share = budget_bytes / plain.peak_bytes if plain.peak_bytes else 1.0
    print(f"budget: {format_size(budget_bytes)}, {share:.3g} of the peak")
    head = "heuristic compute evictions recomputes peak accesses"
    print(_ROW.format(*head.split()))
    costs = {}
    for name in HEURISTICS if args.best else (args.heuristic,):
        try:
            found = simulate(
                program,
                budget_bytes,
                name,
                sqrt_sampling=args.sqrt_sampling,
                seed=args.seed,
                in_pool=args.pool,
            )
        except BudgetFailed as error:
            if not args.best:
                raise
            print(f"{name:<16} {'thrashes' if error.thrashed else 'no room'}")
            continue
        costs[name] = found.slowdown
        slowdown = f"{found.slowdown:.3f}x"
        counts = found.num_evictions, found.num_recomputations
        peak = format_size(found.peak_bytes), found.num_accesses
        print(_ROW.format(found.heuristic, slowdown, *counts, *peak))
    if args.best:
        best = min(costs, key=lambda name: costs[name], default="none")
        print(f"best: {best}")
    return 0 if costs else 1
