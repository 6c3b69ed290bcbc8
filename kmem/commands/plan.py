"""`kmem plan`: plans a saved model's training step."""

import argparse

from kmem.commands import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: kmem plan model.keras --batch 32 --budget 2GB "
        "--plot plan.png --output plan.json"
    )
    arguments.add_model_and_batch(parser)
    parser.add_argument(
        "--budget",
        type=_budget,
        default="auto",
        help='the peak of a step: "2GB", a share such as 0.5 of the '
        'unplanned peak, or "auto" (default)',
    )
    parser.add_argument(
        "--solver", choices=("optimal", "sqrt"), default="optimal"
    )
    parser.add_argument(
        "--costs",
        choices=("measured", "flops"),
        default="measured",
        help="where times come from (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=arguments.file_ending(".json"),
        metavar="PATH",
        help="where to save the plan, as .json, for fit(remat=PATH)",
    )
    arguments.add_plot(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a plan; 0 if there is one."""
    from kmem.budget.planner import plan

    model, batch = arguments.load_model(args)
    how = {"solver": args.solver, "costs": args.costs, "verbose": 1}
    best = plan(model, batch, args.budget, **how)
    print(best.summary())
    if args.output is not None:
        best.save(args.output)
        print(f"saved: {args.output}")
    arguments.draw(best, args)
    return 0


def _budget(text: str) -> float | int | str:
    return text if text == "auto" else arguments.share_or_size(text)
